"""Overflow resolution (ParDNN, Eqs. 4.4 and 4.5): move ops off devices that hold too much.

While a device exceeds its capacity at some point of the order, choose among the units (co-location
groups) that hold bytes there by greedy min-knapsack: by `move_cost / M_pot`, but a unit that
resolves the overflow alone is taken if it is cheaper. `move_cost` is a unit's seconds plus its
communication with its own device; `M_pot` the bytes that leave the device at that point. The unit
goes to the device with which it communicates most, of those that stay within their capacity.

Deviations: the traversal goes to the largest overflow first instead of from the sink back; memory
is counted on one fixed global order (see `curves`). A unit moves at most once per round, and in a
large graph tries `MOST_TRIES` devices. What is alive at a point is found in an index over
intervals, and a bit says whether it can be on a device. O(alive) per overflow point, plus
O(readers log ops) per move.

Reference: thesis, section 4.1.2.
"""

# Kernels: an element of an array is a number, which pyright cannot see.
# pyright: reportArgumentType=false, reportReturnType=false

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np
from jaxtyping import Bool, Float64, Int64
from numpy import ndarray

from pardnn.place.pardnn.clusters import Problem
from pardnn.place.pardnn.curves import BLOCKS, Curves, alive_index, count_storage
from pardnn.place.rangemax import RangeMax, add_range, max_range
from pardnn.sim.heap import heap_pop, heap_push

#: Rounds in which each unit may move once.
ROUNDS = 4
#: In a large graph: devices that a unit tries, the last one that with most room; and units that may
#: stay where they are, as a share of all, before repair is given up.
MOST_TRIES, MOST_STUCK = 3, 0.02


class Units(NamedTuple):
    """The graph by units: what moves, and what it communicates with."""

    group: Int64[ndarray, " n"]
    member_ptr: Int64[ndarray, " g+1"]
    member: Int64[ndarray, " n"]
    runs: Bool[ndarray, "g k"]
    seconds: Float64[ndarray, " n"]
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
        output_ptr=problem.arrays.output_ptr,
        input_ptr=problem.arrays.input_ptr,
        input_tensor=problem.arrays.input_tensor,
        latency=problem.latency,
        byte_seconds=problem.byte_seconds,
    )


def resolve_overflow(problem: Problem, curves: Curves) -> bool:
    """Move units until every device fits; return whether it does. Changes `curves.place`.

    O(overflow_points alive + moves readers log ops) in each round.
    """
    if bool((curves.top[:, 1] <= curves.most).all()):
        return True
    units, index = units_of(problem), alive_index(curves)
    tries, rounds, patience = len(curves.most), ROUNDS, len(problem.runs)
    if curves.shift:
        tries, rounds, patience = MOST_TRIES, 1, int(MOST_STUCK * len(problem.runs))
    stamp = np.zeros(problem.arrays.num_tensors + 1, dtype=np.int64)
    for _ in range(rounds):
        moved = np.zeros(len(problem.runs), dtype=np.bool_)
        potential = np.zeros(len(problem.runs), dtype=np.int64)
        if _resolve_kernel(curves, units, *index, moved, potential, stamp, tries, patience):
            return True
    return False


@numba.njit(cache=True)
def move_unit(c: Curves, u: Units, unit: int, target: int, stamp: ndarray) -> None:
    """Move a unit and update the curves.

    Args:
        c: The curves.
        u: The units.
        unit: The unit.
        target: Where it goes.
        stamp: Scratch, one number per tensor; its last element counts the calls.
    """
    members = u.member[u.member_ptr[unit] : u.member_ptr[unit + 1]]
    for sign in (-1, 1):
        stamp[-1] += 1
        if sign == 1:
            for op in members:
                c.place[op] = target
        for op in members:
            d, at = c.place[op], c.rank[op] >> c.shift
            if c.workspace[op] > 0:
                add_range(RangeMax(c.top[d], c.add[d]), at, at + 1, sign * c.workspace[op])
            first, made = u.input_ptr[op], u.output_ptr[op + 1] - u.output_ptr[op]
            for i in range(made + u.input_ptr[op + 1] - first):
                t = u.output_ptr[op] + i if i < made else u.input_tensor[first + i - made]
                if stamp[c.owner[t]] != stamp[-1]:
                    stamp[c.owner[t]] = stamp[-1]
                    count_storage(c, c.owner[t], sign)
                    c.near[c.owner[t]] |= 1 << (c.place[op] & 63)


