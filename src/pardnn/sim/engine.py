"""The judge: the time that a plan takes, under its own static order or a dynamic scheduler.

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

import numba
import numpy as np
from jaxtyping import Int64
from numpy import ndarray

from pardnn.errors import InvalidPlanError, shown
from pardnn.graph.csr import GraphArrays
from pardnn.graph.ir import Graph
from pardnn.plan.plan import PlanArrays
from pardnn.sim.dynamic import emulate
from pardnn.sim.heap import heap_pop, heap_push
from pardnn.sim.levels import bottom_levels
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


def run_lists(arrays: GraphArrays, machine: Machine, plan: PlanArrays) -> Timeline:
    """Return the timeline of a plan under its own order; NaN for what a deadlock stops."""
    n, m = arrays.num_ops, len(plan.message_tensor)
    start, finish = np.full(n, np.nan), np.full(n, np.nan)
    sent, arrived = np.full(m, np.nan), np.full(m, np.nan)
    dispatch = np.full(n, -1, dtype=np.int64)
    waits = _waits(arrays, plan)
    _order_kernel(arrays, machine, plan, waits, start, finish, dispatch, sent, arrived)
    return Timeline(
        start,
        finish,
        dispatch,
        plan.message_tensor,
        plan.message_source,
        plan.message_target,
        sent,
        arrived,
    )


def _by_op(ops: ndarray, num_ops: int) -> tuple[ndarray, ndarray]:
    counts = np.bincount(ops, minlength=num_ops)
    pointers = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    return pointers, np.argsort(ops, kind="stable").astype(np.int64)


def _waits(a: GraphArrays, plan: PlanArrays) -> _Waits:
    n = a.num_ops
    position = np.empty(n, dtype=np.int64)
    position[plan.order_op] = np.arange(n)  # positions on one device compare alike
    first_use = np.empty(len(plan.message_tensor), dtype=np.int64)
    _first_use_kernel(a, plan, position, first_use)
    post_ptr, post = _by_op(plan.message_post, n)
    send_ptr, send = _by_op(a.tensor_op[plan.message_tensor], n)
    later = np.repeat(np.arange(n), np.diff(a.after_ptr))
    remote = plan.place[later] != plan.place[a.after_op]
    missing = np.bincount(first_use, minlength=n) + np.bincount(later[remote], minlength=n)
    holds = np.bincount(plan.message_hold[plan.message_hold >= 0], minlength=n)
    return _Waits(
        first_use, post_ptr, post, send_ptr, send, missing.astype(np.int64), holds.astype(np.int64)
    )


@numba.njit(cache=True)
def _first_use_kernel(
    a: GraphArrays, plan: PlanArrays, position: ndarray, first_use: ndarray
) -> None:
    for i in range(len(plan.message_tensor)):
        t, best = plan.message_tensor[i], -1
        for edge in range(a.consumer_ptr[t], a.consumer_ptr[t + 1]):
            op = a.consumer_op[edge]
            if plan.place[op] == plan.message_target[i] and (
                best < 0 or position[op] < position[best]
            ):
                best = op
        first_use[i] = best


@numba.njit(cache=True)
def _order_kernel(
    a: GraphArrays,
    machine: Machine,
    plan: PlanArrays,
    waits: _Waits,
    start: ndarray,
    finish: ndarray,
    dispatch: ndarray,
    sent: ndarray,
    arrived: ndarray,
) -> None:
    n, m, k = len(plan.place), len(plan.message_tensor), len(machine.device_class)
    # Events: ops finish (id < n), messages arrive (< n + m), order edges arrive (>= n + m).
    event_key = np.empty(n + m + len(a.before_op) + 1)
    event_id = np.empty(n + m + len(a.before_op) + 1, dtype=np.int64)
    events, count = 0, 0
    at = plan.order_ptr[:-1].copy()
    running = np.zeros(k, dtype=np.bool_)
    half = np.zeros(m, dtype=np.int64)  # how many of the two conditions of a transfer hold
    reached = np.zeros(n, dtype=np.bool_)
    link_free = np.zeros((k, k))
    wake = np.arange(max(k, 2))  # devices that may go on
    awake, now = k, 0.0
    while True:
        for w in range(awake):
            d = wake[w]
            held = at[d] > plan.order_ptr[d] and waits.holds[plan.order_op[at[d] - 1]] > 0
            if running[d] or held or at[d] == plan.order_ptr[d + 1]:
                continue
            op = plan.order_op[at[d]]
            if not reached[op]:
                reached[op] = True
                for i in range(waits.post_ptr[op], waits.post_ptr[op + 1]):
                    events = _half_done(
                        waits.post[i], now, a, machine, plan, half, link_free, sent, arrived,
                        event_key, event_id, events,
                    )  # fmt: skip
            if waits.missing[op] > 0:
                continue
            running[d] = True
            start[op] = now
            finish[op] = now + machine.seconds[machine.device_class[d], op]
            dispatch[op] = count
            count += 1
            events = heap_push(event_key, event_id, events, finish[op], op)
        if events == 0:
            break
        now, event = event_key[0], event_id[0]
        events = heap_pop(event_key, event_id, events)
        awake = 1
        if event < n:
            d = plan.place[event]
            wake[0] = d
            running[d] = False
            at[d] += 1
            events = _op_ran(
                event, now, a, machine, plan, waits, half, link_free, sent, arrived,
                event_key, event_id, events,
            )  # fmt: skip
        elif event < n + m:
            i = event - n
            waits.missing[waits.first_use[i]] -= 1
            wake[0] = plan.message_target[i]
            if plan.message_hold[i] >= 0:
                waits.holds[plan.message_hold[i]] -= 1
                wake[1] = plan.message_source[i]
                awake = 2
        else:
            op = a.before_op[event - n - m]
            waits.missing[op] -= 1
            wake[0] = plan.place[op]


@numba.njit(cache=True)
def _op_ran(
    op: int,
    now: float,
    a: GraphArrays,
    machine: Machine,
    plan: PlanArrays,
    waits: _Waits,
    half: ndarray,
    link_free: ndarray,
    sent: ndarray,
    arrived: ndarray,
    event_key: ndarray,
    event_id: ndarray,
    events: int,
) -> int:
    """Let go what waits for an op on other devices."""
    n, m, d = len(plan.place), len(plan.message_tensor), plan.place[op]
    for i in range(waits.send_ptr[op], waits.send_ptr[op + 1]):
        events = _half_done(
            waits.send[i], now, a, machine, plan, half, link_free, sent, arrived,
            event_key, event_id, events,
        )  # fmt: skip
    for i in range(a.before_ptr[op], a.before_ptr[op + 1]):
        q = plan.place[a.before_op[i]]
        if q != d:
            at = now + machine.latency[d, q]
            events = heap_push(event_key, event_id, events, at, n + m + i)
    return events


@numba.njit(cache=True)
def _half_done(
    i: int,
    now: float,
    a: GraphArrays,
    machine: Machine,
    plan: PlanArrays,
    half: ndarray,
    link_free: ndarray,
    sent: ndarray,
    arrived: ndarray,
    event_key: ndarray,
    event_id: ndarray,
    events: int,
) -> int:
    half[i] += 1
    if half[i] < 2:
        return events
    d, q = plan.message_source[i], plan.message_target[i]
    begin = now
    if machine.serial == 1:
        begin = max(now, link_free[d, q])
    t = plan.message_tensor[i]
    sent[i] = begin
    arrived[i] = begin + (machine.latency[d, q] + a.tensor_bytes[t] / machine.bandwidth[d, q])
    link_free[d, q] = arrived[i]
    return heap_push(event_key, event_id, events, arrived[i], len(plan.place) + i)
