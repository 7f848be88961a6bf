"""Files that are on the disk, whole, or not there at all, whatever ends the program."""

from __future__ import annotations

import glob
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

OLD = 3600.0
"""Seconds after which nobody writes any more in a temporary folder that others may share: what is written there was made before."""


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Where to write what is to stand at ``path`` once it is on the disk; nothing is left of what fails."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        flush(temporary)
        os.replace(temporary, path)
    except Exception:
        temporary.unlink(missing_ok=True)
        raise


def flush(path: Path) -> None:
    """Wait until a file is on the disk; a rename may otherwise be there before what it names."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def workshop_beside(out: Path) -> AbstractContextManager[Path]:
    """A workshop for ``out``, in its folder; under a name that is nobody else's there, as old ones are deleted."""
    return workshop(out.parent, f".{out.name}.moaserve-")


@contextmanager
def workshop(parent: Path, prefix: str, *, shared: bool = True) -> Iterator[Path]:
    """A new folder in ``parent``, gone at the end if it is still there, and what killed programs left under this ``prefix`` before.

    Where ``parent`` is ``shared`` with other programs, only what is old.
    """
    for left in parent.glob(f"{glob.escape(prefix)}*"):
        # Another may have done the same by now.
        if not shared or (left.exists() and time.time() - left.stat().st_mtime > OLD):
            shutil.rmtree(left, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(dir=parent, prefix=prefix))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
