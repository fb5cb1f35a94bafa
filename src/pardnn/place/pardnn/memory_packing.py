"""Placements that start from memory: residual groups packed first, the rest near its inputs.

Every op is attributed to a residual unit: the one it belongs to, else the one from which it reads
most bytes, directly or through ops attributed before. Units are cut into one stretch per device in
the order in which they are first used, so that the bytes attributed to each device at the peak of
one device's memory are in proportion to its capacity. What follows looks like the stages of a
pipeline: little communication, and residual and transient bytes spread alike. O(ops + edges).

Where a batch is large, activations are larger than parameters, and all ops would follow the first
one to a single unit. So a unit that has its share of what is held at the peak is full: what else
would be held there begins a new one, and backward ops follow what is held for them.
"""

# Kernels: an element of an array is a number, which pyright cannot see.
# pyright: reportReturnType=false

from __future__ import annotations

import numpy as np
from jaxtyping import Float64, Int64
from numpy import ndarray

from pardnn.graph.csr import RESIDUAL, GraphArrays
from pardnn.kernels.jit import helper, kernel
from pardnn.place.ordering.schedule import free_plan
from pardnn.place.pardnn.problem import Problem
from pardnn.plan.plan import PlanArrays
from pardnn.sim.peak import held_bytes, storage_lives

#: Units that a device's share of what is held at the peak is cut into, at least.
GRAINS = 8


def packed_place(
    problem: Problem,
    rank: Int64[ndarray, " n"],
    most: Int64[ndarray, " k"],
    *,
    whole: bool = False,
) -> Int64[ndarray, " n"]:
    """Return a placement that spreads memory.

    Args:
        problem: Its groups must join views.
        rank: Position of each op in a topological order of all ops.
        most: Usable bytes per device.
        whole: Whether units are never full.
    """
    a, k = problem.arrays, len(most)
    order = np.argsort(rank).astype(np.int64)
    held = _held_at_peak(a, rank)
    unit = attributed_units(problem, order, None if whole else held, GRAINS * k)
    weight = np.bincount(unit[a.tensor_op], weights=held + 1e-9, minlength=len(problem.runs))
    first = np.full(len(problem.runs), a.num_ops, dtype=np.int64)
    np.minimum.at(first, unit, rank)
    turn = np.lexsort((first, _first_use(problem, rank, unit)))
    share = most / most.astype(np.float64).sum()  # int64 would wrap around
    middle = np.cumsum(weight[turn]) - weight[turn] / 2
    device_of_unit = np.empty(len(problem.runs), dtype=np.int64)
    device_of_unit[turn] = np.minimum(
        np.searchsorted(np.cumsum(share) * weight.sum(), middle), k - 1
    )
    return allowed_place(problem, device_of_unit[unit], order)


def balanced_place(
    problem: Problem, rank: Int64[ndarray, " n"], most: Int64[ndarray, " k"]
) -> Int64[ndarray, " n"]:
    """Return a placement with residual units packed for size alone, the rest near them.

    Largest first onto the device with most room left. If the units pack into the capacities less
    the transient bytes of one device in this order, the plan that keeps to the order fits, since
    no device holds a transient tensor that one device would not hold (sizes of views aside).

    Args:
        problem: Its groups must join views.
        rank: Position of each op in a topological order of all ops.
        most: Usable bytes per device.
    """
    a, units = problem.arrays, len(problem.runs)
    order = np.argsort(rank).astype(np.int64)
    owned = (a.memory[a.tensor_op] == RESIDUAL) & (a.tensor_alias < 0)
    size = np.zeros(units, dtype=np.int64)
    np.add.at(size, a.group[a.tensor_op], np.where(owned, a.tensor_bytes, 0))
    room = most.copy()
    device_of_unit = np.zeros(units, dtype=np.int64)
    for unit in np.argsort(-size, kind="stable").tolist():
        able = np.flatnonzero(problem.runs[unit])
        device_of_unit[unit] = able[room[able].argmax()]
        room[device_of_unit[unit]] -= size[unit]
        if size[unit] == 0:
            break
    return allowed_place(problem, device_of_unit[attributed_units(problem, order)], order)


def attributed_units(
    problem: Problem,
    order: Int64[ndarray, " n"],
    held: Float64[ndarray, " t"] | None = None,
    parts: int = 1,
) -> Int64[ndarray, " n"]:
    """Return for each op the unit that it should be near; groups are together.

    Args:
        problem: The problem.
        order: All ops, in a topological order.
        held: Bytes that each tensor holds at the peak; None if units are never full.
        parts: A unit is full with this part of them, residual bytes aside.
    """
    a, groups = problem.arrays, len(problem.runs)
    unit = np.full(a.num_ops, -1, dtype=np.int64)
    held = np.zeros(a.num_tensors) if held is None else held
    moving = held * (a.memory[a.tensor_op] != RESIDUAL)
    weight = np.bincount(a.group[a.tensor_op], weights=moving, minlength=groups)
    _attribute_kernel(a, order, held, weight, weight.sum() / parts, unit)
    return unit


