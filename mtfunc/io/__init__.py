"""Checkpoints on disk."""

from mtfunc.io.checkpoint import manifest, restore, save

__all__ = ["manifest", "restore", "save"]
