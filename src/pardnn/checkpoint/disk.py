"""Writing that lasts: every call of the system that a checkpoint needs, each followed by its sync.

A file is durable when its bytes and the entry in its directory are. Short writes are continued.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from pardnn import files

#: What is handed to the system at once: then the disk writes it while the next is made.
_WRITE_BYTES = 16 << 20
#: After so many bytes the system writes them out: one sync at the end could take minutes, and the
#: other ranks would take this one for lost.
SYNC_BYTES = 256 << 20


def write_file(
    path: Path, chunks: Iterable[memoryview | bytes], tick: Callable[[], None] | None = None
) -> int:
    """Write a new file and wait until its bytes are durable.

    Args:
        path: Must not exist.
        chunks: Its content, one after the other; never all at once in memory.
        tick: Called after each part that was written, to tell that this process lives.

    Returns:
        Bytes written.

    Raises:
        OSError: With the system's reason; what was written so far stays.
    """
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        written = synced = 0
        for chunk in chunks:
            view = memoryview(chunk).cast("B")
            while len(view):
                count = os.write(handle, view[:_WRITE_BYTES])
                if count == 0:
                    raise OSError("the system wrote nothing")
                advise(handle, written, count, "DONTNEED")  # Linux begins to write it out
                view, written = view[count:], written + count
                if written - synced >= SYNC_BYTES:
                    os.fsync(handle)
                    synced = written
                if tick is not None:
                    tick()
        os.fsync(handle)
        return written
    finally:
        os.close(handle)


def advise(handle: int, start: int, size: int, advice: str) -> None:
    """Tell the system what a part of a file is for, where the system takes advice.

    Args:
        handle: Of the file.
        start: Of the part, bytes.
        size: Of the part, bytes.
        advice: "WILLNEED": read it now, in the background. "DONTNEED": write it out, likewise.
    """
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):
            os.posix_fadvise(handle, start, size, getattr(os, f"POSIX_FADV_{advice}"))


def replace_file(path: Path, content: bytes, temporary: Path) -> None:
    """Write a file by renaming a complete one: there is the old content or the new, never less.

    Args:
        path: Of the file.
        content: New.
        temporary: Name in the same directory that nobody else uses.
    """
    try:
        write_file(temporary, [content])
        files.rename(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def remove_tree(path: Path) -> None:
    """Remove a directory as far as the system allows."""
    shutil.rmtree(path, ignore_errors=True)
