"""The least memory that a global order of the ops needs, and what is left spent on time.

Let `rank` be any topological order of all ops, over all devices. A plan that runs each device's ops
in this order cannot deadlock if every message has an instant in it, its *slot*, at which it can be
sent: the receive is posted before the first op of the receiver after the slot, and the sender waits
after its last op before the slot. The latest slot, just before the first reader, makes a device
hold no tensor that one device would not hold at that point of the order (sizes of views aside).

`squeezed_plan` starts there. Then, while a device stays below its capacity, receives are posted
earlier and sends are held longer, towards the positions that cost no time, first messages first.

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
from pardnn.kernels.sorting import stable_order
from pardnn.place.ordering.schedule import first_overwrite, first_reaching, free_plan, ordered_plan
from pardnn.plan.plan import PlanArrays
from pardnn.sim.engine import run_lists
from pardnn.sim.machine import Machine
from pardnn.sim.peak import held_bytes, home_storages, storage_lives, tensor_rows
from pardnn.sim.timeline import Timeline

#: Stands for an unlimited device; sums of bytes stay below 2**62.
UNLIMITED = 2**61


class _Order(NamedTuple):
    """A global order, by op and by position in the plan's lists."""

    rank: Int64[ndarray, " n"]
    position: Int64[ndarray, " n"]
    rank_at: Int64[ndarray, " n"]  # rank of the op at a position; increasing within a device


def limits(capacities: Sequence[int | None]) -> Int64[ndarray, " k"]:
    """Return capacities as an array, `UNLIMITED` for None."""
    return np.array([UNLIMITED if c is None else c for c in capacities], dtype=np.int64)


def squeezed_plan(
    arrays: GraphArrays,
    machine: Machine,
    place: Int64[ndarray, " n"],
    rank: Int64[ndarray, " n"],
    capacities: Sequence[int | None],
    overwrites: Int64[ndarray, "w 2"],
) -> PlanArrays:
    """Return the fastest plan found that keeps to an order and, if any does, to the capacities.

    Args:
        arrays: The graph.
        machine: Durations and links.
        place: Device of each op.
        rank: Position of each op in a topological order of all ops.
        capacities: Usable bytes per device. They are exceeded only where the order itself needs
            more: check the peaks.
        overwrites: From `first_overwrites`.
    """
    a, most = arrays, limits(capacities)
    free = free_plan(a, machine.num_devices, place, rank)
    timeline = run_lists(a, machine, free)
    wish = ordered_plan(a, machine.num_devices, place, timeline, overwrites)
    plan, order = _tight_plan(a, wish, rank, overwrites)
    rows = tensor_rows(a, plan)
    tree = range_max(held_bytes(a, plan, storage_lives(a, plan, rows)))
    _post_kernel(a, plan, order, wish, most, tree)
    _least_hold_kernel(a, plan, order)
    lives = storage_lives(a, plan, rows)
    tree = range_max(held_bytes(a, plan, lives))
    _hold_kernel(a, plan, order, wish, most, tree, lives[1], home_storages(a, plan, *rows))
    timeline = run_lists(a, machine, plan)
    by_start = np.lexsort((timeline.message_finish, timeline.message_start))
    return PlanArrays(*plan[:3], *(column[by_start] for column in plan[3:8]))


def quickly_squeezed_plan(
    arrays: GraphArrays,
    timeline: Timeline,
    num_devices: int,
    place: Int64[ndarray, " n"],
    rank: Int64[ndarray, " n"],
    capacities: Sequence[int | None],
    overwrites: Int64[ndarray, "w 2"],
) -> PlanArrays:
    """Return the plan of `squeezed_plan` with fewer walks over the graph, for large ones.

    Sends are held no shorter than for the latest slot, which that plan gives up where nothing is
    gained, and messages are sorted by an instant at which each can be sent, not by a simulation.

    Args:
        arrays: The graph.
        timeline: Of the placement and the order, with memory spent freely.
        num_devices: Number of devices.
        place: Device of each op.
        rank: Position of each op in a topological order of all ops.
        capacities: As in `squeezed_plan`.
        overwrites: From `first_overwrites`.
    """
    a, most = arrays, limits(capacities)
    wish = ordered_plan(a, num_devices, place, timeline, overwrites)
    plan, order = _tight_plan(a, wish, rank, overwrites)
    rows = tensor_rows(a, plan)
    lives = storage_lives(a, plan, rows)
    tree = range_max(held_bytes(a, plan, lives))
    _post_kernel(a, plan, order, wish, most, tree)
    _hold_kernel(a, plan, order, wish, most, tree, lives[1], home_storages(a, plan, *rows))
    posted = order.position[plan.message_post]
    before = np.where(posted > plan.order_ptr[plan.message_target], order.rank_at[posted] - 1, 0)
    slot = np.maximum(order.rank[a.tensor_op[plan.message_tensor]], before)
    turn = stable_order(slot.astype(np.float64))
    return PlanArrays(*plan[:3], *(column[turn] for column in plan[3:8]))


