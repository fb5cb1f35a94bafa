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
)


def shortage(error: Exception) -> FileError | None:
    """Return what to tell of an error that comes of too little disk, memory or open files.

    Args:
        error: Of any kind, one that no part of the package has told of.
    """
    said = str(error).lower()
    is_short = isinstance(error, MemoryError) or (
        isinstance(error, OSError | ImportError | RuntimeError)
        and (getattr(error, "errno", None) in _SHORT or any(text in said for text in _SAID))
    )
    if not is_short:
        return None
    what = str(error).partition("\n")[0] or "out of memory"
    return FileError(
        f"the system has too little room: {what}.\nFree disk space (TMPDIR names another temporary"
        " folder), memory or open files (`ulimit -a` shows the limits).",
        code="E413",
    )
