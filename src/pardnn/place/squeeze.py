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

import numba
import numpy as np
from jaxtyping import Int64
from numpy import ndarray

from pardnn.graph.csr import GraphArrays
from pardnn.place.rangemax import RangeMax, add_range, first_fitting, last_fitting, range_max
from pardnn.place.schedule import first_overwrite, free_plan, ordered_plan
from pardnn.plan.plan import PlanArrays
from pardnn.sim.engine import run_lists
from pardnn.sim.machine import Machine
from pardnn.sim.peak import held_bytes, home_storages, storage_lives, tensor_rows

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
    a = arrays
    plan, order = _tight_plan(a, machine.num_devices, place, rank, overwrites)
    free = free_plan(a, machine.num_devices, place, rank)
    timeline = run_lists(a, machine, free)
    wish = ordered_plan(a, machine.num_devices, place, timeline, overwrites)
    plan = _in_order_of(plan, wish)
    most = limits(capacities)
    tree = range_max(held_bytes(a, plan))
    _post_kernel(a, plan, order, wish, most, tree)
    _least_hold_kernel(a, plan, order)
    tree = range_max(held_bytes(a, plan))
    released = storage_lives(a, plan)[1]
    storage = home_storages(a, plan, *tensor_rows(a, plan))
    _hold_kernel(a, plan, order, wish, most, tree, released, storage)
    timeline = run_lists(a, machine, plan)
    by_start = np.lexsort((timeline.message_finish, timeline.message_start))
    return PlanArrays(*plan[:3], *(column[by_start] for column in plan[3:8]))


def tight_plan(
    arrays: GraphArrays,
    num_devices: int,
    place: Int64[ndarray, " n"],
    rank: Int64[ndarray, " n"],
    overwrites: Int64[ndarray, "w 2"],
) -> PlanArrays:
    """Return the plan with every message in its latest slot; arguments as in `squeezed_plan`."""
    return _tight_plan(arrays, num_devices, place, rank, overwrites)[0]


def _tight_plan(
    arrays: GraphArrays, num_devices: int, place: ndarray, rank: ndarray, overwrites: ndarray
) -> tuple[PlanArrays, _Order]:
    plan = free_plan(arrays, num_devices, place, rank)
    position = np.empty(len(place), dtype=np.int64)
    position[plan.order_op] = np.arange(len(place))
    order = _Order(np.ascontiguousarray(rank, dtype=np.int64), position, rank[plan.order_op])
    m = len(plan.message_tensor)
    plan = plan._replace(
        message_post=np.empty(m, dtype=np.int64), message_hold=np.empty(m, dtype=np.int64)
    )
    _latest_slot_kernel(arrays, plan, order, overwrites)
    _least_hold_kernel(arrays, plan, order)
    return plan, order


def _in_order_of(plan: PlanArrays, wish: PlanArrays) -> PlanArrays:
    """Return `plan` with its messages, each (tensor, target) once, in the order of `wish`."""
    k = plan.num_devices
    mine = np.argsort(plan.message_tensor * k + plan.message_target)
    wished = np.argsort(wish.message_tensor * k + wish.message_target)
    take = np.empty_like(mine)
    take[wished] = mine
    return PlanArrays(*plan[:3], *(column[take] for column in plan[3:8]))


@numba.njit(cache=True)
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
            earlier = np.searchsorted(order.rank_at[begin:end], order.rank[writer])
            at = min(at, begin + max(earlier - 1, 0))
        plan.message_post[i] = plan.order_op[at]


@numba.njit(cache=True)
def _least_hold_kernel(a: GraphArrays, plan: PlanArrays, order: _Order) -> None:
    """Hold every send until the sender's last op before the slot, and no longer."""
    for i in range(len(plan.message_tensor)):
        d, q = plan.message_source[i], plan.message_target[i]
        slot = order.rank[a.tensor_op[plan.message_tensor[i]]]
        at = order.position[plan.message_post[i]]
        if at > plan.order_ptr[q]:
            # Not right after the op before `at`: that one may have to wait for sends of its own.
            slot = max(slot, order.rank_at[at] - 1)
        begin, end = plan.order_ptr[d], plan.order_ptr[d + 1]
        last = np.searchsorted(order.rank_at[begin:end], slot, side="right") - 1
        plan.message_hold[i] = plan.order_op[begin + last]


@numba.njit(cache=True)
def _post_kernel(
    a: GraphArrays,
    plan: PlanArrays,
    order: _Order,
    wish: PlanArrays,
    most: ndarray,
    tree: RangeMax,
) -> None:
    for i in range(len(plan.message_tensor)):
        size = a.tensor_bytes[plan.message_tensor[i]]
        now = order.position[plan.message_post[i]]
        wished = order.position[wish.message_post[i]]
        limit = most[plan.message_target[i]] - size
        at = first_fitting(tree, wished, now, limit)
        if at < now:
            add_range(tree, at, now, size)
            plan.message_post[i] = plan.order_op[at]


@numba.njit(cache=True)
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
            last = min(wished, end - 1)
            fits = last_fitting(tree, held + 1, last + 1, most[d] - size) - 1
            if fits < last:
                wished = fits
            add_range(tree, held + 1, fits + 1, size)
            released[s] = n if wished == end else fits
        hold = max(least, wished)
        plan.message_hold[i] = -1 if hold == end else plan.order_op[hold]