def tight_plan(
    arrays: GraphArrays,
    num_devices: int,
    place: Int64[ndarray, " n"],
    rank: Int64[ndarray, " n"],
    overwrites: Int64[ndarray, "w 2"],
) -> PlanArrays:
    """Return the plan with every message in its latest slot; arguments as in `squeezed_plan`."""
    return _tight_plan(arrays, free_plan(arrays, num_devices, place, rank), rank, overwrites)[0]


def _tight_plan(
    arrays: GraphArrays, free: PlanArrays, rank: ndarray, overwrites: ndarray
) -> tuple[PlanArrays, _Order]:
    """Return a plan in the order of `rank` with its messages, in the same turn, in other slots."""
    position = np.empty(len(free.place), dtype=np.int64)
    position[free.order_op] = np.arange(len(free.place))
    rank = np.ascontiguousarray(rank, dtype=np.int64)
    order = _Order(rank, position, rank[free.order_op])
    m = len(free.message_tensor)
    plan = free._replace(
        message_post=np.empty(m, dtype=np.int64), message_hold=np.empty(m, dtype=np.int64)
    )
    _latest_slot_kernel(arrays, plan, order, overwrites)
    _least_hold_kernel(arrays, plan, order)
    return plan, order


@kernel
def _latest_slot_kernel(
    a: GraphArrays, plan: PlanArrays, order: _Order, overwrites: ndarray
) -> None:
    """Post every receive before its first reader, or before the sender overwrites the tensor."""
    for i in range(len(plan.message_tensor)):
        t, d, q = plan.message_tensor[i], plan.message_source[i], plan.message_target[i]
        at = len(plan.place)
        for edge in range(a.consumer_ptr[t], a.consumer_ptr[t + 1]):
            op = a.consumer_op[edge]
            if plan.place[op] == q:
                at = min(at, order.position[op])
        made = order.position[a.tensor_op[t]]
        writer = first_overwrite(a, plan.place, order.position, overwrites, t, d, made)
        if writer >= 0:
            # The slot, just before the op at `at`, must come before the writer.
            begin, end = plan.order_ptr[q], plan.order_ptr[q + 1]
            earlier = first_reaching(order.rank_at, begin, end, order.rank[writer])
            at = min(at, max(earlier - 1, begin))
        plan.message_post[i] = plan.order_op[at]


@kernel
def _least_hold_kernel(a: GraphArrays, plan: PlanArrays, order: _Order) -> None:
    """Hold every send until the sender's last op before the slot, and no longer."""
    for i in range(len(plan.message_tensor)):
        d, q = plan.message_source[i], plan.message_target[i]
        maker = a.tensor_op[plan.message_tensor[i]]
        slot = order.rank[maker]
        at = order.position[plan.message_post[i]]
        if at > plan.order_ptr[q]:
            # Not right after the op before `at`: that one may have to wait for sends of its own.
            slot = max(slot, order.rank_at[at] - 1)
        made, end = order.position[maker], plan.order_ptr[d + 1]
        after = first_reaching(order.rank_at, made, end, slot + 1)
        plan.message_hold[i] = plan.order_op[after - 1]


@kernel
def _post_kernel(
    a: GraphArrays,
    plan: PlanArrays,
    order: _Order,
    wish: PlanArrays,
    most: ndarray,
    tree: RangeMax,
) -> None:
    for i in range(len(plan.message_tensor)):
        size, limit = a.tensor_bytes[plan.message_tensor[i]], most[plan.message_target[i]]
        now = order.position[plan.message_post[i]]
        at = order.position[wish.message_post[i]]
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
    wish: PlanArrays,
    most: ndarray,
    tree: RangeMax,
    released: ndarray,
    storage: ndarray,
) -> None:
    n = len(plan.place)
    for i in range(len(plan.message_tensor)):
        t, d = plan.message_tensor[i], plan.message_source[i]
        end = plan.order_ptr[d + 1]
        least = order.position[plan.message_hold[i]]
        wished = end if wish.message_hold[i] < 0 else order.position[wish.message_hold[i]]
        if wished <= least:
            continue
        s = storage[t]
        owner = s if s < len(a.tensor_op) else plan.message_tensor[s - len(a.tensor_op)]
        size = a.tensor_bytes[owner]
        held = released[s]  # its last position, n if it stays
        if held < n and wished > held:
            fits = last = min(wished, end - 1)
            if most[d] < UNLIMITED:
                fits = last_fitting(tree, held + 1, last + 1, most[d] - size) - 1
                add_range(tree, held + 1, fits + 1, size)
            if fits < last:
                wished = fits
            released[s] = n if wished == end else fits
        hold = max(least, wished)
        plan.message_hold[i] = -1 if hold == end else plan.order_op[hold]
