"""Memory packing (ours): placements that start from memory, as starts for repair.

Residual groups are packed first; the other ops go near their inputs.

Every op is attributed to a residual unit: the one it belongs to, or else the one from which it
reads most bytes, directly or through ops attributed before. Units, in the order of their first use,
are cut into one contiguous range per device, so that the bytes attributed to each device, at the
moment when a single device would be fullest, are in proportion to its capacity. The result looks
like the stages of a pipeline: little communication, and both residual and transient bytes spread
evenly. O(ops + edges).

If the batch is large, activations are larger than parameters, and all ops would follow the first
one to a single unit. So a unit that has its share of what is live at the peak is full: further
tensors begin a new unit, and backward ops follow the tensors that are held for them.
"""

# Kernels: an element of an array is a number, which pyright cannot see.
# pyright: reportReturnType=false

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Float64, Int64
from numpy import ndarray

from pardnn.graph.csr import RESIDUAL, GraphArrays
from pardnn.kernels.jit import helper, kernel
from pardnn.place.colocation import legal_placement
from pardnn.place.ordering.schedule import free_plan
from pardnn.place.pardnn.problem import Problem
from pardnn.sim.peak import live_bytes, live_ranges, residual_bytes

#: Units that a device's share of what is held at the peak is cut into, at least.
GRAINS = 8


def packed_place(
    problem: Problem,
    position: Int64[ndarray, " n"],
    capacity: Int64[ndarray, " k"],
    *,
    whole: bool = False,
) -> Int64[ndarray, " n"]:
    """Return a placement that balances memory over the devices.

    Args:
        problem: Its groups must join views.
        position: Of each op in a topological order of all ops.
        capacity: Usable bytes per device.
        whole: Whether units are never full.
    """
    a, k = problem.arrays, len(capacity)
    order = np.argsort(position).astype(np.int64)
    live = _live_at_peak(a, position)
    unit = attributed_units(problem, order, None if whole else live, GRAINS * k)
    weight = np.bincount(unit[a.tensor_op], weights=live + 1e-9, minlength=len(problem.runs))
    first = np.full(len(problem.runs), a.num_ops, dtype=np.int64)
    np.minimum.at(first, unit, position)
    by_first_use = np.lexsort((first, _first_use(problem, position, unit)))
    share = capacity / (capacity.astype(np.float64).sum() or 1.0)  # int64 would wrap around
    middle = np.cumsum(weight[by_first_use]) - weight[by_first_use] / 2
    device_of_unit = np.empty(len(problem.runs), dtype=np.int64)
    device_of_unit[by_first_use] = np.minimum(
        np.searchsorted(np.cumsum(share) * weight.sum(), middle), k - 1
    )
    device_of_unit = np.where(problem.fixed >= 0, problem.fixed, device_of_unit)
    return legal_placement(problem.arrays, problem.runs, device_of_unit[unit], order)


def balanced_place(
    problem: Problem, position: Int64[ndarray, " n"], capacity: Int64[ndarray, " k"]
) -> Int64[ndarray, " n"]:
    """Return a placement with residual units packed by size alone, and other ops near them.

    The largest goes first, onto the device with most room left, after units that must stay where
    they are. If the units fit into the capacities less the transient bytes of one device in this
    order, the plan that follows the order fits, since no device holds a transient tensor that one
    device would not hold (sizes of views aside).

    Args:
        problem: Its groups must join views.
        position: Of each op in a topological order of all ops.
        capacity: Usable bytes per device.
    """
    order = np.argsort(position).astype(np.int64)
    size = residual_bytes(problem.arrays)
    room = capacity.copy()
    device_of_unit = np.zeros(len(size), dtype=np.int64)
    for unit in np.lexsort((-size, problem.fixed < 0)).tolist():
        able = np.flatnonzero(problem.runs[unit])
        device_of_unit[unit] = able[room[able].argmax()]
        room[device_of_unit[unit]] -= size[unit]
        if size[unit] == 0 and problem.fixed[unit] < 0:
            break
    target = device_of_unit[attributed_units(problem, order)]
    return legal_placement(problem.arrays, problem.runs, target, order)


def attributed_units(
    problem: Problem,
    order: Int64[ndarray, " n"],
    live: Float64[ndarray, " t"] | None = None,
    parts: int = 1,
) -> Int64[ndarray, " n"]:
    """Return for each op the unit that it should be near; groups are together.

    Args:
        problem: The problem.
        order: All ops, in a topological order.
        live: Bytes that each tensor holds at the peak; None if units are never full.
        parts: A unit is full with this part of them, residual bytes aside.
    """
    a, groups = problem.arrays, len(problem.runs)
    unit = np.full(a.num_ops, -1, dtype=np.int64)
    live = np.zeros(a.num_tensors) if live is None else live
    moving = live * (a.memory[a.tensor_op] != RESIDUAL)
    weight = np.bincount(a.group[a.tensor_op], weights=moving, minlength=groups)
    _attribute_kernel(a, order, live, weight, weight.sum() / parts, unit)
    return unit


