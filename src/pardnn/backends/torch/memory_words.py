"""Words of memory at many addresses, read at once.

Python reads one attribute of one object at a time; a step's guards have thousands. NumPy reads all
of them in one loop, so the processor fetches many lines of memory at once.
"""

from __future__ import annotations

import ctypes
import functools
import mmap

import numpy as np

#: The type of a word: 8 bytes, like a pointer, a size or a dictionary's version.
WORD = ctypes.c_uint64
WORD_BYTES = ctypes.sizeof(WORD)
#: Bytes from the start of an object to its type: behind the count of references.
TYPE_OFFSET = object.__basicsize__ - WORD_BYTES


class Words:
    """The words at some addresses.

    Args:
        addresses: Addresses that are multiples of 8, whose memory has to be kept alive for reading.

    Attributes:
        addresses: As given.
        found: The words as last read, in the order of the addresses.
    """

    def __init__(self, addresses: np.ndarray) -> None:
        self.addresses = addresses
        first = int(addresses.min()) if len(addresses) else 0
        indices = (addresses - first) // WORD_BYTES
        # It spans all memory between them, of which only these words are read; or a dummy word.
        span = int(indices.max()) + 1 if len(addresses) else 0
        memory = (
            np.ctypeslib.as_array((WORD * span).from_address(first))
            if span
            else np.zeros(1, dtype=np.uint64)
        )
        # New memory for each read would cost more than the read: 45 of 85 us for 2,470 words.
        self._bytes = _outside(memory, WORD_BYTES * len(addresses))
        self.found = np.frombuffer(self._bytes, dtype=np.uint64)
        # Any mode but "raise" writes directly to `out`; no index is out of range.
        self._take = functools.partial(memory.take, indices, out=self.found, mode="clip")

    def read(self) -> bytearray | mmap.mmap:
        """Read the words into `found`; return its bytes, which the next call overwrites.

        They are to be compared with a `bytearray`, which compares contents with either type.
        """
        self._take()
        return self._bytes


def _outside(memory: np.ndarray, size: int) -> bytearray | mmap.mmap:
    """Return a buffer that is not between the first and the last word of some memory if possible.

    For one that is, NumPy takes the words to other memory first, which doubles the time of a read
    of 150 words. Small objects are far from memory that was mapped.

    Args:
        memory: The memory.
        size: Bytes of the buffer.
    """
    usual = bytearray(size)
    if not size or not np.may_share_memory(memory, np.frombuffer(usual, dtype=np.uint8)):
        return usual
    mapped = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    is_inside = np.may_share_memory(memory, np.frombuffer(mapped, dtype=np.uint8))
    return usual if is_inside else mapped
