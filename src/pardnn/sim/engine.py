"""The simulator: the time of a plan, under its own static order or a dynamic scheduler.

Under `order` each device runs its list. A transfer starts when its producer has finished and the
receiver has reached `post_before`; a sender stops after `hold_until` until the send has left; an
op starts when the messages that it is the first to read have arrived, and order edges from other
devices cost the link's latency. With `serial` links, transfers of one link queue in the order in
which they could start. O((ops + messages) log (ops + messages)).
"""

# Kernels: an element of an array is a number, which pyright cannot see.
# pyright: reportArgumentType=false, reportReturnType=false

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Float64, Int64
from numpy import ndarray

from pardnn.errors import InvalidPlanError, shown
from pardnn.graph.csr import GraphArrays
from pardnn.graph.ir import Graph
from pardnn.kernels.heap import heap_pop, heap_push
from pardnn.kernels.jit import helper, kernel
from pardnn.plan.plan import PlanArrays
from pardnn.sim.dynamic import emulate
from pardnn.sim.levels import bottom_levels, placed_seconds
from pardnn.sim.machine import Machine
from pardnn.sim.timeline import Timeline

Policy = Literal["order", "fifo", "priority"]


class _Waits(NamedTuple):
    """What each op of a plan waits for or lets go, as compressed sparse rows over ops."""

    first_use: Int64[ndarray, " m"]
    post_ptr: Int64[ndarray, " n+1"]  # messages posted when the op is reached
    post: Int64[ndarray, " m"]
    send_ptr: Int64[ndarray, " n+1"]  # messages that carry an output of the op
    send: Int64[ndarray, " m"]
    missing: Int64[ndarray, " n"]  # messages and remote order edges that the op waits for
    holds: Int64[ndarray, " n"]  # sends that must have left before the device goes on


def simulate(
    graph: Graph, machine: Machine, plan: PlanArrays, policy: Policy = "order"
) -> Timeline:
    """Return the timeline of a plan.

    Args:
        graph: The graph.
        machine: Durations and links.
        plan: A valid plan.
        policy: "order" runs the plan's lists; "fifo" and "priority" use only its placement.

    Raises:
        InvalidPlanError: E411, if the plan deadlocks under its own order.
    """
    a = graph.arrays
    if policy == "fifo":
        return emulate(a, machine, plan.place)
    if policy == "priority":
        return emulate(a, machine, plan.place, -bottom_levels(a, machine, plan.place))
    timeline = run_lists(a, machine, plan)
    if bool(np.isnan(timeline.finish).any()):
        stuck = graph.ops[int(np.flatnonzero(np.isnan(timeline.finish))[0])].name
        raise InvalidPlanError(f"the plan deadlocks: op {shown(stuck)} never runs", code="E411")
    return timeline


def run_lists(
    arrays: GraphArrays,
    machine: Machine,
    plan: PlanArrays,
    ready: Float64[ndarray, " k"] | None = None,
) -> Timeline:
    """Return the timeline of a plan under its own order; NaN for what a deadlock stops.

    Args:
        arrays: The graph.
        machine: Durations and links.
        plan: The plan.
        ready: When each device begins its list, seconds; None: all at 0.
    """
    n, m, k = arrays.num_ops, len(plan.message_tensor), machine.num_devices
    start, finish = np.full(n, np.nan), np.full(n, np.nan)
    sent, arrived = np.full(m, np.nan), np.full(m, np.nan)
    dispatch = np.full(n, -1, dtype=np.int64)
    source, target = plan.message_source, plan.message_target
    sizes = arrays.tensor_bytes[plan.message_tensor]
    _order_kernel(
        plan.order_ptr, plan.order_op, plan.place, placed_seconds(machine, plan.place),
        arrays.before_ptr, arrays.before_op, machine.latency, source, target, plan.message_hold,
        machine.latency[source, target] + sizes / machine.bandwidth[source, target],
        source * k + target if machine.serial else np.empty(0, dtype=np.int64),
        _waits(arrays, plan), np.empty(0) if ready is None else ready,
        start, finish, dispatch, sent, arrived,
    )  # fmt: skip
    return Timeline(start, finish, dispatch, plan.message_tensor, source, target, sent, arrived)


def _by_op(
    ops: Int64[ndarray, " m"], num_ops: int
) -> tuple[Int64[ndarray, " p"], Int64[ndarray, " m"]]:
    counts = np.bincount(ops, minlength=num_ops)
    pointers = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    return pointers, np.argsort(ops, kind="stable").astype(np.int64)


def _waits(a: GraphArrays, plan: PlanArrays) -> _Waits:
    n, first_use = a.num_ops, first_uses(a, plan)
    post_ptr, post = _by_op(plan.message_post, n)
    send_ptr, send = _by_op(a.tensor_op[plan.message_tensor], n)
    missing = np.bincount(first_use, minlength=n)
    if len(a.after_op) > 0:
        successor = np.repeat(np.arange(n), np.diff(a.after_ptr))
        remote = plan.place[successor] != plan.place[a.after_op]
        missing += np.bincount(successor[remote], minlength=n)
    holds = np.bincount(plan.message_hold[plan.message_hold >= 0], minlength=n)
    return _Waits(
        first_use, post_ptr, post, send_ptr, send, missing.astype(np.int64), holds.astype(np.int64)
    )


def first_uses(a: GraphArrays, plan: PlanArrays) -> Int64[ndarray, " m"]:
    """Return the first op that reads each message of a plan."""
    position = np.empty(a.num_ops, dtype=np.int64)
    position[plan.order_op] = np.arange(a.num_ops)  # positions on one device compare alike
    first_use = np.empty(len(plan.message_tensor), dtype=np.int64)
    _first_use_kernel(
        a.consumer_ptr, a.consumer_op, plan.place, position, plan.message_tensor,
        plan.message_target, first_use,
    )  # fmt: skip
    return first_use


