"""Modulo scheduling: each piece of a step repeats the schedule of the previous one a period later.

Each op of one piece gets the first time at which its inputs exist and its device is free in every
period; the following pieces repeat this. The shortest period is the work of the busiest device, and
the bytes that a device holds are then the lifetimes of one piece's tensors divided by the period.
This gives schedules without gaps and with short lifetimes. A scheduler that starts whatever it can
does not find them, because it starts pieces early that hold memory and finish no sooner. Ops of a
piece that no other device waits for (weight gradients) come last, and may be delayed by a number of
periods.

The times are not binding: they are keys by which `safe_schedule` orders ready ops.

Reference: Rau, "Iterative modulo scheduling", MICRO 1994 (without its backtracking).
"""

# Kernels: an element of an array is a number, which pyright cannot see.
# pyright: reportArgumentType=false, reportReturnType=false

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float64, Int64
from numpy import ndarray

from pardnn.kernels.jit import helper, kernel
from pardnn.place.ordering.edges import Edges
from pardnn.place.ordering.pieces import Pieces

#: Of a second, and of a period: times that are apart by less are equal.
SMALL = 1e-9


class Model(NamedTuple):
    """One piece's ops in the reference order, and their dependences.

    Attributes:
        ops: Ops of the first piece, in the reference order.
        before_ptr: Of each op of the graph, into `before`.
        before: Ops of the first piece that it waits for.
        delay: Seconds from the end of each of them until the op may start.
        is_filler: Whether no other device waits for what the op does, by op of the graph.
        period: Seconds of the busiest device's work on one piece.
        joins: Edges to ops of no piece, in the reference order.
    """

    ops: Int64[ndarray, " o"]
    before_ptr: Int64[ndarray, " n+1"]
    before: Int64[ndarray, " b"]
    delay: Float64[ndarray, " b"]
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
    order = np.argsort(reference)
    ops = order[pieces.piece[order] == 0]
    source, target = np.repeat(np.arange(n), np.diff(edges.ptr)), edges.successor
    inner = np.flatnonzero((pieces.piece[source] == 0) & (pieces.piece[target] == 0))
    inner = inner[np.argsort(target[inner], kind="stable")]
    before_ptr = np.searchsorted(target[inner], np.arange(n + 1))
    needed = np.zeros(n, dtype=np.bool_)
    _mark_needed(ops, before_ptr, source[inner], edges.place, needed)
    is_filler = ~needed[pieces.model] & (pieces.piece >= 0)
    seconds = np.bincount(edges.place[ops], weights=edges.seconds[ops])
    out = np.flatnonzero(pieces.piece[target] < 0)
    out = out[np.argsort(reference[source[out]], kind="stable")]
    joins = list(zip(source[out].tolist(), target[out].tolist(), strict=True))
    return Model(
        ops, before_ptr, source[inner], edges.delay[inner], is_filler, float(seconds.max()), joins
    )


@kernel
def _mark_needed(
    ops: Int64[ndarray, " o"],
    before_ptr: Int64[ndarray, " p"],
    before: Int64[ndarray, " b"],
    place: Int64[ndarray, " n"],
    needed: Bool[ndarray, " n"],
) -> None:
    """Mark the ops that another device waits for, at the end of some path."""
    for turn in range(len(ops) - 1, -1, -1):
        op = ops[turn]
        for i in range(before_ptr[op], before_ptr[op + 1]):
            if needed[op] or place[before[i]] != place[op]:
                needed[before[i]] = True


def modulo_times(edges: Edges, model: Model, period: float) -> Float64[ndarray, " n"]:
    """Return when each op of the first piece starts, in seconds; 0 for other ops.

    Args:
        edges: Of the placement.
        model: The first piece.
        period: Seconds between two pieces.
    """
    late = model.is_filler[model.ops]
    # What one filler waits for is before it in the reference order.
    turns = np.concatenate([model.ops[~late], model.ops[late]])
    start = np.zeros(len(edges.place))
    _times_kernel(
        turns, model.before_ptr, model.before, model.delay, edges.place, edges.seconds, period,
        start,
    )  # fmt: skip
    return start


@kernel
def _times_kernel(
    turns: Int64[ndarray, " o"],
    before_ptr: Int64[ndarray, " p"],
    before: Int64[ndarray, " b"],
    delay: Float64[ndarray, " b"],
    place: Int64[ndarray, " n"],
    seconds: Float64[ndarray, " n"],
    period: float,
    start: Float64[ndarray, " n"],
) -> None:
    """Fill when each op starts."""
    begin, length, count = _no_reservations(turns, place)
    for op in turns:
        ready, d = 0.0, place[op]
        for i in range(before_ptr[op], before_ptr[op + 1]):
            ready = max(ready, start[before[i]] + seconds[before[i]] + delay[i])
        taken = count[d]
        start[op] = _first_free(begin[d, :taken], length[d, :taken], ready, seconds[op], period)
        if seconds[op] > 0:
            _reserve(begin[d], length[d], taken, start[op] % period, seconds[op])
            count[d] += 1


@helper
def _no_reservations(
    turns: Int64[ndarray, " o"], place: Int64[ndarray, " n"]
) -> tuple[Float64[ndarray, "k m"], Float64[ndarray, "k m"], Int64[ndarray, " k"]]:
    """Return, by device, room for when in a period it is busy, for how long, and how often."""
    count = np.zeros(place.max() + 1, dtype=np.int64)
    for op in turns:
        count[place[op]] += 1
    shape = (len(count), count.max())
    return np.empty(shape), np.empty(shape), np.zeros(len(count), dtype=np.int64)


@helper
def _reserve(
    begin: Float64[ndarray, " m"],
    length: Float64[ndarray, " m"],
    count: int,
    at: float,
    seconds: float,
) -> None:
    """Insert when in a period a device is busy, in order of begin."""
    i = count
    while i > 0 and (begin[i - 1] > at or (begin[i - 1] == at and length[i - 1] > seconds)):
        begin[i], length[i] = begin[i - 1], length[i - 1]
        i -= 1
    begin[i], length[i] = at, seconds


@helper
def _first_free(
    begin: Float64[ndarray, " m"],
    length: Float64[ndarray, " m"],
    ready: float,
    seconds: float,
    period: float,
) -> float:
    """Return the first time at which a device is free for so long in every period."""
    small, time = SMALL * period, ready
    if seconds <= 0:
        return ready
    while time <= ready + period:
        is_free = True
        for i in range(len(begin)):
            ago = (time - begin[i]) % period
            if ago < length[i] - small:
                time += length[i] - ago
                is_free = False
                break
            if ago + seconds > period + small:
                time += period - ago + length[i]
                is_free = False
                break
        if is_free:
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
        reference: Position of each op in a topological order, which breaks ties.
        times: From `modulo_times`.
        period: Seconds between two pieces.
        delay: Periods by which to delay ops that no other device waits for.
    """
    key = times[pieces.model] + period * np.maximum(pieces.piece, 0)
    key += np.where(model.is_filler, delay * period, 0.0)
    for op, after in model.joins:
        key[after] = max(key[after], key[op] + edges.seconds[op])
    return key + SMALL * period * reference / len(reference)
