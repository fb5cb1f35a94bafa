"""The graph as flat arrays: what kernels read.

Built once per graph, in O(ops + tensors + edges), C-contiguous int64, read-only. Numpy only: ranks
use these arrays and must not load a compiler.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64
from numpy import ndarray

NORMAL, RESIDUAL, REFERENCE = 0, 1, 2


class GraphArrays(NamedTuple):
    """Compressed sparse rows. `x_ptr[i]:x_ptr[i + 1]` is the slice of `x` that belongs to i.

    Tensors are numbered op by op, so the outputs of op i are `output_ptr[i]:output_ptr[i + 1]`.
    Repeated inputs of one op are merged: an op reads a tensor once.
    """

    output_ptr: Int64[ndarray, " n+1"]
    input_ptr: Int64[ndarray, " n+1"]
    input_tensor: Int64[ndarray, " e"]
    after_ptr: Int64[ndarray, " n+1"]
    after_op: Int64[ndarray, " a"]
    before_ptr: Int64[ndarray, " n+1"]  # reverse of after
    before_op: Int64[ndarray, " a"]
    consumer_ptr: Int64[ndarray, " t+1"]
    consumer_op: Int64[ndarray, " e"]
    tensor_op: Int64[ndarray, " t"]
    tensor_bytes: Int64[ndarray, " t"]  # of its storage, or of a message: `ir.span_bytes`
    tensor_alias: Int64[ndarray, " t"]  # the tensor it aliases; -1 for the owner of a storage
    tensor_owner: Int64[ndarray, " t"]  # the tensor that owns its storage
    workspace: Int64[ndarray, " n"]
    memory: Int64[ndarray, " n"]  # NORMAL, RESIDUAL or REFERENCE
    group: Int64[ndarray, " n"]  # dense group number; ops without a group have one of their own
    topological: Int64[ndarray, " n"]  # op numbers, each after all it depends on

    @property
    def num_ops(self) -> int:
        """Number of ops."""
        return len(self.workspace)

    @property
    def num_tensors(self) -> int:
        """Number of tensors."""
        return len(self.tensor_op)


def frozen(values: Sequence[int] | ndarray) -> Int64[ndarray, " n"]:
    """Return a contiguous read-only copy: kernels are compiled for that layout alone."""
    array = np.ascontiguousarray(values, dtype=np.int64)
    array.setflags(write=False)
    return array


def transposed(ptr: ndarray, index: ndarray, num_columns: int) -> tuple[ndarray, ndarray]:
    """Transpose compressed sparse rows; the rows of each column come in increasing order.

    Args:
        ptr: Where each row begins in `index`, and the end.
        index: Columns of each row.
        num_columns: Number of columns.
    """
    counts = np.bincount(index, minlength=num_columns)
    pointers = np.concatenate([[0], np.cumsum(counts)])
    row_of = np.repeat(np.arange(len(ptr) - 1), np.diff(ptr))
    return frozen(pointers), frozen(row_of[np.argsort(index, kind="stable")])


def owners_of(alias: Int64[ndarray, " t"]) -> Int64[ndarray, " t"]:
    """Return the tensor that owns each tensor's storage, given what each aliases (-1: nothing).

    Pointer jumping: O(t log of the longest chain of views).
    """
    owner = np.where(alias >= 0, alias, np.arange(len(alias)))
    while True:
        further = owner[owner]
        if np.array_equal(further, owner):
            return frozen(owner)
        owner = further


def op_edges(arrays: GraphArrays) -> Int64[ndarray, "pairs 2"]:
    """Distinct (predecessor, successor) pairs of ops, data and order edges together, sorted."""
    n = arrays.num_ops
    data = np.stack(
        [
            arrays.tensor_op[arrays.input_tensor],
            np.repeat(np.arange(n), np.diff(arrays.input_ptr)),
        ]
    )
    order = np.stack([arrays.after_op, np.repeat(np.arange(n), np.diff(arrays.after_ptr))])
    predecessor, successor = np.concatenate([data, order], axis=1)
    keys = predecessor * n + successor  # n < 2**31, so the product is exact
    keys.sort()  # `np.unique` hashes, which takes ten times as long
    keys = keys[np.diff(keys, prepend=-1) > 0]
    return np.stack([keys // n, keys % n], axis=1)


def topological_order(pairs: Int64[ndarray, "pairs 2"], num_ops: int) -> Int64[ndarray, " n"]:
    """Order of ops in which each follows its predecessors; shorter than n if there is a cycle.

    Kahn's algorithm with a stack would follow one branch; a queue keeps the order of the file
    within each level, so it depends on nothing but the graph. O(ops + edges).
    """
    if bool((pairs[:, 0] < pairs[:, 1]).all()):
        return np.arange(num_ops)
    missing = np.bincount(pairs[:, 1], minlength=num_ops).tolist()
    starts = np.concatenate([[0], np.cumsum(np.bincount(pairs[:, 0], minlength=num_ops))]).tolist()
    successors = pairs[np.argsort(pairs[:, 0], kind="stable"), 1].tolist()
    order = [op for op in range(num_ops) if missing[op] == 0]
    for op in order:  # grows while it is read
        for successor in successors[starts[op] : starts[op + 1]]:
            missing[successor] -= 1
            if missing[successor] == 0:
                order.append(successor)
    return np.array(order, dtype=np.int64)