@numba.njit(cache=True)
def _potentials(
    c: Curves,
    group: ndarray,
    d: int,
    at: int,
    items: ndarray,
    potential: ndarray,
    touched: ndarray,
    count: int,
) -> int:
    """Add to each unit the bytes that would leave device d at a leaf with it (M_pot).

    Args:
        c: The curves.
        group: Unit of each op.
        d: The device.
        at: The leaf.
        items: Owners of storages that may be alive there.
        potential: Added to.
        touched: Units with a potential, appended to.
        count: Their number.
    """
    low, high = at << c.shift, ((at + 1) << c.shift) - 1
    bit = 1 << (d & 63)
    for owner in items:
        if c.near[owner] & bit == 0:
            continue
        maker = c.maker[owner]
        unit, stays, end = group[maker], 0, c.rank[maker]
        for i in range(c.alias_ptr[owner], c.alias_ptr[owner + 1]):
            t = c.alias[i]
            first, last, alone = len(c.rank), -1, -1
            for e in range(c.consumer_ptr[t], c.consumer_ptr[t + 1]):
                op = c.consumer_op[e]
                r = c.rank[op]
                if c.place[op] != d:
                    end = max(end, r - 1)
                    continue
                end = max(end, r)
                if group[op] != unit:
                    first, last = min(first, r), max(last, r)
                    if r >= low:
                        alone = group[op] if alone in (-1, group[op]) else -2
            if first <= high and low <= last:
                stays += c.size[t]
                if c.place[maker] != d and alone >= 0:
                    if potential[alone] == 0:
                        touched[count] = alone
                        count += 1
                    potential[alone] += c.size[t]
        alive = c.residual[maker] or (c.rank[maker] <= high and low <= end)
        if c.place[maker] == d and alive and c.size[owner] > stays:
            if potential[unit] == 0:
                touched[count] = unit
                count += 1
            potential[unit] += c.size[owner] - stays
    return count


@numba.njit(cache=True)
def _neighbourhood(c: Curves, u: Units, unit: int, comm: ndarray) -> float:
    """Fill the seconds of communication with each device; return the unit's own seconds."""
    work = 0.0
    comm[:] = 0.0
    for i in range(u.member_ptr[unit], u.member_ptr[unit + 1]):
        op = u.member[i]
        work += u.seconds[op]
        for e in range(u.input_ptr[op], u.input_ptr[op + 1]):
            t = u.input_tensor[e]
            if u.group[c.maker[t]] != unit:
                comm[c.place[c.maker[t]]] += u.latency + c.size[t] * u.byte_seconds
        for t in range(u.output_ptr[op], u.output_ptr[op + 1]):
            for e in range(c.consumer_ptr[t], c.consumer_ptr[t + 1]):
                if u.group[c.consumer_op[e]] != unit:
                    comm[c.place[c.consumer_op[e]]] += u.latency + c.size[t] * u.byte_seconds
    return work


