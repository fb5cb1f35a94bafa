"""Fenwick's binary indexed tree: prefix sums under updates, O(log n) each.

Reference: Fenwick, "A new data structure for cumulative frequency tables", SP&E 1994.
"""

from __future__ import annotations

import numba
from jaxtyping import Float64
from numpy import ndarray


@numba.njit(cache=True)
def fenwick_add(tree: Float64[ndarray, " m"], index: int, amount: float) -> None:
    """Add `amount` to element `index`."""
    at = index + 1
    while at < len(tree):
        tree[at] += amount
        at += at & -at


@numba.njit(cache=True)
def fenwick_sum(tree: Float64[ndarray, " m"], end: int) -> float:
    """Return the sum of elements 0 to end - 1."""
    total = 0.0
    while end > 0:
        total += tree[end]
        end -= end & -end
    return total
