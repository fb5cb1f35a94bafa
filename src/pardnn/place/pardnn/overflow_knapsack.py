"""Addressing overflow as a min-knapsack (ParDNN, Eqs. 4.4 and 4.5; thesis, section 4.1.2).

While a device exceeds its capacity by O bytes at some point of the order, choose among the *units*
(co-location groups) that hold bytes there so that their potentials sum to at least O and their
`move_cost` is least (Eq. 4.4), greedily, with the thesis's two heaps: one by `move_cost / M_pot`,
and one by `move_cost` alone, with the units that resolve the overflow by themselves. The cheaper of
the two tops moves. `move_cost` is a unit's seconds plus its communication with its own device (Eq.
4.5); `M_pot` the bytes that leave the device at that point (`memory_potential`). The unit goes to
the device with which it communicates most, of those that stay within their capacity.

Deviations: the traversal goes to the largest overflow first instead of from the sink back; memory
is tracked along one fixed global order (`memory_tracking`). A unit moves at most once per round,
and in a large graph tries `MAX_TRIES` devices. Potentials are listed before units move, and again
if no unit that helps is left. O(alive + storages / BLOCK) per overflow point, plus
O(consumers log ops) per move, where the thesis recomputes both, O(V ** 2).
"""

# Kernels: an element of an array is a number, which pyright cannot see.
# pyright: reportArgumentType=false, reportReturnType=false

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float64, Int64
from numpy import ndarray

from pardnn.kernels.heap import heap_pop, heap_push
from pardnn.kernels.jit import helper, kernel
from pardnn.kernels.segment_tree import RangeMax, add_range, max_range
from pardnn.place.pardnn.memory_potential import BLOCK, MemoryPotential, memory_potential_of
from pardnn.place.pardnn.memory_tracking import LiveRanges, MemoryProfile, count_storage
from pardnn.place.pardnn.problem import Problem

#: Rounds in which each unit may move once.
ROUNDS = 4
#: In a large graph: devices that a unit tries, the last one that with most room; and units that may
#: stay where they are, as a share of all, before repair is given up.
MAX_TRIES, MAX_STUCK = 3, 0.02

#: How a pass ends: all fits; no unit helps; none that was listed helps, but some have moved.
_FITS, _FAILS, _STALE = 0, 1, 2


class Units(NamedTuple):
    """The graph by units: their ops, and the units that each communicates with."""

    group: Int64[ndarray, " n"]
    member_ptr: Int64[ndarray, " g+1"]
    member: Int64[ndarray, " n"]
    runs: Bool[ndarray, "g k"]
    seconds: Float64[ndarray, " n"]
    work: Float64[ndarray, " g"]  # seconds of a unit
    output_ptr: Int64[ndarray, " n+1"]
    input_ptr: Int64[ndarray, " n+1"]
    input_tensor: Int64[ndarray, " e"]
    latency: float  # of the slowest link
    byte_seconds: float  # of the slowest link


def units_of(problem: Problem) -> Units:
    """Return the problem by units."""
    return Units(
        group=problem.arrays.group,
        member_ptr=problem.member_ptr,
        member=problem.member,
        runs=problem.runs,
        seconds=problem.seconds,
        work=np.bincount(
            problem.arrays.group, weights=problem.seconds, minlength=len(problem.runs)
        ),
        output_ptr=problem.arrays.output_ptr,
        input_ptr=problem.arrays.input_ptr,
        input_tensor=problem.arrays.input_tensor,
        latency=problem.latency,
        byte_seconds=problem.byte_seconds,
    )


def resolve_overflow(
    problem: Problem, profile: MemoryProfile, live_ranges: LiveRanges | None = None
) -> bool:
    """Move units until every device fits; return whether it does. Changes `profile.place`.

    O(overflow_points alive + moves consumers log ops) in each round.

    Args:
        problem: The problem.
        profile: What is held.
        live_ranges: What the profile comes from, if it is known.
    """
    if bool((profile.top[:, 1] <= profile.capacity).all()):
        return True
    units = units_of(problem)
    tries, rounds, patience = len(profile.capacity), ROUNDS, len(problem.runs)
    if profile.shift:
        tries, rounds, patience = MAX_TRIES, 1, int(MAX_STUCK * len(problem.runs))
    stamp = np.zeros(problem.arrays.num_tensors + 1, dtype=np.int64)
    for _ in range(rounds):
        moved = np.zeros(len(problem.runs), dtype=np.bool_)
        potential = np.zeros(len(problem.runs), dtype=np.int64)
        outcome = _STALE
        while outcome == _STALE:
            terms = memory_potential_of(profile, units.group, live_ranges)
            live_ranges = None
            outcome, patience = _resolve_kernel(
                profile, units, terms, moved, potential, stamp, tries, patience
            )
        if outcome == _FITS:
            return True
    return False


