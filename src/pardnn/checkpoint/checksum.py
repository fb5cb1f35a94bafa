"""Checksums on a thread beside the reading or writing: both let go of the interpreter's lock.

Every piece has two. CRC-32, 3.8 GB/s on one core, is compared whenever a piece is read: it finds
each run of wrong bits up to 32 long, and of all other damage what one in 4 billion leaves. SHA-256,
1.7 GB/s, tells a piece from every other: `pardnn checkpoint verify` compares it too. Reasons:
docs/decisions/026-two-checksums.md.
"""

from __future__ import annotations

import hashlib
import zlib
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

#: Less is done at once: handing it to the thread would take longer.
_MIN_BYTES = 256 << 10


class Sums(NamedTuple):
    """Checksums of some bytes.

    Attributes:
        crc32: As a number.
        sha256: In hexadecimal; empty where it was not asked for.
    """

    crc32: int
    sha256: str


class Checksum:
    """Checksums of one stream after the other; `close` ends the thread.

    Args:
        is_beside: Use a thread; else the caller's own time.
        with_sha256: Take SHA-256 beside CRC-32.
    """

    def __init__(self, *, is_beside: bool = True, with_sha256: bool = True) -> None:
        pool = ThreadPoolExecutor(1, thread_name_prefix="pardnn-checksum") if is_beside else None
        self._pool = pool
        self._with_sha256 = with_sha256
        self._crc32, self._sha256 = 0, hashlib.sha256()
        self._pending: Future[None] | None = None

    def close(self) -> None:
        """End the thread."""
        if self._pool is not None:
            self._pool.shutdown()

    def add(self, data: memoryview) -> None:
        """Add bytes, which must stay as they are until the next call has returned."""
        self._wait()
        if self._pool is None or len(data) < _MIN_BYTES:
            self._update(data)
        else:
            self._pending = self._pool.submit(self._update, data)

    def take(self) -> Sums:
        """Return the checksums of what was added, and begin the next ones."""
        self._wait()
        found = Sums(self._crc32, self._sha256.hexdigest() if self._with_sha256 else "")
        self._crc32, self._sha256 = 0, hashlib.sha256()
        return found

    def _update(self, data: memoryview) -> None:
        self._crc32 = zlib.crc32(data, self._crc32)
        if self._with_sha256:
            self._sha256.update(data)

    def _wait(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()
