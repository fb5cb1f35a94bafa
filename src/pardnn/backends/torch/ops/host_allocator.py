"""Memory of a CPU rank's tensors: large blocks come from the system and return to it at once.

Problem: a limit applies to the memory that a process has from the system, so freed tensors must be
given back; each new tensor then gets fresh pages, which the system fills with zeros at the first
touch. That took 1.4 us per page of 4 KiB on one machine: a quarter of the step for a GPT-2 of 51
million parameters, and more than half of steps whose tensors are small.

Idea: tensors of 2 MiB and more are on pages of 2 MiB, which take a quarter of the time per byte.
torch does that itself if `LARGE_PAGES` is set before it loads (`backends.large_pages`). Smaller
blocks stay with glibc. Its threshold above which a block has its own mapping grows with use: freed
blocks would then stay in its heap and count, so it is pinned to one of three tiers:

- 32 MiB, where it ends on its own, without a limit or while a limit has room (`keep_blocks`).
  No factor bounds how much such a heap wastes, so `runtime.memory.limits.HeapGuard` watches it.
- 2 MiB, if a plan's limit has room for what a heap of small blocks wastes (`keep_small_blocks`).
- 128 KiB otherwise.

Costs are measured in the first or the second of them (`as_on_ranks`).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import resource
from collections.abc import Callable, Iterator

#: Blocks of at least this many bytes are returned to the system when they are freed.
MMAP_THRESHOLD_BYTES = 128 << 10
#: Smaller blocks may stay in the heap; larger ones can be on large pages.
SMALL_BYTES = 2 << 20
#: Bytes of a heap by the most bytes of small blocks that are live at once. torch asks for aligned
#: blocks, and a freed one is too small for the next of its own size. Of 8,000 random sequences of
#: up to 12 sizes, allocated as training steps do, the worst took twice and 23 MiB (glibc 2.36), and
#: half of the allowance of a limit is there for that.
HEAP_GROWTH = 2.0
#: The largest threshold that glibc sets by itself; it trims its heap at twice that. Blocks of this
#: size never stay in the heap.
GROWN_BYTES = 32 << 20
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX, _M_MMAP_MAX = -1, -3, -8, -4
#: The largest value of an option.
_MOST = (1 << 31) - 1
_GIVEN_BACK = {_M_MMAP_THRESHOLD: MMAP_THRESHOLD_BYTES, _M_TRIM_THRESHOLD: MMAP_THRESHOLD_BYTES}
_SMALL_KEPT = _GIVEN_BACK | {_M_MMAP_THRESHOLD: SMALL_BYTES}
#: As glibc does by itself; the end of a step must not trim what the next one needs.
_GROWN = {_M_MMAP_THRESHOLD: GROWN_BYTES, _M_TRIM_THRESHOLD: 2 * GROWN_BYTES}
_KEPT = {_M_MMAP_THRESHOLD: GROWN_BYTES, _M_TRIM_THRESHOLD: _MOST}

_is_pinned = False
_keeps: bool | None = None  # until a plan decides
_keeps_all = False
_measured: int | None = None  # the threshold while costs are measured


def pin_allocator() -> None:
    """Make glibc give freed tensors back to the system; before the first large allocation."""
    global _is_pinned
    _is_pinned = True
    _set({_M_MMAP_MAX: 1 << 20, _M_ARENA_MAX: 1} | _tier())


def grow_heap() -> None:
    """Leave freed blocks below `GROWN_BYTES` in the heap of a process that has no limit.

    glibc does so itself once such a large block has been freed. Before that, it trims its heap at
    twice the largest block so far, and each step gets that memory anew: 3,500 pages in a step of 75
    ms.
    """
    if not _is_pinned:
        _set(_GROWN)


def keep_small_blocks(keeps: bool) -> None:
    """Leave freed blocks below `SMALL_BYTES` in the heap even if freed tensors must go back.

    Args:
        keeps: Whether to do so; a single plan of this process that says no decides for all.
    """
    global _keeps
    _keeps = keeps and _keeps is not False
    if _is_pinned:
        _set(_tier())


def keep_blocks(keeps_all: bool) -> None:
    """Leave freed blocks below `GROWN_BYTES` in the heap, or stop doing so.

    A process that gives back small blocks gives back all blocks.
    """
    global _keeps_all
    if keeps_all != _keeps_all:
        _keeps_all = keeps_all
        if _is_pinned:
            _set(_tier())


def is_pinned() -> bool:
    """Whether freed tensors of this process go back, as its limit requires."""
    return _is_pinned


def heap_end() -> int:
    """Return the address where the heap ends, which moves as the heap grows."""
    return _sbrk()(0)


def allocated_bytes() -> int | None:
    """Return the bytes that glibc's allocator has from the system; None if it does not say."""
    if (found := _mallinfo()) is None:
        return None
    info = found()
    return info.arena + info.hblkhd


@contextlib.contextmanager
def as_on_ranks(*, keeps: bool) -> Iterator[None]:
    """Treat freed tensors as ranks do while the context lasts; on a rank, nothing changes.

    Args:
        keeps: Whether all stay in the heap, as without a limit; False keeps only small ones.
    """
    global _measured
    if _is_pinned:
        yield
        return
    _measured = GROWN_BYTES if keeps else SMALL_BYTES
    _set(_KEPT | {_M_MMAP_THRESHOLD: _measured})
    try:
        yield
    finally:
        _measured = None
        grow_heap()  # glibc no longer moves a threshold once set


def keep_next(keeps: bool) -> None:
    """While costs are measured, keep what the next calls allocate, like fixed places.

    If the process has a limit, nothing is kept, since a heap of large blocks grows.

    Args:
        keeps: Whether the calls' tensors have places.
    """
    bound, _ = resource.getrlimit(resource.RLIMIT_DATA)
    if _measured is not None and bound == resource.RLIM_INFINITY:
        _set({_M_MMAP_THRESHOLD: _MOST if keeps else _measured})


@functools.cache
def _sbrk() -> Callable[[int], int]:
    found = ctypes.CDLL(None).sbrk
    found.argtypes, found.restype = [ctypes.c_ssize_t], ctypes.c_void_p
    return found


class _MallInfo(ctypes.Structure):
    """`struct mallinfo2`: the heap's bytes come first, those of mapped blocks fifth."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks",
            "fordblks", "keepcost",
        )
    )  # fmt: skip


@functools.cache
def _mallinfo() -> Callable[[], _MallInfo] | None:
    found = getattr(ctypes.CDLL(None), "mallinfo2", None)  # glibc 2.33
    if found is not None:
        found.restype = _MallInfo
    return found


def _tier() -> dict[int, int]:
    if not _keeps:
        return _GIVEN_BACK
    return _KEPT if _keeps_all else _SMALL_KEPT


def _set(options: dict[int, int]) -> None:
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # only in glibc
        for option, value in options.items():
            libc.mallopt(option, value)
