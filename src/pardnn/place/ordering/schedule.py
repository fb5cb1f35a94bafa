"""From a placement to a complete plan: order, messages, posts and holds.

The order of each device is the start order of an emulation. A receive is posted as late as costs no
time: before the last op that its device reaches no later than the transfer can start. A send is
held as briefly as costs no time: until the first op of the sender that finishes no earlier than the
transfer; or as long as the sender has the tensor anyway, because over many steps receivers are
sometimes late. Neither moves an op, so simulating the plan in its own order gives the emulated
times again.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float64, Int64
from numpy import ndarray

from pardnn.graph.csr import RESIDUAL, GraphArrays
from pardnn.graph.ir import Graph
from pardnn.kernels.jit import helper, kernel
from pardnn.kernels.sorting import by_column, by_time
from pardnn.plan.plan import PlanArrays
from pardnn.sim.timeline import Timeline
from pardnn.sim.transfers import transfers_of

#: Bytes of a host scalar: a rate that is held until another device has it takes no memory to speak
#: of. Those that ops compute do, in small steps: they are many.
NUMBER_BYTES = 8


def first_overwrites(graph: Graph) -> Int64[ndarray, "w 2"]:
    """Return (owning tensor, op) for every op that writes a storage in place."""
    if not graph.overwrites:
        return np.empty((0, 2), dtype=np.int64)
    number, owner = graph.tensor_numbers, graph.arrays.tensor_owner
    pairs = [(int(owner[number[name]]), i) for i, names in graph.overwrites for name in names]
    return np.array(sorted(pairs), dtype=np.int64).reshape(-1, 2)


def ordered_plan(
    arrays: GraphArrays,
    num_devices: int,
    place: Int64[ndarray, " n"],
    timeline: Timeline,
    overwrites: Int64[ndarray, "w 2"],
) -> PlanArrays:
    """Return the plan that follows a timeline; see the module's docstring.

    Args:
        arrays: The graph.
        num_devices: Number of devices.
        place: Device of each op.
        timeline: A complete timeline of this placement.
        overwrites: From `first_overwrites`.
    """
    place = np.array(place, dtype=np.int64)  # writable: kernels are compiled for that alone
    order_op = by_column(timeline.dispatch, place)
    counts = np.bincount(place, minlength=num_devices)
    start, finish = timeline.message_start.copy(), timeline.message_finish
    _hurry_kernel(arrays, place, timeline, overwrites, start)
    by_start = by_time(start, finish)
    plan = PlanArrays(
        place=place,
        order_ptr=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        order_op=order_op,
        message_tensor=timeline.message_tensor[by_start],
        message_source=timeline.message_source[by_start],
        message_target=timeline.message_target[by_start],
        message_post=np.empty(len(by_start), dtype=np.int64),
        message_hold=np.empty(len(by_start), dtype=np.int64),
    )
    sent, arrived = start[by_start], finish[by_start]
    _hold_and_post_kernel(arrays, plan, timeline.finish, sent, arrived, overwrites)
    return plan


def free_plan(
    arrays: GraphArrays,
    num_devices: int,
    place: Int64[ndarray, " n"],
    position: Int64[ndarray, " n"],
) -> PlanArrays:
    """Return the plan of an order without memory limits: ops wait only for data.

    Args:
        arrays: The graph.
        num_devices: Number of devices.
        place: Device of each op.
        position: Of each op in a topological order of all ops.
    """
    place = np.array(place, dtype=np.int64)  # writable: kernels are compiled for that alone
    order_op = by_column(position, place)
    counts = np.bincount(place, minlength=num_devices)
    order_ptr = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    transfers = transfers_of(arrays, place, num_devices)
    return PlanArrays(
        place=place,
        order_ptr=order_ptr,
        order_op=order_op,
        message_tensor=transfers.tensor,
        message_source=place[arrays.tensor_op[transfers.tensor]],
        message_target=transfers.target,
        message_post=order_op[order_ptr[transfers.target]],
        message_hold=np.full(len(transfers.tensor), -1, dtype=np.int64),
    )


@helper
def first_overwrite(
    a: GraphArrays,
    place: Int64[ndarray, " n"],
    position: Int64[ndarray, " n"],
    overwrites: Int64[ndarray, "w 2"],
    tensor: int,
    device: int,
    made: int,
) -> int:
    """Return the first op on `device`, after position `made`, that overwrites `tensor`; or -1.

    Args:
        a: The graph.
        place: Device of each op.
        position: Of each op in the lists of the devices.
        overwrites: From `first_overwrites`.
        tensor: The tensor.
        device: The device.
        made: Position of the op that makes it.
    """
    if len(overwrites) == 0:
        return -1
    tensor = a.tensor_owner[tensor]
    low, high = 0, len(overwrites)
    while low < high:
        middle = (low + high) // 2
        if overwrites[middle, 0] < tensor:
            low = middle + 1
        else:
            high = middle
    best = -1
    while low < len(overwrites) and overwrites[low, 0] == tensor:
        op = overwrites[low, 1]
        here = place[op] == device and position[op] > made
        if here and (best < 0 or position[op] < position[best]):
            best = op
        low += 1
    return best


@helper
def first_reaching(
    values: Int64[ndarray, " n"] | Float64[ndarray, " n"], begin: int, end: int, least: float
) -> int:
    """Return the first position with a value of at least `least`, or the end; fast if it is near.

    Args:
        values: Increasing between the two positions.
        begin: First position.
        end: The position after the last.
        least: The value to reach.
    """
    step = 1
    while begin + step < end and values[begin + step] < least:
        begin, step = begin + step, 2 * step
    end = min(end, begin + step)
    while begin < end:
        middle = (begin + end) // 2
        if values[middle] < least:
            begin = middle + 1
        else:
            end = middle
    return begin


@kernel
def _hurry_kernel(
    a: GraphArrays,
    place: Int64[ndarray, " n"],
    timeline: Timeline,
    overwrites: Int64[ndarray, "w 2"],
    start: Float64[ndarray, " m"],
) -> None:
    """Let messages leave before their storage is overwritten.

    The timeline knows of edges alone, and no edge keeps an op that writes one view of a storage
    from running before another view is read: the receiver must not wait for it, as the op will
    wait until the message has left.
    """
    for i in range(len(start)):
        t = timeline.message_tensor[i]
        made, d = timeline.dispatch[a.tensor_op[t]], timeline.message_source[i]
        writer = first_overwrite(a, place, timeline.dispatch, overwrites, t, d, made)
        if writer >= 0 and timeline.start[writer] <= start[i]:
            start[i] = np.nextafter(timeline.start[writer], -1.0)


@helper
def _kept_until(
    a: GraphArrays, plan: PlanArrays, position: Int64[ndarray, " n"]
) -> Int64[ndarray, " t"]:
    """Return the position until which each storage is on its device anyway, by its owner.

    That of the last op there that reads it; the end for what outlives the step, and for
    numbers that the step is given.
    """
    n, kept = len(position), np.full(len(a.tensor_op), -1, dtype=np.int64)
    for t in range(len(kept)):
        op = a.tensor_op[t]
        is_given = a.input_ptr[op] == a.input_ptr[op + 1] and a.tensor_bytes[t] <= NUMBER_BYTES
        if a.memory[op] == RESIDUAL or is_given:
            kept[t] = n
    for p in range(n):
        op = plan.order_op[p]
        for at in range(a.input_ptr[op], a.input_ptr[op + 1]):
            owner = a.tensor_owner[a.input_tensor[at]]
            if plan.place[a.tensor_op[owner]] == plan.place[op]:
                kept[owner] = max(kept[owner], p)
    return kept


@kernel
def _hold_and_post_kernel(
    a: GraphArrays,
    plan: PlanArrays,
    finish: Float64[ndarray, " n"],
    sent: Float64[ndarray, " m"],
    arrived: Float64[ndarray, " m"],
    overwrites: Int64[ndarray, "w 2"],
) -> None:
    n = len(plan.place)
    position = np.empty(n, dtype=np.int64)
    for p in range(n):
        position[plan.order_op[p]] = p
    kept = _kept_until(a, plan, position)
    done = finish[plan.order_op]  # non-decreasing within a device
    reach = np.zeros(n)  # when the device reaches position p
    for p in range(1, n):
        reach[p] = done[p - 1]
    for d in range(len(plan.order_ptr) - 1):
        if plan.order_ptr[d] < plan.order_ptr[d + 1]:
            reach[plan.order_ptr[d]] = 0.0
    for i in range(len(sent)):
        d = plan.message_source[i]
        end = plan.order_ptr[d + 1]
        made = position[a.tensor_op[plan.message_tensor[i]]]
        p = first_reaching(done, made, end, arrived[i])
        # A transfer of no time is settled by order alone: two that tie could wait for each other.
        while arrived[i] <= sent[i] and p < end and done[p] <= arrived[i]:
            p += 1
        owner = a.tensor_owner[plan.message_tensor[i]]
        if plan.place[a.tensor_op[owner]] == d:
            p = max(p, min(end, kept[owner]))
        writer = first_overwrite(
            a, plan.place, position, overwrites, plan.message_tensor[i], d, made
        )
        if writer >= 0:
            p = min(p, position[writer] - 1)
        plan.message_hold[i] = plan.order_op[p] if p < end else -1
        if p < end - 1:
            reach[p + 1] = max(reach[p + 1], arrived[i])
    # Messages come in the order in which they are sent, so each device is walked once.
    now = plan.order_ptr[:-1].copy()
    for i in range(len(sent)):
        q, t = plan.message_target[i], plan.message_tensor[i]
        first, last = plan.order_ptr[q], n
        while now[q] + 1 < plan.order_ptr[q + 1] and reach[now[q] + 1] <= sent[i]:
            now[q] += 1
        for edge in range(a.consumer_ptr[t], a.consumer_ptr[t + 1]):
            op = a.consumer_op[edge]
            if plan.place[op] == q:
                last = min(last, position[op])
        p = min(now[q], last)
        while arrived[i] <= sent[i] and p > first and reach[p] >= sent[i]:
            p -= 1
        plan.message_post[i] = plan.order_op[max(p, first)]
