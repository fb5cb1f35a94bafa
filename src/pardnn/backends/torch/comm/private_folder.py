"""Private folders for sockets and files of a run, below the system's temporary directory.

A killed process cannot remove its folder. So each folder contains a file that its process keeps
locked, and a process that makes a folder first removes those whose file is no longer locked. The
system drops a lock when its process ends, for whatever reason.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

PREFIX, LOCK = "pardnn-run-", "pardnn.lock"


@contextlib.contextmanager
def private_folder() -> Iterator[Path]:
    """Make a folder that only this user may enter, and remove it at the end.

    Raises:
        OSError: If it cannot be made.
    """
    _remove_abandoned()
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    handle = -1
    try:
        while not _is_at(handle, folder / LOCK):  # removed as abandoned before it was locked
            folder.mkdir(mode=0o700, exist_ok=True)
            if handle >= 0:
                os.close(handle)
            handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if handle >= 0:
            os.close(handle)


def _is_at(handle: int, path: Path) -> bool:
    """Whether an open file is the one at a path."""
    if handle < 0:
        return False
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(handle), path.stat())
    return False


def _remove_abandoned() -> None:
    """Remove the folders of this user's killed processes."""
    with contextlib.suppress(OSError):
        for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
            with contextlib.suppress(OSError):
                _remove_if_abandoned(folder)


def _remove_if_abandoned(folder: Path) -> None:
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        return
    handle = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(handle)
