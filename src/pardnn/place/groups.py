"""Co-location groups: ops that no placement may tear apart.

What the graph names as groups, joined with what in-place writes need: the op that owns a written
storage, every op that makes an alias of it, and every op that writes it. Union-find,
O(ops + tensors) up to the inverse Ackermann function.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Int64
from numpy import ndarray

from pardnn.graph.csr import GraphArrays
from pardnn.sim.compiled import helper, kernel


def colocated(
    arrays: GraphArrays, overwrites: Int64[ndarray, "w 2"], *, with_views: bool = False
) -> Int64[ndarray, " n"]:
    """Return a dense group number per op, numbered by first member.

    Args:
        arrays: The graph.
        overwrites: From `place.schedule.first_overwrites`.
        with_views: Also join the views of storages that nothing writes, so that each storage is
            on one device, sent copies aside.
    """
    root = np.arange(arrays.num_ops)
    _union_kernel(arrays, overwrites, with_views, root)
    numbers = np.empty(arrays.num_ops, dtype=np.int64)
    _number_kernel(root, numbers)
    return numbers


@helper
def _find(root: ndarray, op: int) -> int:
    while root[op] != op:
        root[op] = root[root[op]]
        op = root[op]
    return op


@kernel
def _union_kernel(a: GraphArrays, overwrites: ndarray, with_views: bool, root: ndarray) -> None:
    n = len(root)
    first = np.full(n, -1, dtype=np.int64)
    for op in range(n):
        group = a.group[op]
        if first[group] < 0:
            first[group] = op
        root[_find(root, op)] = _find(root, first[group])
    written = np.zeros(len(a.tensor_op), dtype=np.bool_)
    for i in range(len(overwrites)):
        written[overwrites[i, 0]] = True
        root[_find(root, overwrites[i, 1])] = _find(root, a.tensor_op[overwrites[i, 0]])
    for t in range(len(a.tensor_op)):
        owner = t
        while a.tensor_alias[owner] >= 0:
            owner = a.tensor_alias[owner]
        if owner != t and (with_views or written[owner]):
            root[_find(root, a.tensor_op[t])] = _find(root, a.tensor_op[owner])


@kernel
def _number_kernel(root: ndarray, numbers: ndarray) -> None:
    number_of = np.full(len(root), -1, dtype=np.int64)
    count = 0
    for op in range(len(root)):
        top = _find(root, op)
        if number_of[top] < 0:
            number_of[top] = count
            count += 1
        numbers[op] = number_of[top]
