"""Segment trees in one array: values along a list, with range updates and range maxima.

Node i has the children 2i and 2i + 1; leaf p of a tree over `size` leaves (a power of two) is node
size + p. `add[i]` counts for the whole range of node i, `top[i]` is the largest value in it, the
`add` of its ancestors left out. Updates and queries walk both borders upward: O(log n), no
recursion.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Int64
from numpy import ndarray

from pardnn.kernels.jit import kernel

#: Below every number of bytes: the value of leaves that do not exist.
NOTHING = -(2**62)


class RangeMax(NamedTuple):
    """A segment tree over int64 values."""

    top: Int64[ndarray, " 2s"]
    add: Int64[ndarray, " 2s"]


def range_max(values: Int64[ndarray, " n"]) -> RangeMax:
    """Return a tree that holds `values`. O(n)."""
    size = 1
    while size < len(values):
        size *= 2
    tree = RangeMax(np.full(2 * size, NOTHING, dtype=np.int64), np.zeros(2 * size, dtype=np.int64))
    tree.top[size : size + len(values)] = values
    level = size
    while level > 1:
        level //= 2
        below = tree.top[2 * level : 4 * level]
        np.maximum(below[::2], below[1::2], out=tree.top[level : 2 * level])
    return tree


@kernel
def add_range(tree: RangeMax, begin: int, end: int, amount: int) -> None:
    """Add `amount` to the values at positions begin to end - 1.

    Args:
        tree: The tree.
        begin: First position.
        end: The position after the last.
        amount: What is added.
    """
    if begin >= end or amount == 0:
        return
    top, add = tree
    size = len(top) >> 1
    left, right = begin + size, end + size
    first, last = left, right - 1
    while left < right:
        if left & 1:
            top[left] += amount
            add[left] += amount
            left += 1
        if right & 1:
            right -= 1
            top[right] += amount
            add[right] += amount
        left >>= 1
        right >>= 1
    for leaf in (first, last):
        node = leaf >> 1
        while node >= 1:
            top[node] = max(top[2 * node], top[2 * node + 1]) + add[node]
            node >>= 1


@kernel
def max_range(tree: RangeMax, begin: int, end: int) -> int:
    """Return the largest value at positions begin to end - 1; `NOTHING` if there is none.

    Args:
        tree: The tree.
        begin: First position.
        end: The position after the last.
    """
    if begin >= end:
        return NOTHING
    top, add = tree
    size = len(top) >> 1
    left, right = begin + size, end - 1 + size
    best_left, best_right = top[left], top[right]
    while left >> 1 != right >> 1:
        if left & 1 == 0:
            best_left = max(best_left, top[left + 1])
        if right & 1 == 1:
            best_right = max(best_right, top[right - 1])
        left >>= 1
        right >>= 1
        best_left += add[left]
        best_right += add[right]
    best = max(best_left, best_right)
    node = left >> 1
    while node >= 1:
        best += add[node]
        node >>= 1
    return best


@kernel
def first_fitting(tree: RangeMax, begin: int, end: int, limit: int) -> int:
    """Return the smallest p >= begin so that no value at p to end - 1 exceeds `limit`.

    Args:
        tree: The tree.
        begin: First position.
        end: The position after the last.
        limit: Largest value that fits.
    """
    while begin < end:
        middle = (begin + end - 1) >> 1
        # The answer is monotone: if [middle, end) fits, look further left.
        if max_range(tree, middle, end) > limit:
            begin = middle + 1
        elif middle == begin or max_range(tree, begin, middle) <= limit:
            return begin
        else:
            end = middle
    return begin


@kernel
def last_fitting(tree: RangeMax, begin: int, end: int, limit: int) -> int:
    """Return the largest p <= end so that no value at begin to p - 1 exceeds `limit`.

    Args:
        tree: The tree.
        begin: First position.
        end: The position after the last.
        limit: Largest value that fits.
    """
    while begin < end:
        middle = (begin + end + 1) >> 1
        if max_range(tree, begin, middle) > limit:
            end = middle - 1
        else:
            begin = middle
    return begin
