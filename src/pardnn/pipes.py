"""Reading and writing what may be no plain file: a pipe, or a device, without waiting forever."""

from __future__ import annotations

import errno
import io
import os
import select
import stat
from pathlib import Path

#: Seconds for the first byte of a pipe: what writes it may compute first.
PIPE_S = 60.0


def opened(path: Path) -> io.BufferedReader:
    """Open a file to read; a pipe once something comes through it.

    Args:
        path: Of a file, a device or a pipe.

    Raises:
        OSError: ETIMEDOUT, if nothing does within `PIPE_S`: a named pipe may have no writer.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    stream = os.fdopen(handle, "rb")
    try:
        if stat.S_ISFIFO(os.fstat(handle).st_mode):
            waiting = select.poll()
            waiting.register(handle, select.POLLIN | select.POLLHUP)
            if not waiting.poll(PIPE_S * 1000):
                why = f"nothing came through this pipe within {PIPE_S:g} s"
                raise OSError(errno.ETIMEDOUT, why)
        os.set_blocking(handle, True)
    except BaseException:
        stream.close()
        raise
    return stream


def content_of(stream: io.BufferedIOBase, limit: int) -> bytes:
    """Return what is left of a stream, and no more than one byte above a limit.

    Args:
        stream: To read.
        limit: In bytes.
    """
    parts, left = [], limit + 1
    # Not at once: `read(n)` takes memory for n bytes, which a rank's limit may not allow.
    while left and (part := stream.read(min(left, 1 << 20))):
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def write_through(path: Path, content: bytes) -> None:
    """Write into what is no plain file.

    Args:
        path: Of a device or a pipe.
        content: All that is written.

    Raises:
        OSError: ENXIO, where it is a pipe that no process reads: to open it would wait for one.
    """
    handle = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(handle, "wb") as stream:
        os.set_blocking(handle, True)
        stream.write(content)
