"""Memory-constrained schedules: the least memory that an order needs, the rest spent on speed.

Take any topological order of all ops, over all devices. A plan that runs each device's ops in this
order cannot deadlock if every message has an instant in it, its *slot*, at which it can be sent:
the receive is posted before the first op of the receiver after the slot, and the sender waits after
its last op before the slot. The latest slot, just before the first consumer, makes a device hold no
tensor that one device would not hold at that point of the order (sizes of views aside).

`memory_bounded_plan` starts there. If a sender then holds too much, its messages get earlier slots
(`early_slots`). Then, while a device stays below its capacity, receives are posted earlier and
sends are held longer, towards the positions that cost no time, in the order of the messages.

A plan's `post_before` is the post of an irecv and its `hold_until` the wait of an isend.
O((ops + edges) log ops + messages log^2 ops).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64
from numpy import ndarray

from pardnn.graph.csr import GraphArrays
from pardnn.kernels.jit import kernel
from pardnn.kernels.segment_tree import RangeMax, add_range, first_fitting, last_fitting, range_max
from pardnn.kernels.sorting import inverse_permutation, stable_order
from pardnn.place.ordering.early_slots import with_early_slots
from pardnn.place.ordering.schedule import first_overwrite, first_reaching, free_plan, ordered_plan
from pardnn.plan.plan import PlanArrays
from pardnn.sim.engine import run_lists
from pardnn.sim.machine import Machine
from pardnn.sim.peak import home_storages, live_bytes, live_ranges, messages_by_tensor
from pardnn.sim.timeline import Timeline

#: Stands for an unlimited device; sums of bytes stay below 2**62.
UNLIMITED = 2**61


class _Order(NamedTuple):
    """A global order, and the lists of the devices in it.

    Attributes:
        position: Of each op in the global order.
        list_position: Of each op in `plan.order_op`.
        position_at: Position in the global order of the op at each position of `plan.order_op`;
            increasing within a device.
    """

    position: Int64[ndarray, " n"]
    list_position: Int64[ndarray, " n"]
    position_at: Int64[ndarray, " n"]


def limits(capacities: Sequence[int | None]) -> Int64[ndarray, " k"]:
    """Return capacities as an array, `UNLIMITED` for None."""
    return np.array([UNLIMITED if c is None else c for c in capacities], dtype=np.int64)


def memory_bounded_plan(
    arrays: GraphArrays,
    machine: Machine,
    place: Int64[ndarray, " n"],
    position: Int64[ndarray, " n"],
    capacities: Sequence[int | None],
    overwrites: Int64[ndarray, "w 2"],
) -> PlanArrays:
    """Return the fastest plan found that follows an order and, if possible, fits the capacities.

    Args:
        arrays: The graph.
        machine: Durations and links.
        place: Device of each op.
        position: Of each op in a topological order of all ops.
        capacities: Usable bytes per device. They are exceeded only where the order itself needs
            more: check the peaks.
        overwrites: From `first_overwrites`.
    """
    found = _bounded(
        arrays, machine, place, position, limits(capacities), overwrites, may_exceed=True
    )
    assert found is not None
    assert found.plan is not None
    return found.plan


class InOrder(NamedTuple):
    """A plan that fits, in a given order.

    Attributes:
        plan: The plan; None if it cannot take less than what was asked for.
        seconds: Simulated; infinite without a plan, NaN if devices wait for each other for ever.
    """

    plan: PlanArrays | None
    seconds: float


#: Fits, but takes too long.
_TOO_SLOW = InOrder(None, np.inf)


def fitting_plan(
    arrays: GraphArrays,
    machine: Machine,
    place: Int64[ndarray, " n"],
    position: Int64[ndarray, " n"],
    capacities: Sequence[int | None],
    overwrites: Int64[ndarray, "w 2"],
    *,
    below: float = np.inf,
) -> InOrder | None:
    """Return the plan of `memory_bounded_plan` if it fits; None as soon as it cannot.

    Without memory limits no op of the same order starts later, unless messages queue at links; so
    where that takes as long as `below`, whether it fits is all that is found out (as long as no
    device waits for ever).

    Args:
        arrays: The graph.
        machine: Durations and links.
        place: Device of each op.
        position: Of each op in a topological order of all ops.
        capacities: Usable bytes per device.
        overwrites: From `first_overwrites`.
        below: Seconds; a plan that takes as long need not be made.
    """
    return _bounded(
        arrays, machine, place, position, limits(capacities), overwrites,
        may_exceed=False, below=below,
    )  # fmt: skip


def _bounded(
    a: GraphArrays,
    machine: Machine,
    place: Int64[ndarray, " n"],
    position: Int64[ndarray, " n"],
    capacity: Int64[ndarray, " k"],
    overwrites: Int64[ndarray, "w 2"],
    *,
    may_exceed: bool,
    below: float = np.inf,
) -> InOrder | None:
    """Return the fastest plan found of an order; None if it must fit and does not."""
    free = free_plan(a, machine.num_devices, place, position)
    latest, _ = _with_latest_slots(a, free, position, overwrites)
    is_within = _is_within(a, latest, capacity)
    if not (is_within or may_exceed) and not _is_within(a, _sent_at_once(a, latest), capacity):
        return None
    timeline = run_lists(a, machine, free)
    is_slow = not machine.serial and timeline.makespan >= below
    if is_slow and is_within:
        return _TOO_SLOW
    target = ordered_plan(a, machine.num_devices, place, timeline, overwrites)
    latest, order = _with_latest_slots(a, target, position, overwrites)
    if is_within:
        plan, timeline = _with_room_spent(a, machine, latest, order, target, capacity)
    else:
        for before_ops in (False, True):
            plan = with_early_slots(a, latest, order.position, capacity, before_ops=before_ops)
            if not may_exceed and not _is_within(a, plan, capacity):  # what is spent fits
                return None
            if is_slow:
                return _TOO_SLOW
            plan, timeline = _with_room_spent(
                a, machine, plan, order, target, capacity, keeps_holds=True
            )
            if not np.isnan(timeline.finish).any():
                break
    by_start = np.lexsort((timeline.message_finish, timeline.message_start))
    plan = PlanArrays(*plan[:3], *(column[by_start] for column in plan[3:8]))
    if machine.serial:  # messages that could start at once queue as they come
        timeline = run_lists(a, machine, plan)
    return InOrder(plan, timeline.makespan)


def _is_within(a: GraphArrays, plan: PlanArrays, capacity: Int64[ndarray, " k"]) -> bool:
    """Whether no device holds more than it may."""
    return bool((live_bytes(a, plan) <= capacity[plan.place[plan.order_op]]).all())


def _sent_at_once(a: GraphArrays, latest: PlanArrays) -> PlanArrays:
    """Return a plan that holds no more than any other with its order: ranks wait for no send.

    Receives are posted last; a send is held no shorter than until its tensor is made.
    """
    return latest._replace(message_hold=a.tensor_op[latest.message_tensor])


def _with_room_spent(
    a: GraphArrays,
    machine: Machine,
    plan: PlanArrays,
    order: _Order,
    target: PlanArrays,
    capacity: Int64[ndarray, " k"],
    *,
    keeps_holds: bool = False,
) -> tuple[PlanArrays, Timeline]:
    """Move posts and holds towards a target's where memory allows it; return the times, too."""
    rows = messages_by_tensor(a, plan)
    tree = range_max(live_bytes(a, plan, live_ranges(a, plan, rows)))
    _post_kernel(a, plan, order, target, capacity, tree)
    if not keeps_holds:
        _least_hold_kernel(a, plan, order)
    ranges = live_ranges(a, plan, rows)
    tree = range_max(live_bytes(a, plan, ranges))
    _hold_kernel(a, plan, order, target, capacity, tree, ranges[1], home_storages(a, plan, *rows))
    return plan, run_lists(a, machine, plan)


