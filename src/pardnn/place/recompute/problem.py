"""The ops of one device in a given order, with those that may be called a second time.

Nodes are ops, numbered by their position in the order; `NEVER` may not be called again, `FREELY`
may, and `WITH` is called whenever the op that writes its result in place is: a storage that is
written in place is made and written again, or kept. This is allowed if each version but the last is
read only by the next write; other written storages (parameters, running statistics, gradients that
are added up) are kept.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64, Int64
from numpy import ndarray

from pardnn.graph.csr import RESIDUAL, transposed
from pardnn.graph.ir import LOSS_KIND, Graph, Op, storage_owners, writes
from pardnn.plan.partitioned_graph import FETCH, REDUCE, SLICE, filled_later

#: What stands for messages in the graph of one device (`placed`): neither is called again. What is
#: sent is kept until it has left.
SEND, RECEIVE = "pardnn.send", "pardnn.receive"

NEVER, FREELY, WITH = 0, 1, 2


class Nodes(NamedTuple):
    """Ops by position, tensors op by op in that order, and who reads them."""

    seconds: Float64[ndarray, " n"]
    workspace: Int64[ndarray, " n"]
    again: Int64[ndarray, " n"]  # NEVER, FREELY or WITH
    latest: Int64[ndarray, " n"]  # last op before which it may be called again
    held: Int64[ndarray, " n"]  # op up to which its first result is kept in any case; -1: none
    output_ptr: Int64[ndarray, " n+1"]
    num_bytes: Int64[ndarray, " t"]  # of the storage that the tensor owns; 0 for residual ones
    use_ptr: Int64[ndarray, " t+1"]
    use_op: Int64[ndarray, " u"]
    read_ptr: Int64[ndarray, " n+1"]
    read_op: Int64[ndarray, " e"]  # the ops whose tensors an op reads
    is_view: Int64[ndarray, " n"]  # whether it makes a tensor on the storage of what it reads
    view_ptr: Int64[ndarray, " u+1"]
    views: Int64[ndarray, " v"]  # tensors that a reader makes on the storage of what it reads
    base: int  # residual bytes

    @property
    def num_ops(self) -> int:
        """Number of ops."""
        return len(self.seconds)


def nodes_of(graph: Graph, order: Int64[ndarray, " n"], seconds: Float64[ndarray, " n"]) -> Nodes:
    """Return the nodes of a graph.

    Args:
        graph: All of it is on one device.
        order: Ops in the order in which they run.
        seconds: Of each op of the graph.
    """
    a, n = graph.arrays, len(graph.ops)
    position = np.empty(n, dtype=np.int64)
    position[order] = np.arange(n)
    counts = np.diff(a.output_ptr)[order]
    output_ptr = np.concatenate([[0], np.cumsum(counts)])
    starts = np.repeat(a.output_ptr[:-1][order] - output_ptr[:-1], counts)
    tensor = np.arange(len(starts)) + starts  # of the graph, by own number
    number = np.empty(a.num_tensors, dtype=np.int64)
    number[tensor] = np.arange(len(tensor))
    inputs = [np.sort(number[a.input_tensor[a.input_ptr[i] : a.input_ptr[i + 1]]]) for i in order]
    input_ptr = np.concatenate([[0], np.cumsum([len(row) for row in inputs])]).astype(np.int64)
    read = np.concatenate([*inputs, np.zeros(0, np.int64)]).astype(np.int64)
    use_ptr, use_op = transposed(input_ptr, read, len(tensor))
    alias = a.tensor_alias[tensor]
    alias = np.where(alias < 0, -1, number[alias])
    is_residual = a.memory[a.tensor_op[a.tensor_owner]] == RESIDUAL
    size = np.where((alias < 0) & ~is_residual[tensor], a.tensor_bytes[tensor], 0)
    base = int(a.tensor_bytes[is_residual & (a.tensor_alias < 0)].sum())
    view_ptr, view = _views(output_ptr, alias, use_ptr, use_op)
    makers = np.repeat(np.arange(n), counts)
    makes_view = np.zeros(n, dtype=np.int64)
    makes_view[makers[view]] = 1
    rows = [np.unique(makers[row]) for row in inputs]
    again, latest = _may_again(graph, position)
    held = np.full(n, -1, dtype=np.int64)
    for op in np.flatnonzero([graph.ops[i].kind == SEND for i in order]).tolist():
        held[rows[op]] = np.maximum(held[rows[op]], op)
    return Nodes(
        seconds=np.ascontiguousarray(seconds[order], dtype=np.float64),
        workspace=np.ascontiguousarray(a.workspace[order]),
        again=again[order], latest=latest[order], held=held, output_ptr=output_ptr.astype(np.int64),
        num_bytes=size.astype(np.int64), use_ptr=use_ptr, use_op=use_op,
        read_ptr=np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int64),
        read_op=np.concatenate([*rows, np.zeros(0, np.int64)]).astype(np.int64),
        is_view=makes_view, view_ptr=view_ptr, views=view, base=base,
    )  # fmt: skip


def _views(
    output_ptr: ndarray, alias: ndarray, use_ptr: ndarray, use_op: ndarray
) -> tuple[ndarray, ndarray]:
    of: dict[tuple[int, int], list[int]] = {}
    makers = np.repeat(np.arange(len(output_ptr) - 1), np.diff(output_ptr))
    for tensor in np.flatnonzero(alias >= 0).tolist():
        of.setdefault((int(alias[tensor]), int(makers[tensor])), []).append(tensor)
    tensors = np.repeat(np.arange(len(alias)), np.diff(use_ptr)).tolist()
    rows = [of.get(each, []) for each in zip(tensors, use_op.tolist(), strict=True)]
    ptr = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int64)
    return ptr, np.array([tensor for row in rows for tensor in row], dtype=np.int64)


def _may_again(graph: Graph, position: ndarray) -> tuple[ndarray, ndarray]:
    """Return whether each op may be called again, and the position of the last op before which."""
    n = len(graph.ops)
    completed = filled_later(graph.ops)
    again = np.array([_is_call(op, completed) for op in graph.ops], dtype=np.int64) * FREELY
    owners = storage_owners(graph.ops)
    home = {tensor.name: i for i, op in enumerate(graph.ops) for tensor in op.outputs}
    writers: dict[str | None, list[int]] = {}
    for i, op in enumerate(graph.ops):
        for owner in {owners[name]: None for name in writes(op)}:
            writers.setdefault(owner, []).append(i)
    readers: dict[str, set[int]] = {}
    for i, op in enumerate(graph.ops):
        for name in op.inputs:
            readers.setdefault(name, set()).add(i)
    for owner, found in writers.items():
        assert owner is not None
        chain = [home[owner], *sorted(found, key=lambda i: position[i])]
        is_chain = all(len(graph.ops[i].outputs) == 1 and again[i] for i in chain) and all(
            readers.get(graph.ops[one].outputs[0].name) == {following}
            for one, following in itertools.pairwise(chain)
        )
        again[chain] = NEVER
        if is_chain and all(set(map(owners.get, writes(graph.ops[i]))) == {owner} for i in found):
            again[chain[:-1]], again[chain[-1]] = WITH, FREELY
    latest = np.full(n, n, dtype=np.int64)
    for i, op in enumerate(graph.ops):
        later = [
            position[w] for name in op.inputs for w in writers.get(owners[name], ())
            if position[w] > position[i] and again[i] != WITH
        ]  # fmt: skip
        latest[i] = min(later, default=n)
    return again, latest


def _is_call(op: Op, completed: frozenset[str]) -> bool:
    if op.kind.startswith("pardnn.") and op.kind not in (SLICE, FETCH, REDUCE):
        return False
    is_made = bool(op.outputs) and op.memory != "residual"
    is_whole = op.kind != FETCH or op.outputs[0].name not in completed
    return is_made and is_whole and not op.is_source and op.kind != LOSS_KIND