@numba.njit(cache=True)
def _try_to_move(
    c: Curves,
    u: Units,
    unit: int,
    d: int,
    at: int,
    tries: int,
    comm: ndarray,
    peaks: ndarray,
    tried: ndarray,
    stamp: ndarray,
) -> bool:
    """Move a unit off device d if that helps there and hurts nowhere."""
    k, back = len(c.most), False
    tree = RangeMax(c.top[d], c.add[d])
    before = max_range(tree, at, at + 1)
    for q in range(k):
        peaks[q], tried[q] = c.top[q, 1], q == d
    while True:
        q = d if back else -1
        for other in range(k):
            if back or tried[other] or not u.runs[unit, other]:
                continue
            room = q < 0 or peaks[other] - c.most[other] < peaks[q] - c.most[q]
            # The last try goes where most room is.
            near = q < 0 or comm[other] > comm[q] or (comm[other] == comm[q] and room)
            if room if tries == 1 else near:
                q = other
        if q < 0 or tries == 0:
            return False
        move_unit(c, u, unit, q, stamp)
        if back:
            back = False
            continue
        tried[q], tries = True, tries - 1
        back = max_range(tree, at, at + 1) >= before
        for other in range(k):
            back |= c.top[other, 1] > max(c.most[other], peaks[other])
        if not back:
            return True


@numba.njit(cache=True)
def _resolve_kernel(
    c: Curves,
    u: Units,
    index_ptr: ndarray,
    index: ndarray,
    moved: ndarray,
    potential: ndarray,
    stamp: ndarray,
    tries: int,
    patience: int,
) -> bool:
    k, n = len(c.most), len(moved)
    comm, tried, peaks = np.empty(k), np.empty(k, dtype=np.bool_), np.empty(k, dtype=np.int64)
    touched, cost = np.empty(n, dtype=np.int64), np.empty(n)
    by_ratio, ratio_unit = np.empty(n), np.empty(n, dtype=np.int64)
    by_cost, cost_unit = np.empty(n), np.empty(n, dtype=np.int64)
    while True:
        d, at = _worst(c)
        if d < 0:
            return True
        tree = RangeMax(c.top[d], c.add[d])
        over = c.top[d, 1] - c.most[d]
        count, ratios, costs, progress = 0, 0, 0, False
        node = (at * BLOCKS >> c.bits) + BLOCKS
        while node > 0:
            items = index[index_ptr[node] : index_ptr[node + 1]]
            count = _potentials(c, u.group, d, at, items, potential, touched, count)
            node >>= 1
        for i in range(count):
            unit = touched[i]
            if not moved[unit]:
                work = _neighbourhood(c, u, unit, comm)
                cost[unit] = work + comm[d]
                ratio = cost[unit] / potential[unit]
                ratios = heap_push(by_ratio, ratio_unit, ratios, ratio, unit)
                if potential[unit] >= over:
                    costs = heap_push(by_cost, cost_unit, costs, cost[unit], unit)
        while over > 0:
            while ratios > 0 and moved[ratio_unit[0]]:
                ratios = heap_pop(by_ratio, ratio_unit, ratios)
            while costs > 0 and (moved[cost_unit[0]] or potential[cost_unit[0]] < over):
                costs = heap_pop(by_cost, cost_unit, costs)
            if ratios == 0 or patience < 0:
                break
            unit = ratio_unit[0]
            if costs > 0 and by_cost[0] < cost[unit]:
                unit = cost_unit[0]
            moved[unit] = True
            _neighbourhood(c, u, unit, comm)
            if _try_to_move(c, u, unit, d, at, tries, comm, peaks, tried, stamp):
                progress = True
            else:
                patience -= 1
            over = max_range(tree, at, at + 1) - c.most[d]
        for i in range(count):
            potential[touched[i]] = 0
        if over > 0 and (not progress or patience < 0):
            return False


@numba.njit(cache=True)
def _worst(c: Curves) -> tuple[int, int]:
    """Return the device with the largest overflow and its first leaf; -1 if all fit."""
    d = 0
    for other in range(len(c.most)):
        if c.top[other, 1] - c.most[other] > c.top[d, 1] - c.most[d]:
            d = other
    if c.top[d, 1] <= c.most[d]:
        return -1, 0
    size, node = c.top.shape[1] >> 1, 1
    while node < size:
        node = 2 * node if c.top[d, 2 * node] >= c.top[d, 2 * node + 1] else 2 * node + 1
    return d, node - size
