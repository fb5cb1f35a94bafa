"""One block of memory per rank in which tensors have fixed places, kept from step to step.

Between steps it does not count towards a limit and belongs to the system: nobody can read or write
it, so `RLIMIT_DATA` leaves it out, and the system may take its pages (`MADV_FREE`). Pages that it
does not take are there for the next step. Forked processes do not have it.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import sys
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from pardnn.backends.large_pages import has_large_pages
from pardnn.graph.ir import Tensor, span_bytes

_CLOSED, _OPEN = 0, mmap.PROT_READ | mmap.PROT_WRITE
#: The block's size is a multiple of this.
_LARGE_PAGE = 2 << 20
#: Longest time for which another thread may hold the frames of this one, seconds; one let go within
#: 0.01 s, with ten processes on two cores.
_FRAMES_S = 1.0


class Layout(NamedTuple):
    """The layout of a rank's memory while one program runs.

    Attributes:
        bytes: The size of the arena.
        most_bytes: The size that it may have because another program needs more; None for any size.
        places: Tensors that have a place, each with its offset.
        made_bytes: Most bytes that the step otherwise makes, live at once.
        has_room: Whether freed blocks below 2 MiB stay in the heap.
    """

    bytes: int
    most_bytes: int | None
    places: tuple[tuple[Tensor, int], ...]
    made_bytes: int
    has_room: bool


class Arena:
    """The memory of a rank's fixed places; its programs take turns.

    Attributes:
        places: Storages for the tensors of the layout that it is open for, by name.
    """

    def __init__(self) -> None:
        self.places: dict[str, torch.Tensor] = {}
        self._layout: Layout | None = None
        self._memory: mmap.mmap | None = None
        self._size = 0

    def open(self, layout: Layout) -> None:
        """Provide the places of a layout; none if the system has no memory for them."""
        most = self._size if layout.most_bytes is None else layout.most_bytes
        is_enough = self._memory is not None and layout.bytes <= self._size <= most
        if not is_enough or layout is not self._layout:
            self.places, self._layout = {}, layout
        if not is_enough:
            self._memory, self._size = None, -(-layout.bytes // _LARGE_PAGE) * _LARGE_PAGE
            self._memory = _mapped(self._size) if self._size else None
        elif not self._protect(_OPEN):
            self.places, self._layout, self._memory = {}, None, None
        if self._memory is not None and not self.places:
            self.places = {t.name: _storage(self._memory, t, at) for t, at in layout.places}

    def check_freed(self, names: Sequence[str]) -> None:
        """Check that nothing refers to the places of these tensors any longer.

        A thread that looks at this one's frames (`users_line`) keeps their variables for a moment.
        """
        end = time.monotonic() + _FRAMES_S
        for place in (self.places[name].untyped_storage() for name in names if name in self.places):
            # One reference is the place's, one the variable `place`'s.
            while torch._C._storage_Use_Count(place._cdata) != 2:
                assert time.monotonic() < end, names
                time.sleep(1e-3)

    def close(self) -> None:
        """Leave the memory to the system, until it is opened again."""
        if self._memory is not None:
            self._memory.madvise(mmap.MADV_FREE)
            self._protect(_CLOSED)

    def _protect(self, access: int) -> bool:
        assert self._memory is not None
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        return _mprotect()(address, self._size, access) == 0


def _mapped(size: int) -> mmap.mmap | None:
    if not sys.platform.startswith("linux"):
        return None
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:
        return None
    memory.madvise(mmap.MADV_DONTFORK)
    if has_large_pages():
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _storage(memory: mmap.mmap, tensor: Tensor, at: int) -> torch.Tensor:
    dtype = getattr(torch, tensor.dtype or "float32")
    elements = span_bytes(tensor) // dtype.itemsize
    return torch.frombuffer(memory, dtype=dtype, count=elements, offset=at)


@functools.cache
def _mprotect() -> Callable[[int, int, int], int]:
    found = ctypes.CDLL(None).mprotect
    found.argtypes, found.restype = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int], ctypes.c_int
    return found
