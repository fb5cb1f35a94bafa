"""Pieces of a step that are alike: microbatches, found from the graph alone.

Two ops are alike if they make the same call in one group on inputs made by ops that are alike,
recursively; state that outlives the step is like nothing but itself. So the forward pass of a layer
on one microbatch is like that on another, and unlike that of any other layer. If the graph's batch
was cut, names say what a piece is (`plan.pieces`). Otherwise most of the work decides the number of
pieces. Ops that exist once (sums of gradients, the update) belong to no piece. O(edges log edges).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Float64, Int64
from numpy import ndarray

from pardnn.graph.csr import RESIDUAL, op_edges
from pardnn.graph.ir import Graph
from pardnn.kernels.sorting import inverse_permutation
from pardnn.plan.piece_order import piece_by_piece as one_after_the_other
from pardnn.plan.pieces import first_piece, piece_number

#: Pieces count if they make at least this part of the work.
LEAST_WORK = 0.5


class Pieces(NamedTuple):
    """Which ops are alike.

    Attributes:
        count: Number of pieces.
        piece: Of each op; -1 for an op of no piece.
        model: The op of the first piece that each op is like; itself for an op of no piece.
    """

    count: int
    piece: Int64[ndarray, " n"]
    model: Int64[ndarray, " n"]


def pieces_of(graph: Graph, seconds: Float64[ndarray, " n"]) -> Pieces | None:
    """Return the pieces of a step; None if most of its ops exist once.

    Args:
        graph: The graph.
        seconds: Of each op, on any device.
    """
    named = _named(graph)
    if named is not None:
        return named
    kinds = _kinds(graph)
    times = np.bincount(kinds)
    work = np.bincount(times[kinds], weights=seconds)
    work[1] = 0.0
    count = int(work.argmax())
    is_piece = times[kinds] % max(count, 1) == 0
    if count < 2 or seconds[is_piece].sum() < LEAST_WORK * seconds.sum():
        return None
    n = len(kinds)
    piece, model = np.full(n, -1, dtype=np.int64), np.arange(n)
    seen = np.zeros(len(times), dtype=np.int64)
    members: dict[tuple[int, int], int] = {}
    for op in graph.arrays.topological.tolist():
        if is_piece[op]:
            kind, each = int(kinds[op]), int(times[kinds[op]]) // count
            piece[op], within = divmod(int(seen[kind]), each)
            model[op] = members.setdefault((kind, within), op)
            seen[kind] += 1
    return Pieces(count, piece, model)


def _named(graph: Graph) -> Pieces | None:
    """Return the pieces of a graph whose batch was cut, which names them; None for others.

    Sums are no pieces, but for products that add themselves to one.
    """
    number = {op.name: i for i, op in enumerate(graph.ops)}
    piece = np.array([piece_number(op.name) for op in graph.ops], dtype=np.int64)
    model = np.array([number.get(first_piece(op.name), -1) for op in graph.ops], dtype=np.int64)
    piece[model < 0] = -1
    times = np.bincount(model[piece >= 0], minlength=1)
    count = int(piece.max(initial=-1)) + 1
    if count < 2 or not np.isin(times, (0, count)).all():
        return None
    return Pieces(count, piece, np.where(piece < 0, np.arange(len(piece)), model))


def _kinds(graph: Graph) -> Int64[ndarray, " n"]:
    """Return a number per op, equal for ops that are alike."""
    a, number = graph.arrays, dict[tuple[object, ...], int]()
    kinds = np.zeros(a.num_ops, dtype=np.int64)
    for i in a.topological.tolist():
        op = graph.ops[i]
        reads = a.tensor_op[a.input_tensor[a.input_ptr[i] : a.input_ptr[i + 1]]]
        own = i if a.memory[i] == RESIDUAL and len(reads) == 0 else -1
        key = (op.kind, op.group, own, *sorted(kinds[reads].tolist()))
        kinds[i] = number.setdefault(key, len(number))
    return kinds


def piece_by_piece(graph: Graph, pieces: Pieces) -> Int64[ndarray, " n"]:
    """Return each op's position in the order of one piece after the other: it needs least memory.

    An op of no piece comes as soon as its inputs exist.

    Args:
        graph: The graph.
        pieces: Its pieces.
    """
    order = one_after_the_other(op_edges(graph.arrays), pieces.piece, graph.arrays.topological)
    return inverse_permutation(order)
