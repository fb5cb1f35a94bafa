"""Make a graph: check the ops, then flatten them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import numpy as np
from jaxtyping import Int64
from numpy import ndarray

from pardnn.graph.check import check_ops
from pardnn.graph.csr import (
    NORMAL,
    REFERENCE,
    RESIDUAL,
    GraphArrays,
    frozen,
    op_edges,
    owners_of,
    topological_order,
    transposed,
)
from pardnn.graph.ir import Graph, Op, Tensor, alias_of, span_bytes, storage_owners
from pardnn.kernels.sorting import inverse_permutation

_MEMORY_CODE = {"normal": NORMAL, "residual": RESIDUAL, "reference": REFERENCE, "host": RESIDUAL}


def build_graph(name: str, ops: Iterable[Op]) -> Graph:
    """Return the checked graph of `ops`.

    Args:
        name: Any text.
        ops: In any order.

    Raises:
        FileError: E402, if the ops do not form a graph.
    """
    ops = tuple(ops)
    check_ops(ops, name=name)
    return Graph(name=name, ops=ops, arrays=build_arrays(ops))


def made_graph(name: str, ops: Iterable[Op]) -> Graph:
    """Return the graph of ops that were made of a graph's own, unchecked.

    A search makes dozens, and checking them takes three quarters of that. The one that it ends with
    is made of its plan once more, and checked with it.

    Args:
        name: Any text.
        ops: In any order.
    """
    ops = tuple(ops)
    return Graph(name=name, ops=ops, arrays=build_arrays(ops))


def _pointers(lengths: Sequence[int] | ndarray) -> ndarray:
    return frozen(np.concatenate([[0], np.cumsum(np.array(lengths, dtype=np.int64))]))


def _rows(rows: Sequence[Sequence[str]], number: dict[str, int]) -> tuple[ndarray, ndarray]:
    """Return compressed sparse rows of names, by number; of a name that is repeated the first."""
    lengths = np.array(list(map(len, rows)), dtype=np.int64)
    found = frozen(list(map(number.__getitem__, itertools.chain.from_iterable(rows))))
    row = np.repeat(np.arange(len(rows)), lengths)
    _, first = np.unique(row * max(len(number), 1) + found, return_index=True)
    if len(first) == len(found):
        return _pointers(lengths), found
    first.sort()
    return _pointers(np.bincount(row[first], minlength=len(rows))), frozen(found[first])


def _groups(ops: Sequence[Op]) -> ndarray:
    numbers: dict[str | int, int] = {}
    keys = (op.group if op.group is not None else i for i, op in enumerate(ops))
    return frozen([numbers.setdefault(key, len(numbers)) for key in keys])


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
    return frozen(aliases)


def _device_bytes(op: Op, tensor: Tensor) -> int:
    return 0 if op.memory == "host" else span_bytes(tensor)


def build_arrays(ops: Sequence[Op]) -> GraphArrays:
    """Flatten checked ops; `check_ops` has proven that every name resolves."""
    tensors = [tensor for op in ops for tensor in op.outputs]
    tensor_id = {tensor.name: i for i, tensor in enumerate(tensors)}
    op_id = {op.name: i for i, op in enumerate(ops)}
    return _completed(
        _pointers([len(op.outputs) for op in ops]),
        _rows([op.inputs for op in ops], tensor_id),
        _rows([op.after for op in ops], op_id),
        tensor_bytes=frozen([_device_bytes(op, tensor) for op in ops for tensor in op.outputs]),
        tensor_alias=_aliases(ops, tensor_id),
        workspace=frozen([op.workspace for op in ops]),
        memory=frozen([_MEMORY_CODE[op.memory] for op in ops]),
        group=_groups(ops),
    )


def reordered(arrays: GraphArrays, order: Int64[ndarray, " n"]) -> GraphArrays:
    """Return what `build_arrays` makes of the same ops in another order, without their names.

    Args:
        arrays: Of the ops.
        order: Number of each op, in their new order.
    """
    op_rank = inverse_permutation(order)
    output_ptr, tensor = _gathered(arrays.output_ptr, np.arange(arrays.num_tensors), order)
    rank = inverse_permutation(tensor)
    input_ptr, read = _gathered(arrays.input_ptr, arrays.input_tensor, order)
    after_ptr, after = _gathered(arrays.after_ptr, arrays.after_op, order)
    alias = arrays.tensor_alias[tensor]
    _, first, group = np.unique(arrays.group[order], return_index=True, return_inverse=True)
    return _completed(
        output_ptr,
        (input_ptr, frozen(rank[read])),
        (after_ptr, frozen(op_rank[after])),
        tensor_bytes=frozen(arrays.tensor_bytes[tensor]),
        tensor_alias=frozen(np.where(alias >= 0, rank[alias], -1)),
        workspace=frozen(arrays.workspace[order]),
        memory=frozen(arrays.memory[order]),
        group=frozen(inverse_permutation(np.argsort(first))[group]),  # numbered as they come
    )


def _completed(
    output_ptr: Int64[ndarray, " n+1"],
    inputs: tuple[Int64[ndarray, " n+1"], Int64[ndarray, " reads"]],
    after: tuple[Int64[ndarray, " n+1"], Int64[ndarray, " a"]],
    **values: Int64[ndarray, " ..."],
) -> GraphArrays:
    """Add what follows from reads, orders and values: the reverse of both, owners, an order."""
    num_ops, num_tensors = len(output_ptr) - 1, int(output_ptr[-1])
    consumer_ptr, consumer_op = transposed(*inputs, num_tensors)
    before_ptr, before_op = transposed(*after, num_ops)
    arrays = GraphArrays(
        output_ptr=output_ptr,
        input_ptr=inputs[0],
        input_tensor=inputs[1],
        after_ptr=after[0],
        after_op=after[1],
        before_ptr=before_ptr,
        before_op=before_op,
        consumer_ptr=consumer_ptr,
        consumer_op=consumer_op,
        tensor_op=frozen(np.repeat(np.arange(num_ops), np.diff(output_ptr))),
        tensor_owner=owners_of(values["tensor_alias"]),
        topological=frozen(np.arange(num_ops)),
        **values,
    )
    return arrays._replace(topological=frozen(topological_order(op_edges(arrays), num_ops)))


def _gathered(ptr: ndarray, index: ndarray, order: ndarray) -> tuple[ndarray, ndarray]:
    """Return compressed sparse rows in another order."""
    lengths = np.diff(ptr)[order]
    pointers = _pointers(lengths)
    total = int(pointers[-1])
    at = np.arange(total) + np.repeat(ptr[order] - pointers[:-1], lengths)
    return pointers, index[at]
