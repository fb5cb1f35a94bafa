"""How a CPU rank's tensors get their memory: large blocks from the system, and back at once.

Problem: a limit holds for what a process has of the system, so tensors that are freed must go back;
each new one then has fresh pages, which the system fills with zeros when they are first touched.
That takes 1.4 us per page of 4 KiB on one machine of ours: of a GPT-2 of 51 million parameters a
quarter of the step, and more than half of steps whose tensors are small.

Idea: tensors of 2 MiB and more lie on pages of 2 MiB, a quarter of the time per byte. torch does
that itself if `LARGE_PAGES` is set before it loads (`backends.large_pages`). Smaller blocks stay
with glibc. Its threshold above which a block has a mapping of its own grows with use: freed blocks
would stay in its heap and count, so it is pinned. Where a plan's limit has room for what a heap
wastes, small blocks are left in it (`keep_small_blocks`); elsewhere only those below 128 KiB. Costs
are measured as where there is room (`as_on_ranks`).
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

#: Blocks of at least this many bytes are returned to the system when they are freed.
MMAP_THRESHOLD_BYTES = 128 << 10
#: Blocks of fewer bytes may stay in the heap; those of more can lie on large pages.
SMALL_BYTES = 2 << 20
#: Bytes of a heap by the most bytes of small blocks that are live at once. torch asks for aligned
#: blocks, and a freed one is too small for the next of its own size. Of 24 random sequences of up
#: to 12 sizes, allocated as training steps do, 1.66 times was the most (glibc 2.36).
HEAP_GROWTH = 2.0
#: Where the threshold ends that glibc moves by itself; it trims its heap at twice that.
_GROWN_BYTES = 32 << 20
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX, _M_MMAP_MAX = -1, -3, -8, -4
_GIVEN_BACK = {_M_MMAP_THRESHOLD: MMAP_THRESHOLD_BYTES, _M_TRIM_THRESHOLD: MMAP_THRESHOLD_BYTES}
_SMALL_KEPT = _GIVEN_BACK | {_M_MMAP_THRESHOLD: SMALL_BYTES}

_is_pinned = False
_keeps: bool | None = None  # until a plan says


def pin_allocator() -> None:
    """Make glibc give freed tensors back to the system; before the first large allocation."""
    global _is_pinned
    _is_pinned = True
    _set({_M_MMAP_MAX: 1 << 20, _M_ARENA_MAX: 1} | (_SMALL_KEPT if _keeps else _GIVEN_BACK))


def keep_small_blocks(keeps: bool) -> None:
    """Leave freed blocks below `SMALL_BYTES` in the heap, where freed tensors have to go back.

    Args:
        keeps: Of this process' plans one that says no decides for all.
    """
    global _keeps
    _keeps = keeps and _keeps is not False
    if _is_pinned:
        _set(_SMALL_KEPT if _keeps else _GIVEN_BACK)


@contextlib.contextmanager
def as_on_ranks() -> Iterator[None]:
    """Give freed tensors back to the system as a rank with room does, while the context lasts."""
    if _is_pinned:
        yield
        return
    _set(_SMALL_KEPT)
    try:
        yield
    finally:
        # glibc no longer moves a threshold that was set once.
        _set({_M_MMAP_THRESHOLD: _GROWN_BYTES, _M_TRIM_THRESHOLD: 2 * _GROWN_BYTES})


def _set(options: dict[int, int]) -> None:
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # glibc's alone
        for option, value in options.items():
            libc.mallopt(option, value)
