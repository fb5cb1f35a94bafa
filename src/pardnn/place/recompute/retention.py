"""Retention intervals: which results are kept until when, and what that costs.

Problem: n ops run in a given order. A result that is read late may be freed early and made again
by a second call just before the first late reader. Find the second calls that take the fewest
seconds, such that the step never holds more than a limit.

Idea: one number per op, the last op up to which its first result is kept. All later readers,
including second calls of other ops, read a second call. A reader runs after what it reads, so a
single pass from the last op to the first meets every reader's calls before the ops that they read
from: where each second call goes, and until when each result is held, follow in O(ops + edges).
Second calls before op j stand in the order of their ops. These are MOCCASIN's variables (Bartan et
al., ICML 2023) for at most two calls of an op, less the start of the second interval: a call stands
where it is first read.
"""

# Kernels: an element of an array is a number, which pyright cannot see.
# pyright: reportReturnType=false

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int64
from numpy import ndarray

from pardnn.kernels.jit import helper, kernel
from pardnn.place.recompute.problem import FREELY, WITH, Nodes


class Schedule(NamedTuple):
    """Positions of calls and ends of results; calls n + i are the second ones.

    Attributes:
        stage: The op before which the second call of each op goes; n if there is none.
        end: Per call of an op's tensors, in two rows, the call that uses each last.
        position: Of each call among all calls; -1 if there is none.
        live: Bytes held while each call runs, by position, less residual ones.
        head: Scratch: first second call before each op; `next` the following one.
        next: Scratch.
        is_stale: Ops whose `stage` and `end` have to be computed again.
    """

    stage: Int64[ndarray, " n"]
    end: Int64[ndarray, "2 t"]
    position: Int64[ndarray, " m"]
    live: Int64[ndarray, " m+1"]
    head: Int64[ndarray, " n"]
    next: Int64[ndarray, " n"]
    is_stale: Bool[ndarray, " n"]


def empty_schedule(nodes: Nodes) -> Schedule:
    """Return memory for a schedule."""
    n, t = nodes.num_ops, len(nodes.num_bytes)
    return Schedule(
        stage=np.full(n, n, dtype=np.int64),
        end=np.zeros((2, t), dtype=np.int64),
        position=np.full(2 * n, -1, dtype=np.int64),
        live=np.zeros(2 * n + 1, dtype=np.int64),
        head=np.full(n, -1, dtype=np.int64),
        next=np.full(n, -1, dtype=np.int64),
        is_stale=np.ones(n, dtype=np.bool_),
    )


class Cost(NamedTuple):
    """What a schedule costs: seconds of second calls, peak bytes, bytes x calls over the limit.

    `late`: Second calls that would come after their inputs are overwritten.
    """

    seconds: float
    peak: int
    excess: float
    late: int


def cost_of(nodes: Nodes, kept: Int64[ndarray, " n"], limit: int, schedule: Schedule) -> Cost:
    """Return the cost of retention intervals, and fill in the schedule.

    Args:
        nodes: The ops.
        kept: The last op up to which the first result of each op is kept.
        limit: Bytes.
        schedule: Overwritten.
    """
    seconds, peak, excess, late = evaluate(nodes, kept, limit - nodes.base, schedule)
    return Cost(float(seconds), int(peak) + nodes.base, float(excess), int(late))


@helper
def _later(calls: tuple[int, int], n: int, stage: Int64[ndarray, " n"]) -> int:
    """Return the later one of two calls."""
    one, other = calls
    a = stage[one - n] if one >= n else one
    b = stage[other - n] if other >= n else other
    if a != b:
        return one if a > b else other
    # Before one op: second calls in the order of their ops, the op itself last.
    if one < n:
        return one
    if other < n:
        return other
    return max(one, other)