def fast_memory_bounded_plan(
    arrays: GraphArrays,
    timeline: Timeline,
    num_devices: int,
    place: Int64[ndarray, " n"],
    position: Int64[ndarray, " n"],
    capacities: Sequence[int | None],
    overwrites: Int64[ndarray, "w 2"],
) -> PlanArrays:
    """Return the plan of `memory_bounded_plan` with fewer walks over the graph, for large ones.

    Sends are held at least until the latest slot, even if that gains nothing, and messages are
    sorted by an instant at which each can be sent, not by a simulation.

    Args:
        arrays: The graph.
        timeline: Of the placement and the order, without memory limits.
        num_devices: Number of devices.
        place: Device of each op.
        position: Of each op in a topological order of all ops.
        capacities: As in `memory_bounded_plan`.
        overwrites: From `first_overwrites`.
    """
    a, capacity = arrays, limits(capacities)
    target = ordered_plan(a, num_devices, place, timeline, overwrites)
    plan, order = _with_latest_slots(a, target, position, overwrites)
    rows = messages_by_tensor(a, plan)
    ranges = live_ranges(a, plan, rows)
    tree = range_max(live_bytes(a, plan, ranges))
    _post_kernel(a, plan, order, target, capacity, tree)
    _hold_kernel(a, plan, order, target, capacity, tree, ranges[1], home_storages(a, plan, *rows))
    posted = order.list_position[plan.message_post]
    before = np.where(
        posted > plan.order_ptr[plan.message_target], order.position_at[posted] - 1, 0
    )
    slot = np.maximum(order.position[a.tensor_op[plan.message_tensor]], before)
    turn = stable_order(slot.astype(np.float64))
    return PlanArrays(*plan[:3], *(column[turn] for column in plan[3:8]))


def latest_slot_plan(
    arrays: GraphArrays,
    num_devices: int,
    place: Int64[ndarray, " n"],
    position: Int64[ndarray, " n"],
    overwrites: Int64[ndarray, "w 2"],
) -> PlanArrays:
    """Return the plan with every message in its latest slot, where it needs least memory.

    Args:
        arrays: The graph.
        num_devices: Number of devices.
        place: Device of each op.
        position: Of each op in a topological order of all ops.
        overwrites: From `first_overwrites`.
    """
    return _with_latest_slots(
        arrays, free_plan(arrays, num_devices, place, position), position, overwrites
    )[0]


