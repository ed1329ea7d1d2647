"""Checkpoints on disk."""

from mtfunc.io.checkpoint import checkpoints, manifest, restore, save

__all__ = ["checkpoints", "manifest", "restore", "save"]
