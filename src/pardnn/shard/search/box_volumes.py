"""Volumes of boxes, as array arithmetic over strategies, layouts and devices.

Devices exchange the needed elements that they do not own, so both objectives count with these few
functions.
Complexity: O(size of the broadcast arrays x rank).
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from jaxtyping import Bool, Int64
from numpy import ndarray


def volumes(boxes: Int64[ndarray, "*b rank 2"]) -> Int64[ndarray, "*b"]:
    """Return the number of elements of each box; 0 where it is empty."""
    lengths = boxes[..., 1] - boxes[..., 0]
    return np.multiply.reduce(np.maximum(lengths, 0, out=lengths), axis=-1)


def overlaps(
    one: Int64[ndarray, "*b rank 2"], other: Int64[ndarray, "*c rank 2"]
) -> Int64[ndarray, "*d rank 2"]:
    """Return the intersections of boxes, broadcast against each other."""
    low = np.maximum(one[..., 0], other[..., 0])
    found = np.empty((*low.shape, 2), dtype=np.int64)
    found[..., 0] = low
    np.minimum(one[..., 1], other[..., 1], out=found[..., 1])
    return found


def common_volumes(
    one: Int64[ndarray, "*b rank 2"], other: Int64[ndarray, "*c rank 2"]
) -> Int64[ndarray, "*d"]:
    """Return the number of elements that boxes have in common, broadcast against each other."""
    lengths = np.minimum(one[..., 1], other[..., 1])
    lengths -= np.maximum(one[..., 0], other[..., 0])
    return np.multiply.reduce(np.maximum(lengths, 0, out=lengths), axis=-1)


def same_boxes(boxes: Int64[ndarray, "*b n rank 2"]) -> Bool[ndarray, "*b n n"]:
    """Return for each pair of devices whether their boxes are equal."""
    return (boxes[..., :, None, :, :] == boxes[..., None, :, :, :]).all(axis=(-1, -2))


def partial_volumes(
    results: Int64[ndarray, "p n rank 2"],
    groups: Int64[ndarray, "p n"],
    owned: Int64[ndarray, "#p l n rank 2"],
) -> Int64[ndarray, "p l"]:
    """Return the elements of partial results, their own included, in the blocks that devices own.

    Equal results of one group count once.

    Args:
        results: Where the partial result of each device lies.
        groups: Number of each device's group, equal for those whose results are added up.
        owned: What each device owns, in l layouts.
    """
    equal = (results[:, :, None] == results[:, None]).all(axis=(-1, -2))
    equal &= groups[:, :, None] == groups[:, None]
    is_first = equal.argmax(axis=-1) == np.arange(results.shape[1])
    common = common_volumes(owned[:, :, :, None], results[:, None, None]).sum(axis=2)
    return (common * is_first[:, None]).sum(axis=-1)


@lru_cache(maxsize=1024)
def group_numbers(reduced: tuple[bool, ...], axis_sizes: tuple[int, ...]) -> Int64[ndarray, " n"]:
    """Return a number per device, equal for devices whose results make up one partial result."""
    number = np.zeros(tuple(axis_sizes), dtype=np.int64)
    for axis, (flag, size) in enumerate(zip(reduced, axis_sizes, strict=True)):
        if flag:
            shape = [1] * len(axis_sizes)
            shape[axis] = size
            number = number * size + np.arange(size).reshape(shape)
    return number.reshape(-1)
