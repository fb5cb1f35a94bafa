"""HEFT, plain: upward ranks, then earliest finish time, without insertion.

Reference: Topcuoglu, Hariri, Wu, "Performance-effective and low-complexity task scheduling for
heterogeneous computing", IEEE TPDS 2002. Ops in order of decreasing bottom level, each on the
device where it would finish first (tie: smaller index).

Deviations: a tensor is sent to a device once; bottom levels use the fastest duration and the
slowest link instead of averages; the first op of a group places the whole group. If that does not
fit, a second pass leaves out the devices that have no room for a group's residual bytes.
O((ops + edges) K).
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Float64, Int64
from numpy import ndarray

from pardnn.errors import InfeasibleError
from pardnn.graph.csr import GraphArrays
from pardnn.graph.ir import Graph
from pardnn.kernels.jit import kernel
from pardnn.kernels.sorting import inverse_permutation
from pardnn.place.colocation import closed_arrays, runnable
from pardnn.place.decision import Decision, fitted
from pardnn.place.ordering.memory_bounded import UNLIMITED, limits
from pardnn.sim.levels import bottom_levels
from pardnn.sim.machine import Machine
from pardnn.sim.peak import residual_bytes
from pardnn.sim.timeline import Timeline, static_timeline


def place_heft(
    graph: Graph, machine: Machine, capacities: list[int | None], *, seed: int = 0
) -> Decision:
    """Place and order by HEFT.

    Args:
        graph: The graph.
        machine: Durations and links.
        capacities: Usable bytes of each device; None is unlimited.
        seed: Not used.

    Raises:
        InfeasibleError: E301, if this placement does not fit.
    """
    del seed
    arrays = closed_arrays(graph)
    place, timeline = heft_timeline(arrays, machine)
    try:
        return fitted(graph, machine, place, capacities, timeline)
    except InfeasibleError:
        # Not plain HEFT any more, but a fair baseline: it passes by devices whose memory is full.
        place, timeline = heft_timeline(arrays, machine, limits(capacities))
        return fitted(graph, machine, place, capacities, timeline)


def heft_timeline(
    arrays: GraphArrays, machine: Machine, room: Int64[ndarray, " k"] | None = None
) -> tuple[Int64[ndarray, " n"], Timeline]:
    """Return HEFT's placement and its own schedule, which ignores link contention.

    Args:
        arrays: The graph, with closed groups.
        machine: Durations and links.
        room: Residual bytes that each device may hold; None for no limit.
    """
    n = arrays.num_ops
    # Topological position breaks ties, so that ops without duration stay in order.
    position = inverse_permutation(arrays.topological)
    order = np.lexsort((position, -bottom_levels(arrays, machine)))
    place = np.full(n, -1, dtype=np.int64)
    start, finish = np.zeros(n), np.zeros(n)
    room = np.full(machine.num_devices, UNLIMITED) if room is None else room
    heft_kernel(
        arrays, machine, runnable(arrays, machine), order, place, start, finish,
        residual_bytes(arrays), room,
    )  # fmt: skip
    dispatch = inverse_permutation(order)
    return place, static_timeline(arrays, machine, place, start, finish, dispatch)


@kernel
def heft_kernel(
    a: GraphArrays,
    machine: Machine,
    runs: Bool[ndarray, "g k"],
    order: Int64[ndarray, " n"],
    place: Int64[ndarray, " n"],
    start: Float64[ndarray, " n"],
    finish: Float64[ndarray, " n"],
    residual: Int64[ndarray, " g"],
    room: Int64[ndarray, " k"],
) -> None:
    """Fill `place`, `start` and `finish` for ops in a topological `order`.

    A group whose residual bytes find room on no device goes where the others would.

    Args:
        a: The graph, with closed groups.
        machine: Durations and links.
        runs: Whether a device can run a group.
        order: Ops in the order in which they are placed.
        place: Device of each op; filled.
        start: Seconds; filled.
        finish: Seconds; filled.
        residual: Residual bytes of each group.
        room: Residual bytes that each device may hold.
    """
    k = len(machine.device_class)
    left = room.copy()
    free = np.zeros(k)
    group_place = np.full(len(runs), -1, dtype=np.int64)
    ready = np.empty(k)
    for op in order:
        g = a.group[op]
        for d in range(k):
            ready[d] = free[d]
        for i in range(a.input_ptr[op], a.input_ptr[op + 1]):
            t = a.input_tensor[i]
            predecessor = a.tensor_op[t]
            p = place[predecessor]
            for d in range(k):
                cost = 0.0
                if d != p:
                    cost = machine.latency[p, d] + a.tensor_bytes[t] / machine.bandwidth[p, d]
                ready[d] = max(ready[d], finish[predecessor] + cost)
        for i in range(a.after_ptr[op], a.after_ptr[op + 1]):
            predecessor = a.after_op[i]
            p = place[predecessor]
            for d in range(k):
                cost = machine.latency[p, d] if d != p else 0.0
                ready[d] = max(ready[d], finish[predecessor] + cost)
        best, best_finish, roomy = -1, np.inf, False
        for d in range(k):
            if not runs[g, d] or (group_place[g] >= 0 and group_place[g] != d):
                continue
            end = ready[d] + machine.seconds[machine.device_class[d], op]
            has_room = group_place[g] >= 0 or residual[g] <= left[d]
            if best < 0 or (has_room and not roomy) or (has_room == roomy and end < best_finish):
                best, best_finish, roomy = d, end, has_room
        if group_place[g] < 0:
            left[best] -= residual[g]
        group_place[g] = best
        place[op] = best
        start[op] = ready[best]
        finish[op] = best_finish
        free[best] = best_finish
