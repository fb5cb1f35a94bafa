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

from pardnn.graph.ir import Op, alias_of, storage_owners

NORMAL, RESIDUAL, REFERENCE = 0, 1, 2
_MEMORY_CODE = {"normal": NORMAL, "residual": RESIDUAL, "reference": REFERENCE}


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
    tensor_bytes: Int64[ndarray, " t"]
    tensor_alias: Int64[ndarray, " t"]  # the tensor it aliases; -1 for the owner of a storage
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


def _frozen(values: Sequence[int] | ndarray) -> ndarray:
    array = np.ascontiguousarray(values, dtype=np.int64)
    array.setflags(write=False)
    return array


def _pointers(lengths: Sequence[int]) -> ndarray:
    return _frozen(np.concatenate([[0], np.cumsum(np.array(lengths, dtype=np.int64))]))


def _rows(rows: Sequence[Sequence[int]]) -> tuple[ndarray, ndarray]:
    return _pointers([len(row) for row in rows]), _frozen([i for row in rows for i in row])


def transposed(ptr: ndarray, index: ndarray, num_columns: int) -> tuple[ndarray, ndarray]:
    """Transpose compressed sparse rows; the rows of each column come in increasing order."""
    counts = np.bincount(index, minlength=num_columns)
    pointers = np.concatenate([[0], np.cumsum(counts)])
    row_of = np.repeat(np.arange(len(ptr) - 1), np.diff(ptr))
    return _frozen(pointers), _frozen(row_of[np.argsort(index, kind="stable")])


def op_edges(arrays: GraphArrays) -> Int64[ndarray, "pairs 2"]:
    """Distinct (earlier op, later op) pairs, data and order edges together, sorted."""
    n = arrays.num_ops
    data = np.stack(
        [
            arrays.tensor_op[arrays.input_tensor],
            np.repeat(np.arange(n), np.diff(arrays.input_ptr)),
        ]
    )
    order = np.stack([arrays.after_op, np.repeat(np.arange(n), np.diff(arrays.after_ptr))])
    earlier, later = np.concatenate([data, order], axis=1)
    keys = np.unique(earlier * n + later)  # n < 2**31, so the product is exact
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


def _groups(ops: Sequence[Op]) -> ndarray:
    numbers: dict[str | int, int] = {}
    keys = (op.group if op.group is not None else i for i, op in enumerate(ops))
    return _frozen([numbers.setdefault(key, len(numbers)) for key in keys])


def _aliases(ops: Sequence[Op], tensor_id: dict[str, int]) -> ndarray:
    """Alias of each tensor: the input of its op through which it shares the storage.

    A file may name the owner of the storage instead of the view that the op reads; on a device
    that received the view, the storage is the view's copy, so the input is what matters.
    """
    owners: dict[str, str | None] | None = None
    aliases: list[int] = []
    for op in ops:
        for tensor in op.outputs:
            shared = alias_of(op, tensor)
            if shared is not None and shared not in op.inputs:
                owners = owners or storage_owners(ops)
                owner = owners[shared]
                shared = next(name for name in op.inputs if owners[name] == owner)
            aliases.append(-1 if shared is None else tensor_id[shared])
    return _frozen(aliases)


def build_arrays(ops: Sequence[Op]) -> GraphArrays:
    """Flatten checked ops; `check_ops` has proven that every name resolves."""
    tensors = [tensor for op in ops for tensor in op.outputs]
    tensor_id = {tensor.name: i for i, tensor in enumerate(tensors)}
    op_id = {op.name: i for i, op in enumerate(ops)}
    output_ptr = _pointers([len(op.outputs) for op in ops])
    input_ptr, input_tensor = _rows(
        [list(dict.fromkeys(tensor_id[t] for t in op.inputs)) for op in ops]
    )
    after_ptr, after_op = _rows([list(dict.fromkeys(op_id[o] for o in op.after)) for op in ops])
    before_ptr, before_op = transposed(after_ptr, after_op, len(ops))
    consumer_ptr, consumer_op = transposed(input_ptr, input_tensor, len(tensors))
    arrays = GraphArrays(
        output_ptr=output_ptr,
        input_ptr=input_ptr,
        input_tensor=input_tensor,
        after_ptr=after_ptr,
        after_op=after_op,
        before_ptr=before_ptr,
        before_op=before_op,
        consumer_ptr=consumer_ptr,
        consumer_op=consumer_op,
        tensor_op=_frozen(np.repeat(np.arange(len(ops)), np.diff(output_ptr))),
        tensor_bytes=_frozen([tensor.bytes for tensor in tensors]),
        tensor_alias=_aliases(ops, tensor_id),
        workspace=_frozen([op.workspace for op in ops]),
        memory=_frozen([_MEMORY_CODE[op.memory] for op in ops]),
        group=_groups(ops),
        topological=_frozen(np.arange(len(ops))),
    )
    return arrays._replace(topological=_frozen(topological_order(op_edges(arrays), len(ops))))
