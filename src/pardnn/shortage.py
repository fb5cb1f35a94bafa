"""What the system has too little of: told as that, not as a bug of ours."""

from __future__ import annotations

import errno

from pardnn.errors import FileError

_SHORT = {errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM}
#: What Python, the loader of libraries and gloo say, without a number.
_SAID = (
    "no usable temporary directory",
    "failed to map segment",
    "cannot allocate memory",
    "too many open files",
    "error return without exception set",
)


def shortage(error: Exception) -> FileError | None:
    """Return what to tell of an error that comes of too little disk, memory or open files.

    Args:
        error: Of any kind, one that no part of the package has told of.
    """
    short: BaseException | None = error
    while short is not None and not _is_short(short):
        short = short.__cause__ or short.__context__  # llvmlite tells again that it was not loaded
    if short is None:
        return None
    what = str(short).partition("\n")[0] or "out of memory"
    return FileError(
        f"the system has too little room: {what}.\nFree disk space (TMPDIR names another temporary"
        " folder), memory or open files (`ulimit -a` shows the limits).",
        code="E413",
    )


def _is_short(error: BaseException) -> bool:
    said = str(error).lower()
    return isinstance(error, MemoryError) or (
        isinstance(error, OSError | ImportError | RuntimeError | SystemError)
        and (getattr(error, "errno", None) in _SHORT or any(text in said for text in _SAID))
    )
