"""Why ops and messages start when they do: the chain of waits behind any moment of a timeline.

Under its own order everything of a plan starts the moment that the last thing it waits for ends:

- an op waits for its device (the op before it, and sends that must have left first), for messages
  that it is the first to read, and for order edges from other devices;
- a message waits for the op that makes its tensor, for its receiver to reach the op before which
  the buffer is allocated, and with serial links for the message before it on its link.

So from any op a chain of computing and sending leads back to second 0 without a gap, and what falls
into an idle time of a device is what the device waits for: over a device it sums up to its idle
time. Of equal reasons the device's own comes first, then the op that makes the tensor.
O((ops + messages) log) for the causes, then O(1) per stretch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64
from numpy import ndarray

from pardnn.graph.ir import Graph
from pardnn.plan.lower import first_uses
from pardnn.plan.plan import PlanArrays, order_rows
from pardnn.sim.machine import Machine
from pardnn.sim.timeline import Timeline

#: What fills a stretch of time: nothing (second 0), an op, a message, the latency of an order edge.
NOTHING, COMPUTE, MESSAGE, ORDER = range(4)


class Stretch(NamedTuple):
    """A stretch of time that something waits for.

    Attributes:
        what: `COMPUTE`, `MESSAGE` or `ORDER`.
        number: Of the op, the message, or the op that an order edge comes from.
        start: Seconds.
        finish: Seconds.
    """

    what: int
    number: int
    start: float
    finish: float


class Idle(NamedTuple):
    """A stretch in which a device computes nothing.

    Attributes:
        device: Which waits.
        before: The op that waits; -1 if no op of the device is left.
        stretch: What it waits for, as far as it falls into the idle time.
    """

    device: int
    before: int
    stretch: Stretch


class Causes(NamedTuple):
    """The last thing that each op and each message waits for.

    Attributes:
        timeline: What is explained.
        op_what: What ends when an op starts.
        op_from: Its number.
        reach_what: What ends when a device reaches an op: the op before it, or one of its sends.
        reach_from: Its number.
        message_what: What ends when a message leaves: `COMPUTE`, the op that makes its tensor;
            `MESSAGE`, the one before it on its link; `ORDER`, that the receiver has reached the op
            before which it makes room.
        message_from: Its number.
    """

    timeline: Timeline
    op_what: Int64[ndarray, " n"]
    op_from: Int64[ndarray, " n"]
    reach_what: Int64[ndarray, " n"]
    reach_from: Int64[ndarray, " n"]
    message_what: Int64[ndarray, " m"]
    message_from: Int64[ndarray, " m"]


def causes(graph: Graph, machine: Machine, plan: PlanArrays, timeline: Timeline) -> Causes:
    """Return why each op and each message of a timeline starts when it does.

    Args:
        graph: The graph.
        machine: Durations and links.
        plan: A plan that does not deadlock.
        timeline: Its simulation under its own order.
    """
    reached, reach_what, reach_from = _reach(graph, plan, timeline)
    op_what, op_from, since = reach_what.copy(), reach_from.copy(), reached.copy()
    uses = np.array(first_uses(graph, plan), dtype=np.int64)
    arrived = timeline.message_finish
    _later(since, op_what, op_from, uses, arrived, MESSAGE, np.arange(len(uses)))
    a = graph.arrays
    after = np.repeat(np.arange(a.num_ops), np.diff(a.after_ptr))
    source, target = plan.place[a.after_op], plan.place[after]
    apart = source != target
    known = timeline.finish[a.after_op] + machine.latency[source, target]
    _later(since, op_what, op_from, after[apart], known[apart], ORDER, a.after_op[apart])
    message_what, message_from = _message_causes(graph, machine, plan, timeline, reached)
    return Causes(timeline, op_what, op_from, reach_what, reach_from, message_what, message_from)


def _reach(
    graph: Graph, plan: PlanArrays, timeline: Timeline
) -> tuple[ndarray, Int64[ndarray, " n"], Int64[ndarray, " n"]]:
    """Return when each device reaches each op, and what ends then."""
    n = graph.arrays.num_ops
    reached = np.zeros(n)
    what, origin = np.full(n, NOTHING, dtype=np.int64), np.full(n, -1, dtype=np.int64)
    following = np.full(n, -1, dtype=np.int64)
    for row in order_rows(plan):
        following[row[:-1]] = row[1:]
    before = np.flatnonzero(following >= 0)
    behind = following[before]
    reached[behind], what[behind], origin[behind] = timeline.finish[before], COMPUTE, before
    held = np.flatnonzero(plan.message_hold >= 0)
    held = held[following[plan.message_hold[held]] >= 0]
    behind = following[plan.message_hold[held]]
    _later(reached, what, origin, behind, timeline.message_finish[held], MESSAGE, held)
    return reached, what, origin


def _later(
    since: ndarray, what: ndarray, origin: ndarray, ops: ndarray, times: ndarray, kind: int,
    numbers: ndarray,
) -> None:  # fmt: skip
    """Note for each op the latest of some things that end, where that is later than what is known.

    Args:
        since: The latest end so far, of each op.
        what: Its kind.
        origin: Its number.
        ops: That wait for something.
        times: When that ends.
        kind: Of all these things.
        numbers: Of each.
    """
    by_time = np.lexsort((-numbers, times))  # of equal ones the first stays
    by_time = by_time[times[by_time] > since[ops[by_time]]]
    since[ops[by_time]] = times[by_time]
    what[ops[by_time]], origin[ops[by_time]] = kind, numbers[by_time]


def _message_causes(
    graph: Graph, machine: Machine, plan: PlanArrays, timeline: Timeline, reached: ndarray
) -> tuple[Int64[ndarray, " m"], Int64[ndarray, " m"]]:
    producer = graph.arrays.tensor_op[plan.message_tensor]
    made, room = timeline.finish[producer], reached[plan.message_post]
    what = np.where(made >= room, COMPUTE, ORDER)
    origin = np.where(made >= room, producer, plan.message_post)
    if not machine.serial:
        return what, origin
    last: dict[tuple[int, int, float], int] = {}
    source, target = plan.message_source.tolist(), plan.message_target.tolist()
    sent, arrived = timeline.message_start, timeline.message_finish
    for i in np.argsort(sent, kind="stable")[::-1].tolist():
        last[source[i], target[i], float(arrived[i])] = i  # of equal ends the first to leave stays
    for i in np.flatnonzero(sent > np.maximum(made, room)).tolist():
        what[i], origin[i] = MESSAGE, last[source[i], target[i], float(sent[i])]
    return what, origin


def chain(causes: Causes, op: int) -> Iterator[Stretch]:
    """Yield what an op waits for, the last first: stretches that lead back to second 0.

    Args:
        causes: From `causes`.
        op: Its number.
    """
    line = causes.timeline
    what, at, end = int(causes.op_what[op]), int(causes.op_from[op]), float(line.start[op])
    while what != NOTHING:
        if what == ORDER:
            yield Stretch(ORDER, at, float(line.finish[at]), end)
            what = COMPUTE
        elif what == COMPUTE:
            end = float(line.start[at])
            yield Stretch(COMPUTE, at, end, float(line.finish[at]))
            what, at = int(causes.op_what[at]), int(causes.op_from[at])
        else:
            end = float(line.message_start[at])
            yield Stretch(MESSAGE, at, end, float(line.message_finish[at]))
            what, at = int(causes.message_what[at]), int(causes.message_from[at])
            if what == ORDER:  # the receiver came to make room
                what, at = int(causes.reach_what[at]), int(causes.reach_from[at])


def critical_chain(causes: Causes) -> Iterator[Stretch]:
    """Yield what fills the step from its end back to second 0."""
    line = causes.timeline
    last = int(line.finish.argmax())
    yield Stretch(COMPUTE, last, float(line.start[last]), float(line.finish[last]))
    yield from chain(causes, last)


def idle_stretches(causes: Causes, plan: PlanArrays, device: int) -> Iterator[Idle]:
    """Yield what a device waits for in each of its idle times; a sum of them is its idle time.

    Args:
        causes: From `causes`.
        plan: The same plan.
        device: Its number.
    """
    line, since = causes.timeline, 0.0
    for op in order_rows(plan)[device]:
        start = float(line.start[op])
        if start > since:
            for stretch in _within(chain(causes, op), since, start):
                yield Idle(device, op, stretch)
        since = float(line.finish[op])
    if line.makespan > since:
        for stretch in _within(critical_chain(causes), since, line.makespan):
            yield Idle(device, -1, stretch)


def _within(stretches: Iterator[Stretch], begin: float, end: float) -> Iterator[Stretch]:
    """Yield the parts of stretches, the last first, that fall between two moments."""
    for stretch in stretches:
        start, finish = max(stretch.start, begin), min(stretch.finish, end)
        if finish > start:
            yield stretch._replace(start=start, finish=finish)
        if stretch.start <= begin:
            return