def _first_use(
    problem: Problem, position: Int64[ndarray, " n"], unit: Int64[ndarray, " n"]
) -> Int64[ndarray, " g"]:
    """Return the position of the first op that works in each unit or reads what stays there."""
    a = problem.arrays
    used = np.full(len(problem.runs), a.num_ops, dtype=np.int64)
    working = problem.seconds > 0
    np.minimum.at(used, unit[working], position[working])
    consumer = np.repeat(np.arange(a.num_ops), np.diff(a.input_ptr))
    producer = a.tensor_op[a.input_tensor]
    stays = working[consumer] & (a.memory[producer] == RESIDUAL)
    np.minimum.at(used, unit[producer[stays]], position[consumer[stays]])
    return used


def _live_at_peak(arrays: GraphArrays, position: Int64[ndarray, " n"]) -> Float64[ndarray, " t"]:
    """Return the bytes of each tensor that one device holds at its peak."""
    plan = free_plan(arrays, 1, np.zeros(arrays.num_ops, dtype=np.int64), position)
    peak = int(live_bytes(arrays, plan).argmax())
    allocated, released = live_ranges(arrays, plan)
    alive = (allocated <= peak) & (released >= peak)
    return np.where(alive, arrays.tensor_bytes, 0).astype(np.float64)


def residual_pins(problem: Problem, place: Int64[ndarray, " n"]) -> Int64[ndarray, " g"]:
    """Return the device of each group with residual bytes, -1 for the others."""
    a = problem.arrays
    pins = np.full(len(problem.runs), -1, dtype=np.int64)
    residual = (a.memory == RESIDUAL) & (np.diff(a.output_ptr) > 0)
    pins[a.group[residual]] = place[residual]
    return pins


@helper
def _nearest(
    a: GraphArrays,
    op: int,
    is_residual: Bool[ndarray, " g"],
    live: Float64[ndarray, " t"],
    unit: Int64[ndarray, " n"],
) -> int:
    """Return the unit of the input that counts most: held at the peak, then large; or -1."""
    largest, best, best_is_live = -1, -1, False
    for edge in range(a.input_ptr[op], a.input_ptr[op + 1]):
        t = a.input_tensor[edge]
        producer = a.tensor_op[t]
        # A parameter says where to be; an activation of another layer only passes by.
        size = 2 * a.tensor_bytes[t] if is_residual[a.group[producer]] else a.tensor_bytes[t]
        is_live = live[t] > 0
        if unit[producer] >= 0 and (
            is_live > best_is_live or (is_live == best_is_live and size > largest)
        ):
            largest, best, best_is_live = size, unit[producer], is_live
    return best


@kernel
def _attribute_kernel(
    a: GraphArrays,
    order: Int64[ndarray, " n"],
    live: Float64[ndarray, " t"],
    weight: Float64[ndarray, " g"],
    share: float,
    unit: Int64[ndarray, " n"],
) -> None:
    is_residual = np.zeros(len(weight), dtype=np.bool_)
    any_residual = False
    for op in range(len(unit)):
        if a.memory[op] == RESIDUAL and a.output_ptr[op] < a.output_ptr[op + 1]:
            is_residual[a.group[op]] = any_residual = True
    of_group = np.full(len(weight), -1, dtype=np.int64)
    following = np.full(len(weight), -1, dtype=np.int64)  # the unit after a full one
    total = np.zeros(len(weight))
    for op in order:
        group = a.group[op]
        if is_residual[group] or not any_residual:
            of_group[group] = group
        if of_group[group] < 0:
            best = _nearest(a, op, is_residual, live, unit)
            if best >= 0 and weight[group] > 0:
                while total[best] + weight[group] > share and following[best] >= 0:
                    best = following[best]
                if total[best] > 0 and total[best] + weight[group] > share:
                    following[best] = group
                    best = group
                total[best] += weight[group]
            of_group[group] = best
        unit[op] = of_group[group]
    # What has no inputs goes to its first consumer.
    for i in range(len(order) - 1, -1, -1):
        op = order[i]
        group = a.group[op]
        if unit[op] >= 0:
            continue
        if of_group[group] < 0:
            best = group
            for t in range(a.output_ptr[op], a.output_ptr[op + 1]):
                for edge in range(a.consumer_ptr[t], a.consumer_ptr[t + 1]):
                    if unit[a.consumer_op[edge]] >= 0:
                        best = unit[a.consumer_op[edge]]
            of_group[group] = best
        unit[op] = of_group[group]
