"""Modulo scheduling: each piece of a step does the same a period later.

Of one piece, each op gets the first time at which what it reads is there and its device is free in
every period; the following pieces repeat it. The shortest period is the work of the busiest device,
and what a device holds is then the lifetimes of one piece's tensors over the period: a schedule
without gaps and with short lifetimes, which a scheduler that starts whatever it can does not find,
since it starts pieces early that hold memory and finish no sooner. Ops of a piece that no other
device waits for (weight gradients) are put last, and may be delayed by a number of periods.

The times are not kept to: they are keys by which `safe_schedule` orders what is ready.

Reference: Rau, "Iterative modulo scheduling", MICRO 1994 (without its backtracking).
"""

from __future__ import annotations

from bisect import insort
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float64, Int64
from numpy import ndarray

from pardnn.place.ordering.edges import Edges
from pardnn.place.ordering.pieces import Pieces

#: Of a second, and of a period: times that are apart by less are equal.
SMALL = 1e-9


class Model(NamedTuple):
    """One piece's ops in the reference order, and what waits for what in it.

    Attributes:
        ops: Ops of the first piece.
        before: Of each op, those of the piece that it waits for, with seconds between.
        is_filler: Whether no other device waits for what the op does, by op of the graph.
        period: Seconds of the busiest device's work on one piece.
        joins: Edges to ops of no piece, in the reference order.
    """

    ops: list[int]
    before: dict[int, list[tuple[int, float]]]
    is_filler: Bool[ndarray, " n"]
    period: float
    joins: list[tuple[int, int]]


def model_of(pieces: Pieces, edges: Edges, reference: Int64[ndarray, " n"]) -> Model:
    """Return the model that all pieces of a placed step follow.

    Args:
        pieces: Its pieces.
        edges: Of the placement.
        reference: Position of each op in a topological order.
    """
    n = len(edges.place)
    order = np.argsort(reference).tolist()
    ops = [op for op in order if pieces.piece[op] == 0]
    before: dict[int, list[tuple[int, float]]] = {op: [] for op in ops}
    needed = np.zeros(n, dtype=np.bool_)
    for op in reversed(ops):
        for i in range(edges.ptr[op], edges.ptr[op + 1]):
            after = int(edges.successor[i])
            if pieces.piece[after] == 0:
                before[after].append((op, float(edges.delay[i])))
                needed[op] |= needed[after] or edges.place[after] != edges.place[op]
    is_filler = ~needed[pieces.model] & (pieces.piece >= 0)
    seconds = np.bincount(edges.place[ops], weights=edges.seconds[ops])
    joins = [
        (op, int(after))
        for op in order
        for after in edges.successor[edges.ptr[op] : edges.ptr[op + 1]]
        if pieces.piece[after] < 0
    ]
    return Model(ops, before, is_filler, float(seconds.max()), joins)


def modulo_times(edges: Edges, model: Model, period: float) -> Float64[ndarray, " n"]:
    """Return when each op of the first piece starts, in seconds; 0 for other ops.

    Args:
        edges: Of the placement.
        model: The first piece.
        period: Seconds between two pieces.
    """
    start = np.zeros(len(edges.place))
    busy: dict[int, list[tuple[float, float]]] = {d: [] for d in np.unique(edges.place).tolist()}
    place, seconds = edges.place.tolist(), edges.seconds.tolist()

    def ready(op: int) -> float:
        return max((start[x] + seconds[x] + delay for x, delay in model.before[op]), default=0.0)

    def put(op: int) -> None:
        start[op] = _first_free(busy[place[op]], ready(op), seconds[op], period)
        if seconds[op] > 0:
            insort(busy[place[op]], (start[op] % period, seconds[op]))

    fillers = [op for op in model.ops if model.is_filler[op]]
    for op in model.ops:
        if not model.is_filler[op]:
            put(op)
    # What one filler waits for is before it in the reference order.
    for op in fillers:
        put(op)
    return start


def _first_free(
    busy: list[tuple[float, float]], ready: float, seconds: float, period: float
) -> float:
    """Return the first time at which a device is free for so long in every period."""
    small, time = SMALL * period, ready
    if seconds <= 0:
        return ready
    while time <= ready + period:
        for begin, length in busy:
            ago = (time - begin) % period
            if ago < length - small:
                time += length - ago
                break
            if ago + seconds > period + small:
                time += period - ago + length
                break
        else:
            return time
    return ready


def modulo_keys(
    pieces: Pieces,
    edges: Edges,
    model: Model,
    reference: Int64[ndarray, " n"],
    times: Float64[ndarray, " n"],
    period: float,
    delay: float,
) -> Float64[ndarray, " n"]:
    """Return a key for each op: the time at which it would start if each piece were like the first.

    Args:
        pieces: The pieces.
        edges: Of the placement.
        model: The first piece.
        reference: Position of each op in a topological order, which settles ties.
        times: From `modulo_times`.
        period: Seconds between two pieces.
        delay: Periods by which ops are delayed that no other device waits for.
    """
    key = times[pieces.model] + period * np.maximum(pieces.piece, 0)
    key += np.where(model.is_filler, delay * period, 0.0)
    for op, after in model.joins:
        key[after] = max(key[after], key[op] + edges.seconds[op])
    return key + SMALL * period * reference / len(reference)
