"""Whether a box of a buffer is one run of its memory."""

from __future__ import annotations

import functools
import math
from typing import Any

from pardnn.graph.ir import Tensor


def is_run(buffer: Tensor, shard: Tensor, box: Any) -> bool:
    """Whether a box of a new tensor is one run of memory that takes a shard's bytes in order.

    Args:
        buffer: The new tensor.
        shard: The shard, as it is sent.
        box: Where it goes: begin and end per dim.
    """
    sizes = tuple([end - begin for begin, end in box])
    return _is_run(_strides(buffer), _strides(shard), sizes)


@functools.lru_cache(maxsize=1 << 14)
def _is_run(buffer: tuple[int, ...], shard: tuple[int, ...], sizes: tuple[int, ...]) -> bool:
    step = 1
    for stride, size, _ in sorted(zip(buffer, sizes, range(len(sizes)), strict=True)):
        if size == 1:
            continue
        if stride != step:
            return False
        step *= size
    large = [dim for dim, size in enumerate(sizes) if size > 1]
    orders = [sorted(large, key=lambda d: (-s[d], d)) for s in (buffer, shard)]
    return orders[0] == orders[1]


def _strides(tensor: Tensor) -> tuple[int, ...]:
    if tensor.strides is not None:
        return tensor.strides
    shape = tensor.shape or ()
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
