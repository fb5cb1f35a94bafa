"""Fenwick's binary indexed tree: range sums under updates, O(log n) each.

One tree per column, row by row in memory: the sums of all columns are read together.

Reference: Fenwick, "A new data structure for cumulative frequency tables", SP&E 1994.
"""

from __future__ import annotations

from jaxtyping import Float64
from numpy import ndarray

from pardnn.kernels.jit import kernel


@kernel
def fenwick_add(tree: Float64[ndarray, "m k"], index: int, column: int, amount: float) -> None:
    """Add `amount` to element `index` of a column.

    Args:
        tree: The trees.
        index: The element.
        column: The tree.
        amount: What is added.
    """
    at = index + 1
    while at < len(tree):
        tree[at, column] += amount
        at += at & -at


@kernel
def fenwick_sums(
    tree: Float64[ndarray, "m k"], begin: int, end: int, sums: Float64[ndarray, " k"]
) -> None:
    """Fill the sum of elements begin to end - 1 of each column.

    Args:
        tree: The trees.
        begin: First element.
        end: The element after the last.
        sums: Filled.
    """
    sums[:] = 0.0
    while end > begin:
        for column in range(len(sums)):
            sums[column] += tree[end, column]
        end -= end & -end
    while begin > end:
        for column in range(len(sums)):
            sums[column] -= tree[begin, column]
        begin -= begin & -begin
