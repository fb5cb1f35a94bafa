"""Words of memory at many addresses, read at once.

Python reads one attribute of one object at a time; a step's guards hold thousands. NumPy reads all
of them in one loop, and the processor waits for many lines of memory together.
"""

from __future__ import annotations

import ctypes

import numpy as np

#: What a word is: 8 bytes, as a pointer, a size or a dictionary's version is.
WORD = ctypes.c_uint64
WORD_BYTES = ctypes.sizeof(WORD)
#: Bytes from the start of an object to its type: behind the count of references.
TYPE_OFFSET = object.__basicsize__ - WORD_BYTES


class Words:
    """The words at some addresses.

    Args:
        addresses: Bytes, multiples of 8. What lies there has to be kept alive while it is read.
    """

    def __init__(self, addresses: np.ndarray) -> None:
        first = int(addresses.min()) if len(addresses) else 0
        self._indices = (addresses - first) // WORD_BYTES
        # All memory between them, of which only these words are read.
        span = int(self._indices.max()) + 1 if len(addresses) else 0
        self._memory = (
            np.ctypeslib.as_array((WORD * span).from_address(first))
            if span
            else np.zeros(0, dtype=np.uint64)
        )

    def read(self) -> np.ndarray:
        """Return the words as they are now, in the order of the addresses."""
        return self._memory.take(self._indices)
