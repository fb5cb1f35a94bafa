"""Overflow resolution (ParDNN, Eqs. 4.4 and 4.5): move ops off devices that hold too much.

While a device exceeds its capacity at some point of the order, choose among the units (co-location
groups) that hold bytes there by greedy min-knapsack: by `move_cost / M_pot`, but a unit that
resolves the overflow alone is taken if it is cheaper. `move_cost` is a unit's seconds plus its
communication with its own device; `M_pot` the bytes that leave the device at that point. The unit
goes to the device with which it communicates most, of those that stay within their capacity.

Deviations: the traversal goes to the largest overflow first instead of from the sink back; memory
is counted on one fixed global order (see `curves`). A unit moves at most once per round, and in a
large graph tries `MOST_TRIES` devices. What a unit would free is noted before units move
(`claims`), and again where no unit is left that helps. O(alive + storages / BLOCK) per overflow
point, plus O(readers log ops) per move.

Reference: thesis, section 4.1.2.
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
from pardnn.place.pardnn.memory_potential import BLOCK, Claims, claims_of
from pardnn.place.pardnn.memory_tracking import Curves, Lives, count_storage
from pardnn.place.pardnn.problem import Problem

#: Rounds in which each unit may move once.
ROUNDS = 4
#: In a large graph: devices that a unit tries, the last one that with most room; and units that may
#: stay where they are, as a share of all, before repair is given up.
MOST_TRIES, MOST_STUCK = 3, 0.02

#: What comes of a pass: all fits; no unit helps; none that was noted helps, but some have moved.
_FITS, _FAILS, _STALE = 0, 1, 2


class Units(NamedTuple):
    """The graph by units: what moves, and what it communicates with."""

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


def resolve_overflow(problem: Problem, curves: Curves, lives: Lives | None = None) -> bool:
    """Move units until every device fits; return whether it does. Changes `curves.place`.

    O(overflow_points alive + moves readers log ops) in each round.

    Args:
        problem: The problem.
        curves: What is held.
        lives: What they come from, if it is known.
    """
    if bool((curves.top[:, 1] <= curves.most).all()):
        return True
    units = units_of(problem)
    tries, rounds, patience = len(curves.most), ROUNDS, len(problem.runs)
    if curves.shift:
        tries, rounds, patience = MOST_TRIES, 1, int(MOST_STUCK * len(problem.runs))
    stamp = np.zeros(problem.arrays.num_tensors + 1, dtype=np.int64)
    for _ in range(rounds):
        moved = np.zeros(len(problem.runs), dtype=np.bool_)
        potential = np.zeros(len(problem.runs), dtype=np.int64)
        outcome = _STALE
        while outcome == _STALE:
            claims = claims_of(curves, units.group, lives)
            lives = None
            outcome, patience = _resolve_kernel(
                curves, units, claims, moved, potential, stamp, tries, patience
            )
        if outcome == _FITS:
            return True
    return False


@kernel
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


@helper
def _potentials(claims: Claims, d: int, at: int, potential: ndarray, touched: ndarray) -> int:
    """Add to each unit the bytes that would leave device d at a leaf with it (M_pot).

    Args:
        claims: What units hold.
        d: The device.
        at: The leaf.
        potential: Added to.
        touched: Filled with the units that have a potential.

    Returns:
        The number of units that have one.
    """
    first, last, count = claims.ptr[d], claims.ptr[d + 1], 0
    for block in range(first // BLOCK, (last + BLOCK - 1) // BLOCK):
        if claims.until[block] < at:
            continue
        for i in range(max(first, block * BLOCK), min(last, (block + 1) * BLOCK)):
            if claims.row[i, 0] > at:
                return count
            if claims.row[i, 1] < at or claims.row[i, 2] <= at <= claims.row[i, 3]:
                continue
            unit = claims.row[i, 4]
            if potential[unit] == 0:
                touched[count] = unit
                count += 1
            potential[unit] += claims.row[i, 5]
    return count


@helper
def _neighbourhood(c: Curves, u: Units, unit: int, comm: ndarray) -> None:
    """Fill the seconds of communication with each device."""
    comm[:] = 0.0
    for i in range(u.member_ptr[unit], u.member_ptr[unit + 1]):
        op = u.member[i]
        for e in range(u.input_ptr[op], u.input_ptr[op + 1]):
            t = u.input_tensor[e]
            if u.group[c.maker[t]] != unit:
                comm[c.place[c.maker[t]]] += u.latency + c.size[t] * u.byte_seconds
        for t in range(u.output_ptr[op], u.output_ptr[op + 1]):
            for e in range(c.consumer_ptr[t], c.consumer_ptr[t + 1]):
                if u.group[c.consumer_op[e]] != unit:
                    comm[c.place[c.consumer_op[e]]] += u.latency + c.size[t] * u.byte_seconds


@helper
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


@kernel
def _resolve_kernel(
    c: Curves,
    u: Units,
    claims: Claims,
    moved: ndarray,
    potential: ndarray,
    stamp: ndarray,
    tries: int,
    patience: int,
) -> tuple[int, int]:
    """Resolve overflows; return what came of it, and the patience that is left."""
    k, n, fresh = len(c.most), len(moved), True
    comm, tried, peaks = np.empty(k), np.empty(k, dtype=np.bool_), np.empty(k, dtype=np.int64)
    touched, cost = np.empty(n, dtype=np.int64), np.empty(n)
    by_ratio, ratio_unit = np.empty(n), np.empty(n, dtype=np.int64)
    by_cost, cost_unit = np.empty(n), np.empty(n, dtype=np.int64)
    while True:
        d, at = _worst(c)
        if d < 0:
            return _FITS, patience
        tree = RangeMax(c.top[d], c.add[d])
        over = c.top[d, 1] - c.most[d]
        ratios, costs, progress = 0, 0, False
        count = _potentials(claims, d, at, potential, touched)
        for i in range(count):
            unit = touched[i]
            if not moved[unit]:
                # Most are never looked at again: the work alone says how cheap it may be.
                cost[unit], least = -1.0, u.work[unit]
                if potential[unit] >= over:
                    _neighbourhood(c, u, unit, comm)
                    cost[unit] = least = u.work[unit] + comm[d]
                    costs = heap_push(by_cost, cost_unit, costs, least, unit)
                ratios = heap_push(by_ratio, ratio_unit, ratios, least / potential[unit], unit)
        while over > 0:
            while ratios > 0 and (moved[ratio_unit[0]] or cost[ratio_unit[0]] < 0):
                unit = ratio_unit[0]
                ratios = heap_pop(by_ratio, ratio_unit, ratios)
                if not moved[unit]:
                    _neighbourhood(c, u, unit, comm)
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
            _neighbourhood(c, u, unit, comm)
            if _try_to_move(c, u, unit, d, at, tries, comm, peaks, tried, stamp):
                progress, fresh = True, False
            else:
                patience -= 1
            over = max_range(tree, at, at + 1) - c.most[d]
        for i in range(count):
            potential[touched[i]] = 0
        if over > 0 and (not progress or patience < 0):
            return _FAILS if fresh or patience < 0 else _STALE, patience


@helper
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