@kernel
def move_unit(
    p: MemoryProfile, u: Units, unit: int, target: int, stamp: Int64[ndarray, " t1"]
) -> None:
    """Move a unit and update the memory profile.

    Args:
        p: The profile.
        u: The units.
        unit: The unit.
        target: The device it goes to.
        stamp: Scratch, one number per tensor; its last element counts the calls.
    """
    members = u.member[u.member_ptr[unit] : u.member_ptr[unit + 1]]
    for sign in (-1, 1):
        stamp[-1] += 1
        if sign == 1:
            for op in members:
                p.place[op] = target
        for op in members:
            d, at = p.place[op], p.position[op] >> p.shift
            if p.workspace[op] > 0:
                add_range(RangeMax(p.top[d], p.add[d]), at, at + 1, sign * p.workspace[op])
            first, made = u.input_ptr[op], u.output_ptr[op + 1] - u.output_ptr[op]
            for i in range(made + u.input_ptr[op + 1] - first):
                t = u.output_ptr[op] + i if i < made else u.input_tensor[first + i - made]
                if stamp[p.owner[t]] != stamp[-1]:
                    stamp[p.owner[t]] = stamp[-1]
                    count_storage(p, p.owner[t], sign)


@helper
def _add_potentials(
    terms: MemoryPotential,
    d: int,
    at: int,
    potential: Int64[ndarray, " g"],
    touched: Int64[ndarray, " g"],
) -> int:
    """Add to each unit the bytes that would leave device d at a leaf with it (M_pot).

    Args:
        terms: Of all potentials.
        d: The device.
        at: The leaf.
        potential: Bytes of each unit. Added to.
        touched: Filled with the units that have a potential.

    Returns:
        The number of units that have one.
    """
    first, last, count = terms.ptr[d], terms.ptr[d + 1], 0
    for block in range(first // BLOCK, (last + BLOCK - 1) // BLOCK):
        if terms.until[block] < at:
            continue
        for i in range(max(first, block * BLOCK), min(last, (block + 1) * BLOCK)):
            if terms.term[i, 0] > at:
                return count
            if terms.term[i, 1] < at or terms.term[i, 2] <= at <= terms.term[i, 3]:
                continue
            unit = terms.term[i, 4]
            if potential[unit] == 0:
                touched[count] = unit
                count += 1
            potential[unit] += terms.term[i, 5]
    return count


@helper
def _communication(p: MemoryProfile, u: Units, unit: int, comm: Float64[ndarray, " k"]) -> None:
    """Fill the seconds of communication of a unit with each device."""
    comm[:] = 0.0
    for i in range(u.member_ptr[unit], u.member_ptr[unit + 1]):
        op = u.member[i]
        for e in range(u.input_ptr[op], u.input_ptr[op + 1]):
            t = u.input_tensor[e]
            if u.group[p.producer[t]] != unit:
                comm[p.place[p.producer[t]]] += u.latency + p.size[t] * u.byte_seconds
        for t in range(u.output_ptr[op], u.output_ptr[op + 1]):
            for e in range(p.consumer_ptr[t], p.consumer_ptr[t + 1]):
                if u.group[p.consumer_op[e]] != unit:
                    comm[p.place[p.consumer_op[e]]] += u.latency + p.size[t] * u.byte_seconds


@helper
def _try_to_move(
    p: MemoryProfile,
    u: Units,
    unit: int,
    d: int,
    at: int,
    tries: int,
    comm: Float64[ndarray, " k"],
    peaks: Int64[ndarray, " k"],
    tried: Bool[ndarray, " k"],
    stamp: Int64[ndarray, " t1"],
) -> bool:
    """Move a unit off device d if that helps there and hurts nowhere."""
    k, back = len(p.capacity), False
    tree = RangeMax(p.top[d], p.add[d])
    before = max_range(tree, at, at + 1)
    for q in range(k):
        peaks[q], tried[q] = p.top[q, 1], q == d
    while True:
        q = d if back else -1
        for other in range(k):
            if back or tried[other] or not u.runs[unit, other]:
                continue
            room = q < 0 or peaks[other] - p.capacity[other] < peaks[q] - p.capacity[q]
            # The last try goes where most room is.
            near = q < 0 or comm[other] > comm[q] or (comm[other] == comm[q] and room)
            if room if tries == 1 else near:
                q = other
        if q < 0 or (tries == 0 and not back):
            return False
        move_unit(p, u, unit, q, stamp)
        if back:
            back = False
            continue
        tried[q], tries = True, tries - 1
        back = max_range(tree, at, at + 1) >= before
        for other in range(k):
            back |= p.top[other, 1] > max(p.capacity[other], peaks[other])
        if not back:
            return True


@kernel
def _resolve_kernel(
    p: MemoryProfile,
    u: Units,
    terms: MemoryPotential,
    moved: Bool[ndarray, " g"],
    potential: Int64[ndarray, " g"],
    stamp: Int64[ndarray, " t1"],
    tries: int,
    patience: int,
) -> tuple[int, int]:
    """Resolve overflows; return how the pass ended, and the patience that is left."""
    k, n, fresh = len(p.capacity), len(moved), True
    comm, tried, peaks = np.empty(k), np.empty(k, dtype=np.bool_), np.empty(k, dtype=np.int64)
    touched, cost = np.empty(n, dtype=np.int64), np.empty(n)
    by_ratio, ratio_unit = np.empty(n), np.empty(n, dtype=np.int64)
    by_cost, cost_unit = np.empty(n), np.empty(n, dtype=np.int64)
    while True:
        d, at = _largest_overflow(p)
        if d < 0:
            return _FITS, patience
        tree = RangeMax(p.top[d], p.add[d])
        over = p.top[d, 1] - p.capacity[d]
        ratios, costs, progress = 0, 0, False
        count = _add_potentials(terms, d, at, potential, touched)
        for i in range(count):
            unit = touched[i]
            if not moved[unit]:
                # Most are never looked at again: the work alone says how cheap it may be.
                cost[unit], least = -1.0, u.work[unit]
                if potential[unit] >= over:
                    _communication(p, u, unit, comm)
                    cost[unit] = least = u.work[unit] + comm[d]
                    costs = heap_push(by_cost, cost_unit, costs, least, unit)
                ratios = heap_push(by_ratio, ratio_unit, ratios, least / potential[unit], unit)
        while over > 0:
            while ratios > 0 and (moved[ratio_unit[0]] or cost[ratio_unit[0]] < 0):
                unit = ratio_unit[0]
                ratios = heap_pop(by_ratio, ratio_unit, ratios)
                if not moved[unit]:
                    _communication(p, u, unit, comm)
                    cost[unit] = u.work[unit] + comm[d]
                    ratio = cost[unit] / potential[unit]
                    ratios = heap_push(by_ratio, ratio_unit, ratios, ratio, unit)
            while costs > 0 and (moved[cost_unit[0]] or potential[cost_unit[0]] < over):
                costs = heap_pop(by_cost, cost_unit, costs)
            if ratios == 0 or patience < 0:
                break
            unit = ratio_unit[0]
            if costs > 0 and by_cost[0] < cost[unit]:
                unit = cost_unit[0]
            moved[unit] = True
            _communication(p, u, unit, comm)
            if _try_to_move(p, u, unit, d, at, tries, comm, peaks, tried, stamp):
                progress, fresh = True, False
            else:
                patience -= 1
            over = max_range(tree, at, at + 1) - p.capacity[d]
        for i in range(count):
            potential[touched[i]] = 0
        if over > 0 and (not progress or patience < 0):
            return _FAILS if fresh or patience < 0 else _STALE, patience


@helper
def _largest_overflow(p: MemoryProfile) -> tuple[int, int]:
    """Return the device with the largest overflow and its first leaf; -1 if all fit."""
    d = 0
    for other in range(len(p.capacity)):
        if p.top[other, 1] - p.capacity[other] > p.top[d, 1] - p.capacity[d]:
            d = other
    if p.top[d, 1] <= p.capacity[d]:
        return -1, 0
    size, node = p.top.shape[1] >> 1, 1
    while node < size:
        node = 2 * node if p.top[d, 2 * node] >= p.top[d, 2 * node + 1] else 2 * node + 1
    return d, node - size