@kernel
def _first_use_kernel(
    consumer_ptr: Int64[ndarray, " t1"],
    consumer_op: Int64[ndarray, " e"],
    place: Int64[ndarray, " n"],
    position: Int64[ndarray, " n"],
    tensor: Int64[ndarray, " m"],
    target: Int64[ndarray, " m"],
    first_use: Int64[ndarray, " m"],
) -> None:
    for i in range(len(tensor)):
        best = -1
        for edge in range(consumer_ptr[tensor[i]], consumer_ptr[tensor[i] + 1]):
            op = consumer_op[edge]
            if place[op] == target[i] and (best < 0 or position[op] < position[best]):
                best = op
        first_use[i] = best


@kernel
def _order_kernel(
    order_ptr: Int64[ndarray, " k1"],
    order_op: Int64[ndarray, " n"],
    place: Int64[ndarray, " n"],
    seconds: Float64[ndarray, " n"],
    before_ptr: Int64[ndarray, " p"],
    before_op: Int64[ndarray, " a"],
    latency: Float64[ndarray, "k k"],
    source: Int64[ndarray, " m"],
    target: Int64[ndarray, " m"],
    hold: Int64[ndarray, " m"],
    delay: Float64[ndarray, " m"],
    link: Int64[ndarray, " l"],
    waits: _Waits,
    ready: Float64[ndarray, " r"],
    start: Float64[ndarray, " n"],
    finish: Float64[ndarray, " n"],
    dispatch: Int64[ndarray, " n"],
    sent: Float64[ndarray, " m"],
    arrived: Float64[ndarray, " m"],
) -> None:
    n, m, k = len(place), len(sent), len(latency)
    # Events, by id: ops finish, messages arrive (from n), order edges (n + m), devices begin.
    devices = n + m + len(before_op)
    event_key = np.empty(2 * k + m + len(before_op) + 1)
    event_id = np.empty(len(event_key), dtype=np.int64)
    at, running, link_free = order_ptr[:-1].copy(), np.zeros(k, dtype=np.bool_), np.zeros(k * k)
    # Messages of which one of the two conditions came to hold just now, and whether one did before.
    halves, half = np.empty(2 * m + 1, dtype=np.int64), np.zeros(m, dtype=np.bool_)
    reached, wake = np.zeros(n, dtype=np.bool_), np.arange(k + 2)  # devices that may go on
    events, count, size, awake, now = np.int64(0), 0, 0, k, 0.0  # a literal compiles heaps twice
    for d in range(len(ready)):
        running[d] = True
        events = heap_push(event_key, event_id, events, ready[d], devices + d)
    while True:
        for w in range(awake):
            d = wake[w]
            waiting = at[d] > order_ptr[d] and waits.holds[order_op[at[d] - 1]] > 0
            if running[d] or waiting or at[d] == order_ptr[d + 1]:
                continue
            op = order_op[at[d]]
            if not reached[op]:
                reached[op] = True
                for i in range(waits.post_ptr[op], waits.post_ptr[op + 1]):
                    halves[size] = waits.post[i]
                    size += 1
            if waits.missing[op] == 0:
                running[d], start[op], dispatch[op] = True, now, count
                finish[op] = now + seconds[op]
                count += 1
                events = heap_push(event_key, event_id, events, finish[op], op)
        events = _send(
            now, halves[:size], half, link, link_free, delay, sent, arrived, event_key, event_id,
            events, n,
        )  # fmt: skip
        if events == 0:
            break
        now, event, size, awake = event_key[0], event_id[0], 0, 1
        events = heap_pop(event_key, event_id, events)
        if event >= devices:
            wake[0], running[event - devices] = event - devices, False
        elif event >= n + m:
            waits.missing[before_op[event - n - m]] -= 1
            wake[0] = place[before_op[event - n - m]]
        elif event >= n:
            i = event - n
            waits.missing[waits.first_use[i]] -= 1
            wake[0] = target[i]
            if hold[i] >= 0:
                waits.holds[hold[i]] -= 1
                wake[1], awake = source[i], 2
        else:
            d = place[event]
            wake[0], running[d], at[d] = d, False, at[d] + 1
            for i in range(waits.send_ptr[event], waits.send_ptr[event + 1]):
                halves[size] = waits.send[i]
                size += 1
            for i in range(before_ptr[event], before_ptr[event + 1]):
                q = place[before_op[i]]
                if q != d:
                    events = heap_push(event_key, event_id, events, now + latency[d, q], n + m + i)


@helper
def _send(
    now: float,
    halves: Int64[ndarray, " h"],
    half: Bool[ndarray, " m"],
    link: Int64[ndarray, " l"],
    link_free: Float64[ndarray, " q"],
    delay: Float64[ndarray, " m"],
    sent: Float64[ndarray, " m"],
    arrived: Float64[ndarray, " m"],
    event_key: Float64[ndarray, " x"],
    event_id: Int64[ndarray, " x"],
    events: int,
    first_id: int,
) -> int:
    """Start the messages of which the second condition came to hold; return the events."""
    for i in halves:
        if half[i]:
            sent[i] = now
            if len(link) > 0:
                sent[i] = max(now, link_free[link[i]])
                link_free[link[i]] = sent[i] + delay[i]
            arrived[i] = sent[i] + delay[i]
            events = heap_push(event_key, event_id, events, arrived[i], first_id + i)
        half[i] = True
    return events
