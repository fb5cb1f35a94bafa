"""A binary heap in two arrays, for kernels: smallest key first, ties by smaller id.

`heapq` on lists of tuples works under numba too, but allocates a tuple per element: 2.5 times
slower on a million events.
"""

from __future__ import annotations

from jaxtyping import Float64, Int64
from numpy import ndarray

from pardnn.kernels.jit import helper


@helper
def heap_push(
    keys: Float64[ndarray, " c"], ids: Int64[ndarray, " c"], size: int, key: float, item: int
) -> int:
    """Add an item to the heap in `keys[:size]`, `ids[:size]`; return its new size. O(log size).

    Args:
        keys: Of the items.
        ids: The items.
        size: Number of items.
        key: Of the new item.
        item: The new item.
    """
    at = size
    while at > 0:
        parent = (at - 1) >> 1
        if keys[parent] < key or (keys[parent] == key and ids[parent] < item):
            break
        keys[at] = keys[parent]
        ids[at] = ids[parent]
        at = parent
    keys[at] = key
    ids[at] = item
    return size + 1


@helper
def heap_pop(keys: Float64[ndarray, " c"], ids: Int64[ndarray, " c"], size: int) -> int:
    """Remove the top, which the caller has read at index 0; return the new size. O(log size).

    Args:
        keys: Of the items.
        ids: The items.
        size: Number of items.
    """
    size -= 1
    key, item = keys[size], ids[size]
    at = 0
    while True:
        child = 2 * at + 1
        if child >= size:
            break
        right = child + 1
        if right < size and (
            keys[right] < keys[child] or (keys[right] == keys[child] and ids[right] < ids[child])
        ):
            child = right
        if key < keys[child] or (key == keys[child] and item < ids[child]):
            break
        keys[at] = keys[child]
        ids[at] = ids[child]
        at = child
    keys[at] = key
    ids[at] = item
    return size
