"""SHA-256 on a thread beside the reading or writing: hashlib lets go of the interpreter's lock."""

from __future__ import annotations

import hashlib
from concurrent.futures import Future, ThreadPoolExecutor

#: Less is done at once: handing it to the thread would take longer.
_MIN_BYTES = 256 << 10


class Checksum:
    """Checksums of one stream after the other; `close` ends the thread.

    Args:
        is_beside: Use a thread; else the caller's own time.
    """

    def __init__(self, *, is_beside: bool = True) -> None:
        pool = ThreadPoolExecutor(1, thread_name_prefix="pardnn-checksum") if is_beside else None
        self._pool = pool
        self._digest = hashlib.sha256()
        self._pending: Future[None] | None = None

    def close(self) -> None:
        """End the thread."""
        if self._pool is not None:
            self._pool.shutdown()

    def add(self, data: memoryview) -> None:
        """Add bytes, which must stay as they are until the next call has returned."""
        self._wait()
        if self._pool is None or len(data) < _MIN_BYTES:
            self._digest.update(data)
        else:
            self._pending = self._pool.submit(self._digest.update, data)

    def take(self) -> str:
        """Return the checksum of what was added, in hexadecimal, and begin the next one."""
        self._wait()
        digest, self._digest = self._digest, hashlib.sha256()
        return digest.hexdigest()

    def _wait(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()
