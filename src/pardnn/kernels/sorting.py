"""Sorting the keys that planners sort by the million.

A stable sort of floats by comparison takes 20 times as long as numpy's sort of integers, which uses
vector instructions but is not stable. So a key becomes an integer with its position in the low
bits: no two are equal, and ties are in order on every processor.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float64, Int64
from numpy import ndarray

#: Keys above which they are sorted as integers.
MANY_KEYS = 20_000


def stable_order(key: Float64[ndarray, " n"]) -> Int64[ndarray, " n"]:
    """Return positions in the order of their keys, equal ones as they come. O(n log n).

    Above `MANY_KEYS`, keys count as equal that differ by less than 2**-40 of their range. So a key
    that never decreases along an edge still sorts a topological order into a topological order.

    Args:
        key: No NaN.
    """
    n = len(key)
    low, high = (float(key.min()), float(key.max())) if n > MANY_KEYS else (0.0, 0.0)
    if not 0 < high - low < np.inf:
        return np.argsort(key, kind="stable").astype(np.int64)
    shift = n.bit_length()
    most = 2.0 ** min(52, 63 - shift) - 1
    packed = ((key - low) * (most / (high - low))).astype(np.int64)
    packed <<= shift
    packed |= np.arange(n)
    packed.sort()
    packed &= (1 << shift) - 1
    return packed


def by_time(start: Float64[ndarray, " m"], finish: Float64[ndarray, " m"]) -> Int64[ndarray, " m"]:
    """Return positions sorted by start, then by finish, then by position. O(m log m).

    Args:
        start: Any numbers, such as seconds.
        finish: Any numbers, such as seconds.
    """
    if len(start) <= MANY_KEYS:
        return np.lexsort((finish, start))
    order = np.argsort(start)  # with vector instructions, ties in any order
    equal = start[order[1:]] == start[order[:-1]]
    tied = np.zeros(len(start), dtype=np.bool_)
    tied[1:] = equal
    tied[:-1] |= equal
    ties = np.sort(order[tied])
    order[tied] = ties[np.lexsort((finish[ties], start[ties]))]
    return order


def by_column(position: Int64[ndarray, " n"], column: Int64[ndarray, " n"]) -> Int64[ndarray, " n"]:
    """Return numbers 0 to n - 1 sorted by column, then by position.

    Args:
        position: A permutation of 0 to n - 1.
        column: Numbers of devices.
    """
    by_position = inverse_permutation(position)
    if int(column.max(initial=0)) > np.iinfo(np.int16).max:
        return by_position[np.argsort(column[by_position], kind="stable")]
    # 16 bits are sorted by digits.
    return by_position[np.argsort(column[by_position].astype(np.int16), kind="stable")]


def inverse_permutation(permutation: Int64[ndarray, " n"]) -> Int64[ndarray, " n"]:
    """Return the position of each number in a permutation of 0 to n - 1. O(n)."""
    inverse = np.empty(len(permutation), dtype=np.int64)
    inverse[permutation] = np.arange(len(permutation))
    return inverse
