"""Command lines to use, read and fork."""