@helper
def _interval(nodes: Nodes, kept: Int64[ndarray, " n"], s: Schedule, i: int) -> int:
    """Return the op before which the second call of an op stands; find its tensors' last uses."""
    n = len(nodes.seconds)
    again, last_kept, stage = nodes.again[i], max(kept[i], nodes.held[i]), n
    for t in range(nodes.output_ptr[i], nodes.output_ptr[i + 1]):
        s.end[0, t], s.end[1, t] = i, -1
        for u in range(nodes.use_ptr[t], nodes.use_ptr[t + 1]):
            reader = nodes.use_op[u]
            for g in range(2):
                at = reader if g == 0 else s.stage[reader]
                if at == n:
                    continue
                row = 0
                if (again == FREELY and at > last_kept) or (again == WITH and g == 1):
                    row = 1
                    stage = min(stage, at)
                end = reader + g * n
                for v in range(nodes.view_ptr[u], nodes.view_ptr[u + 1]):
                    end = _later((end, s.end[g, nodes.views[v]]), n, s.stage)
                known = s.end[row, t]
                s.end[row, t] = end if known < 0 else _later((known, end), n, s.stage)
    if stage < n:
        for t in range(nodes.output_ptr[i], nodes.output_ptr[i + 1]):
            if s.end[1, t] < 0:
                s.end[1, t] = i + n
    return stage


@helper
def settle(nodes: Nodes, kept: Int64[ndarray, " n"], s: Schedule) -> None:
    """Find where second calls go and which call uses each tensor last, for stale ops only.

    The producers that an op reads from become stale if its second call moves, or if it makes a
    view.
    """
    for i in range(len(nodes.seconds) - 1, -1, -1):
        if not s.is_stale[i]:
            continue
        s.is_stale[i] = False
        stage = _interval(nodes, kept, s, i)
        if stage != s.stage[i] or nodes.is_view[i]:
            for r in range(nodes.read_ptr[i], nodes.read_ptr[i + 1]):
                s.is_stale[nodes.read_op[r]] = True
        s.stage[i] = stage


@kernel
def evaluate(
    nodes: Nodes, kept: Int64[ndarray, " n"], limit: int, s: Schedule
) -> tuple[float, int, float, int]:
    """Return what `cost_of` does, residual bytes aside: seconds, peak, excess and late calls."""
    s.is_stale[:] = True
    return evaluate_stale(nodes, kept, limit, s)


@kernel
def evaluate_stale(
    nodes: Nodes, kept: Int64[ndarray, " n"], limit: int, s: Schedule
) -> tuple[float, int, float, int]:
    """Return the same as `evaluate` if only ops marked as stale changed since the last time."""
    n = len(nodes.seconds)
    settle(nodes, kept, s)
    seconds, late = 0.0, 0
    s.head[:] = -1
    s.live[:] = 0
    for i in range(n - 1, -1, -1):
        at = s.stage[i]
        if at < n:
            seconds += nodes.seconds[i]
            late += at > nodes.latest[i]
            s.next[i] = s.head[at]
            s.head[at] = i
    place = 0
    for i in range(n):
        again = s.head[i]
        while again >= 0:
            s.position[n + again] = place
            place += 1
            again = s.next[again]
        s.position[i] = place
        place += 1
    for i in range(n):
        for g in range(2):
            if g == 1 and s.stage[i] == n:
                s.position[n + i] = -1
                continue
            for t in range(nodes.output_ptr[i], nodes.output_ptr[i + 1]):
                if nodes.num_bytes[t]:
                    s.live[s.position[i + g * n]] += nodes.num_bytes[t]
                    s.live[s.position[s.end[g, t]] + 1] -= nodes.num_bytes[t]
    for p in range(1, place):
        s.live[p] += s.live[p - 1]
    for i in range(n):
        s.live[s.position[i]] += nodes.workspace[i]
        if s.stage[i] < n:
            s.live[s.position[n + i]] += nodes.workspace[i]
    peak, excess = 0, 0.0
    for p in range(place):
        peak = max(peak, s.live[p])
        excess += max(0, s.live[p] - limit)
    return seconds, peak, excess, late