def _first_use(problem: Problem, rank: ndarray, unit: ndarray) -> ndarray:
    """Return the rank of the first op that works in each unit or reads what stays there."""
    a = problem.arrays
    used = np.full(len(problem.runs), a.num_ops, dtype=np.int64)
    working = problem.seconds > 0
    np.minimum.at(used, unit[working], rank[working])
    reader = np.repeat(np.arange(a.num_ops), np.diff(a.input_ptr))
    maker = a.tensor_op[a.input_tensor]
    stays = working[reader] & (a.memory[maker] == RESIDUAL)
    np.minimum.at(used, unit[maker[stays]], rank[reader[stays]])
    return used


def _one_device_plan(arrays: GraphArrays, rank: ndarray) -> PlanArrays:
    return free_plan(arrays, 1, np.zeros(arrays.num_ops, dtype=np.int64), rank)


def _held_at_peak(arrays: GraphArrays, rank: ndarray) -> ndarray:
    """Return the bytes of each tensor that one device holds at its peak."""
    plan = _one_device_plan(arrays, rank)
    peak = int(held_bytes(arrays, plan).argmax())
    allocated, released = storage_lives(arrays, plan)
    alive = (allocated <= peak) & (released >= peak)
    return np.where(alive, arrays.tensor_bytes, 0).astype(np.float64)


def residual_pins(problem: Problem, place: Int64[ndarray, " n"]) -> Int64[ndarray, " g"]:
    """Return the device of each group with residual bytes, -1 for the others."""
    a = problem.arrays
    pins = np.full(len(problem.runs), -1, dtype=np.int64)
    residual = (a.memory == RESIDUAL) & (np.diff(a.output_ptr) > 0)
    pins[a.group[residual]] = place[residual]
    return pins


def allowed_place(
    problem: Problem, wish: Int64[ndarray, " n"], order: Int64[ndarray, " n"]
) -> Int64[ndarray, " n"]:
    """Return a wish made valid: groups are together, each where it can run.

    Args:
        problem: The problem.
        wish: Wished device of each op.
        order: Ops; the first of a group decides for all of it.
    """
    k = problem.machine.num_devices
    group = problem.arrays.group
    chosen = np.full(len(problem.runs), -1, dtype=np.int64)
    chosen[group[order[::-1]]] = wish[order[::-1]]
    turns = (chosen[:, None] + np.arange(k)[None, :]) % k
    can = np.take_along_axis(problem.runs, turns, axis=1)
    device = np.take_along_axis(turns, can.argmax(axis=1)[:, None], axis=1)[:, 0]
    return device[group].astype(np.int64)


@helper
def _nearest(a: GraphArrays, op: int, stays: ndarray, held: ndarray, unit: ndarray) -> int:
    """Return the unit of the input that counts most: held at the peak, then large; or -1."""
    most, best, kept = -1, -1, False
    for edge in range(a.input_ptr[op], a.input_ptr[op + 1]):
        t = a.input_tensor[edge]
        maker = a.tensor_op[t]
        # A parameter says where to be; an activation of another layer only passes by.
        size = 2 * a.tensor_bytes[t] if stays[a.group[maker]] else a.tensor_bytes[t]
        keeps = held[t] > 0
        if unit[maker] >= 0 and (keeps > kept or (keeps == kept and size > most)):
            most, best, kept = size, unit[maker], keeps
    return best


@kernel
def _attribute_kernel(
    a: GraphArrays,
    order: ndarray,
    held: ndarray,
    weight: ndarray,
    share: float,
    unit: ndarray,
) -> None:
    stays = np.zeros(len(weight), dtype=np.bool_)
    any_stays = False
    for op in range(len(unit)):
        if a.memory[op] == RESIDUAL and a.output_ptr[op] < a.output_ptr[op + 1]:
            stays[a.group[op]] = any_stays = True
    of_group = np.full(len(weight), -1, dtype=np.int64)
    following = np.full(len(weight), -1, dtype=np.int64)  # the unit after a full one
    total = np.zeros(len(weight))
    for op in order:
        group = a.group[op]
        if stays[group] or not any_stays:
            of_group[group] = group
        if of_group[group] < 0:
            best = _nearest(a, op, stays, held, unit)
            if best >= 0 and weight[group] > 0:
                while total[best] + weight[group] > share and following[best] >= 0:
                    best = following[best]
                if total[best] > 0 and total[best] + weight[group] > share:
                    following[best] = group
                    best = group
                total[best] += weight[group]
            of_group[group] = best
        unit[op] = of_group[group]
    # What has no inputs goes to its first reader.
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