def _with_latest_slots(
    arrays: GraphArrays,
    free: PlanArrays,
    position: Int64[ndarray, " n"],
    overwrites: Int64[ndarray, "w 2"],
) -> tuple[PlanArrays, _Order]:
    """Return a plan in a global order, with the same messages in their latest slots."""
    list_position = inverse_permutation(free.order_op)
    position = np.ascontiguousarray(position, dtype=np.int64)
    order = _Order(position, list_position, position[free.order_op])
    m = len(free.message_tensor)
    plan = free._replace(
        message_post=np.empty(m, dtype=np.int64), message_hold=np.empty(m, dtype=np.int64)
    )
    _latest_slot_kernel(arrays, plan, order, overwrites)
    _least_hold_kernel(arrays, plan, order)
    return plan, order


@kernel
def _latest_slot_kernel(
    a: GraphArrays, plan: PlanArrays, order: _Order, overwrites: Int64[ndarray, "w 2"]
) -> None:
    """Post every receive before its first consumer, or before the sender overwrites the tensor."""
    for i in range(len(plan.message_tensor)):
        t, d, q = plan.message_tensor[i], plan.message_source[i], plan.message_target[i]
        at = len(plan.place)
        for edge in range(a.consumer_ptr[t], a.consumer_ptr[t + 1]):
            op = a.consumer_op[edge]
            if plan.place[op] == q:
                at = min(at, order.list_position[op])
        made = order.list_position[a.tensor_op[t]]
        writer = first_overwrite(a, plan.place, order.list_position, overwrites, t, d, made)
        if writer >= 0:
            # The slot, just before the op at `at`, must come before the writer.
            begin, end = plan.order_ptr[q], plan.order_ptr[q + 1]
            writer_at = first_reaching(order.position_at, begin, end, order.position[writer])
            at = min(at, max(writer_at - 1, begin))
        plan.message_post[i] = plan.order_op[at]


@kernel
def _least_hold_kernel(a: GraphArrays, plan: PlanArrays, order: _Order) -> None:
    """Hold every send until the sender's last op before the slot, and no longer."""
    for i in range(len(plan.message_tensor)):
        d, q = plan.message_source[i], plan.message_target[i]
        producer = a.tensor_op[plan.message_tensor[i]]
        slot = order.position[producer]
        at = order.list_position[plan.message_post[i]]
        if at > plan.order_ptr[q]:
            # Not right after the op before `at`: that one may have to wait for sends of its own.
            slot = max(slot, order.position_at[at] - 1)
        made, end = order.list_position[producer], plan.order_ptr[d + 1]
        after = first_reaching(order.position_at, made, end, slot + 1)
        plan.message_hold[i] = plan.order_op[after - 1]


@kernel
def _post_kernel(
    a: GraphArrays,
    plan: PlanArrays,
    order: _Order,
    target: PlanArrays,
    capacity: Int64[ndarray, " k"],
    tree: RangeMax,
) -> None:
    for i in range(len(plan.message_tensor)):
        size, limit = a.tensor_bytes[plan.message_tensor[i]], capacity[plan.message_target[i]]
        now = order.list_position[plan.message_post[i]]
        at = order.list_position[target.message_post[i]]
        if limit < UNLIMITED and at < now:
            at = first_fitting(tree, at, now, limit - size)
            add_range(tree, at, now, size)
        if at < now:
            plan.message_post[i] = plan.order_op[at]


@kernel
def _hold_kernel(
    a: GraphArrays,
    plan: PlanArrays,
    order: _Order,
    target: PlanArrays,
    capacity: Int64[ndarray, " k"],
    tree: RangeMax,
    released: Int64[ndarray, " s"],
    storage: Int64[ndarray, " t"],
) -> None:
    n = len(plan.place)
    for i in range(len(plan.message_tensor)):
        t, d = plan.message_tensor[i], plan.message_source[i]
        end = plan.order_ptr[d + 1]
        least = order.list_position[plan.message_hold[i]]
        wanted = end if target.message_hold[i] < 0 else order.list_position[target.message_hold[i]]
        if wanted <= least:
            continue
        s = storage[t]
        owner = s if s < len(a.tensor_op) else plan.message_tensor[s - len(a.tensor_op)]
        size = a.tensor_bytes[owner]
        released_at = released[s]  # its last position, n if it stays
        if released_at < n and wanted > released_at:
            fits = last = min(wanted, end - 1)
            if capacity[d] < UNLIMITED:
                fits = last_fitting(tree, released_at + 1, last + 1, capacity[d] - size) - 1
                add_range(tree, released_at + 1, fits + 1, size)
            if fits < last:
                wanted = fits
            released[s] = n if wanted == end else fits
        hold = max(least, wanted)
        plan.message_hold[i] = -1 if hold == end else plan.order_op[hold]
