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
from pardnn.kernels.sorting import inverse_permutation

_MASK = (1 << 61) - 1
_FACTOR = 1_000_003


def canonical_order(ops: Sequence[Op], arrays: GraphArrays) -> Int64[ndarray, " n"]:
    """Return the numbers of all ops in the graph's own order, a topological one."""
    n = len(ops)
    pairs = op_edges(arrays)
    behind_ptr, behind = _rows(pairs[:, 0], pairs[:, 1], n)
    before_ptr, before = _rows(pairs[:, 1], pairs[:, 0], n)
    order = arrays.topological.tolist()
    own = _own_hashes(ops)
    depth, above = _from_the_start(order, before_ptr, before, own)
    below = _from_the_end(order, behind_ptr, behind, own)
    names = [op.name for op in ops]
    by_name = np.array(sorted(range(n), key=names.__getitem__))
    alike = np.array(above, np.uint64) * np.uint64(_FACTOR) + np.array(below, np.uint64)
    keys = np.stack([alike & np.uint64(_MASK), np.array(depth, np.uint64)])[:, by_name]
    by_depth = by_name[np.lexsort(keys)]
    rank = inverse_permutation(by_depth).tolist()
    sinks = [op for op in by_depth.tolist() if behind_ptr[op] == behind_ptr[op + 1]]
    return frozen(_depth_first(sinks, before_ptr, before, rank))


def _rows(row: ndarray, column: ndarray, n: int) -> tuple[list[int], list[int]]:
    """Return edges as compressed sparse rows, in lists: what follows walks them one by one."""
    pointers = np.concatenate([[0], np.cumsum(np.bincount(row, minlength=n))])
    return pointers.tolist(), column[np.argsort(row, kind="stable")].tolist()


def _own_hashes(ops: Sequence[Op]) -> list[int]:
    """Hash each op by itself; ops that are alike, as most are, once."""
    known: dict[tuple[object, ...], int] = {}
    found: list[int] = []
    for op in ops:
        # As text, 0.0 and -0.0 differ.
        key = (op.kind, op.memory, op.workspace, repr(op.seconds), *map(_shape, op.outputs))
        value = known.get(key)
        if value is None:
            value = known[key] = _own_hash(op)
        found.append(value)
    return found


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
