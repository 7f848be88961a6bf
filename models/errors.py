"""What can be wrong with a checkpoint."""

from __future__ import annotations


class CheckpointError(Exception):
    """A checkpoint cannot be used; the message says which part, and what to do."""
