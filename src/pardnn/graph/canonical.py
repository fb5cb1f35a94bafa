"""The order of ops that a graph has by itself, whatever the order of its file.

Planners settle ties by an op's number and walk graphs in topological order, so a file whose ops
are shuffled would give another plan. Where nothing says in which order a step runs its ops, this
order stands in: what a sink needs comes right before it, sinks near the start of the step first.
In a training step, that is forward, backward, and each update as soon as its gradient is there; a
sink's order keeps little alive at a time, as eager execution does.

Alternatives are settled by depth, then by a hash of what lies before and behind an op (kinds,
bytes, seconds, shapes), and between ops that are alike by name alone.

O(ops log ops + edges).
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int64
from numpy import ndarray

from pardnn.graph.csr import GraphArrays, frozen, op_edges
from pardnn.graph.ir import Op, Tensor

_MASK = (1 << 61) - 1
_FACTOR = 1_000_003


def canonical_order(ops: Sequence[Op], arrays: GraphArrays) -> Int64[ndarray, " n"]:
    """Return the numbers of all ops in the graph's own order, a topological one."""
    n = len(ops)
    pairs = op_edges(arrays)
    behind_ptr, behind = _rows(pairs[:, 0], pairs[:, 1], n)
    before_ptr, before = _rows(pairs[:, 1], pairs[:, 0], n)
    order = arrays.topological.tolist()
    own = [_own_hash(op) for op in ops]
    depth, above = _from_the_start(order, before_ptr, before, own)
    below = _from_the_end(order, behind_ptr, behind, own)
    alike = [(a * _FACTOR + b) & _MASK for a, b in zip(above, below, strict=True)]
    by_depth = sorted(range(n), key=lambda i: (depth[i], alike[i], ops[i].name))
    rank = [0] * n
    for position, op in enumerate(by_depth):
        rank[op] = position
    sinks = [op for op in by_depth if behind_ptr[op] == behind_ptr[op + 1]]
    return frozen(_depth_first(sinks, before_ptr, before, rank))


def _rows(row: ndarray, column: ndarray, n: int) -> tuple[list[int], list[int]]:
    """Return edges as compressed sparse rows, in lists: what follows walks them one by one."""
    pointers = np.concatenate([[0], np.cumsum(np.bincount(row, minlength=n))])
    return pointers.tolist(), column[np.argsort(row, kind="stable")].tolist()


def _own_hash(op: Op) -> int:
    """Hash what an op is by itself, without a name: the same in every process."""
    seconds = None if op.seconds is None else sorted(op.seconds.items())
    found = (op.kind, op.memory, op.workspace, seconds, [_shape(t) for t in op.outputs])
    return zlib.crc32(repr(found).encode())


def _shape(tensor: Tensor) -> tuple[object, ...]:
    return tensor.bytes, tensor.shape, tensor.dtype, tensor.strides


def _from_the_start(
    order: list[int], ptr: list[int], before: list[int], own: list[int]
) -> tuple[list[int], list[int]]:
    """Return the edges of the longest path to each op, and a hash of all that lies before it."""
    depth, found = [0] * len(own), [0] * len(own)
    for op in order:
        near = before[ptr[op] : ptr[op + 1]]
        if near:
            depth[op] = 1 + max([depth[other] for other in near])
        found[op] = _mixed(own[op], [found[other] for other in near])
    return depth, found


def _from_the_end(order: list[int], ptr: list[int], behind: list[int], own: list[int]) -> list[int]:
    """Return a hash of all that lies behind each op."""
    found = [0] * len(own)
    for op in reversed(order):
        found[op] = _mixed(own[op], [found[other] for other in behind[ptr[op] : ptr[op + 1]]])
    return found


def _mixed(own: int, others: list[int]) -> int:
    """Hash an op with its neighbours, in any order."""
    value = own
    for other in sorted(others):
        value = (value * _FACTOR ^ other) & _MASK
    return value * _FACTOR & _MASK


def _depth_first(sinks: list[int], ptr: list[int], before: list[int], rank: list[int]) -> list[int]:
    """Return all ops, each right behind what it needs; of several needs, the deepest first."""
    done = bytearray(len(rank))
    found: list[int] = []
    for sink in sinks:
        stack = [sink]
        while stack:
            op = stack[-1]
            if done[op] == 0:
                done[op] = 1
                needs = [other for other in before[ptr[op] : ptr[op + 1]] if not done[other]]
                if needs:
                    stack += sorted(needs, key=rank.__getitem__)  # the last is visited first
                    continue
            stack.pop()
            if done[op] == 1:
                done[op] = 2
                found.append(op)
    return found
