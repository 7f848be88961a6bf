"""Whether results can be written where they are asked for, which is found out before they are made."""

from __future__ import annotations

import os
from pathlib import Path

from training.errors import ConfigError


def unusable(folder: Path) -> str | None:
    """Why there can be no folder at this path, with files of ours in it; None where there can."""
    there = next(place for place in (folder, *folder.parents) if os.path.lexists(place))
    if not there.is_dir():
        return f"{there} is no folder"
    if not os.access(there, os.W_OK | os.X_OK):
        return f"{there} cannot be written to"
    return None


def check_folders(out: Path, cache: Path) -> None:
    """Raise ConfigError where there can be no output, or no cache; one that is there may be for reading alone."""
    if reason := unusable(out):
        raise ConfigError(f"--out {out}: {reason}")
    if not cache.is_dir() and (reason := unusable(cache)):
        raise ConfigError(f"--cache {cache}: {reason}")
