"""Overflow resolution (ParDNN, Eqs. 4.4 and 4.5): move ops off devices that hold too much.

While a device exceeds its capacity at some point of the order, choose among the units (co-location
groups) that hold bytes there by greedy min-knapsack: by `move_cost / M_pot`, but a unit that
resolves the overflow alone is taken if it is cheaper. `move_cost` is a unit's seconds plus its
communication with its own device; `M_pot` the bytes that leave the device at that point. The unit
goes to the device with which it communicates most, of those that stay within their capacity.

Deviations: the traversal goes to the largest overflow first instead of from the sink back; memory
is counted on one fixed global order in which messages take their latest slot (see `squeeze`), so a
move changes the curves of bytes only where its own tensors live, and they are kept exact in one
segment tree per device. A unit moves at most once per round. O(tensors) per overflow point, plus
O(readers log ops) per move.

Reference: thesis, section 4.1.2.
"""

# Kernels: an element of an array is a number, which pyright cannot see.
# pyright: reportArgumentType=false, reportReturnType=false

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np
from jaxtyping import Bool, Int64
from numpy import ndarray

from pardnn.graph.csr import RESIDUAL, GraphArrays
from pardnn.place.pardnn.clusters import Problem
from pardnn.place.rangemax import RangeMax, add_range, max_range

#: Rounds in which each unit may move once.
ROUNDS = 4


class Curves(NamedTuple):
    """Bytes held on each device along a global order, and what they come from."""

    rank: Int64[ndarray, " n"]
    place: Int64[ndarray, " n"]
    most: Int64[ndarray, " k"]  # usable bytes
    top: Int64[ndarray, "k 2s"]  # one segment tree per device, see `rangemax`
    add: Int64[ndarray, "k 2s"]
    alias_ptr: Int64[ndarray, " t+1"]  # tensors that share the storage of tensor t, itself included
    alias: Int64[ndarray, " t"]
    first: Int64[ndarray, " k"]  # scratch: first and last reader of a tensor on each device
    last: Int64[ndarray, " k"]


def curves_of(
    problem: Problem,
    place: Int64[ndarray, " n"],
    rank: Int64[ndarray, " n"],
    most: Int64[ndarray, " k"],
) -> Curves:
    """Return the curves of a placement.

    Args:
        problem: Its groups must join views, see `groups.colocated`.
        place: Device of each op; groups are together.
        rank: Position of each op in a topological order of all ops.
        most: Usable bytes per device.
    """
    a, k = problem.arrays, len(most)
    size = 1 << max(1, int(a.num_ops - 1).bit_length())
    owner = _owners_kernel(a)
    counts = np.bincount(owner, minlength=a.num_tensors)
    curves = Curves(
        rank=np.ascontiguousarray(rank, dtype=np.int64),
        place=np.array(place, dtype=np.int64),
        most=most,
        top=np.zeros((k, 2 * size), dtype=np.int64),
        add=np.zeros((k, 2 * size), dtype=np.int64),
        alias_ptr=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        alias=np.argsort(owner, kind="stable").astype(np.int64),
        first=np.empty(k, dtype=np.int64),
        last=np.empty(k, dtype=np.int64),
    )
    _fill_kernel(problem, curves)
    return curves


def resolve_overflow(problem: Problem, curves: Curves) -> bool:
    """Move units until every device fits; return whether it does. Changes `curves.place`.

    O(rounds overflow_points tensors + moves readers log ops).
    """
    units = len(problem.runs)
    for _ in range(ROUNDS):
        if _resolve_kernel(problem, curves, np.zeros(units, dtype=np.bool_)):
            return True
    return False


@numba.njit(cache=True)
def _owners_kernel(a: GraphArrays) -> ndarray:
    """Return the owner of each tensor's storage."""
    owner = np.arange(len(a.tensor_op))
    for op in a.topological:
        for t in range(a.output_ptr[op], a.output_ptr[op + 1]):
            if a.tensor_alias[t] >= 0:
                owner[t] = owner[a.tensor_alias[t]]
    return owner


@numba.njit(cache=True)
def _fill_kernel(problem: Problem, c: Curves) -> None:
    a = problem.arrays
    for op in range(len(c.rank)):
        at, d = c.rank[op], c.place[op]
        add_range(RangeMax(c.top[d], c.add[d]), at, at + 1, a.workspace[op])
    for t in range(len(a.tensor_op)):
        if a.tensor_alias[t] < 0:
            count_storage(problem, c, t, 1)


@numba.njit(cache=True)
def _find_readers(problem: Problem, c: Curves, t: int) -> None:
    """Fill the first and last rank at which each device reads tensor t."""
    a, n = problem.arrays, len(c.rank)
    c.first[:], c.last[:] = n, -1
    for edge in range(a.consumer_ptr[t], a.consumer_ptr[t + 1]):
        op = a.consumer_op[edge]
        q, at = c.place[op], c.rank[op]
        c.first[q] = min(c.first[q], at)
        c.last[q] = max(c.last[q], at)


@numba.njit(cache=True)
def count_storage(problem: Problem, c: Curves, owner: int, sign: int) -> None:
    """Add (sign 1) or take away (-1) what a storage and its sent copies hold."""
    a, n = problem.arrays, len(c.rank)
    maker = a.tensor_op[owner]
    home, begin = c.place[maker], c.rank[maker]
    end = begin
    for i in range(c.alias_ptr[owner], c.alias_ptr[owner + 1]):
        t = c.alias[i]
        end = max(end, c.rank[a.tensor_op[t]])
        _find_readers(problem, c, t)
        for q in range(len(c.most)):
            if c.last[q] < 0:
                continue
            if q == home:
                end = max(end, c.last[q])
                continue
            end = max(end, c.first[q] - 1)
            tree = RangeMax(c.top[q], c.add[q])
            add_range(tree, c.first[q], c.last[q] + 1, sign * a.tensor_bytes[t])
    tree = RangeMax(c.top[home], c.add[home])
    if a.memory[maker] == RESIDUAL:
        begin, end = 0, n - 1
    add_range(tree, begin, end + 1, sign * a.tensor_bytes[owner])


@numba.njit(cache=True)
def _owner(problem: Problem, t: int) -> int:
    alias = problem.arrays.tensor_alias
    while alias[t] >= 0:
        t = alias[t]
    return t


@numba.njit(cache=True)
def move_unit(problem: Problem, c: Curves, unit: int, target: int, stamp: ndarray) -> None:
    """Move a unit and update the curves.

    Args:
        problem: The problem.
        c: The curves.
        unit: The unit.
        target: Where it goes.
        stamp: Scratch, one number per tensor; its last element counts the calls.
    """
    a = problem.arrays
    begin, end = problem.member_ptr[unit], problem.member_ptr[unit + 1]
    for sign in (-1, 1):
        stamp[-1] += 1
        for i in range(begin, end):
            op = problem.member[i]
            if sign == 1:
                c.place[op] = target
        for i in range(begin, end):
            op = problem.member[i]
            d, at = c.place[op], c.rank[op]
            add_range(RangeMax(c.top[d], c.add[d]), at, at + 1, sign * a.workspace[op])
            for t in range(a.output_ptr[op], a.output_ptr[op + 1]):
                s = _owner(problem, t)
                if stamp[s] != stamp[-1]:
                    stamp[s] = stamp[-1]
                    count_storage(problem, c, s, sign)
            for edge in range(a.input_ptr[op], a.input_ptr[op + 1]):
                s = _owner(problem, a.input_tensor[edge])
                if stamp[s] != stamp[-1]:
                    stamp[s] = stamp[-1]
                    count_storage(problem, c, s, sign)


@numba.njit(cache=True)
def _highest(top: ndarray) -> int:
    """Return the first position of the largest value of a tree."""
    size, node = len(top) >> 1, 1
    while node < size:
        node = 2 * node if top[2 * node] >= top[2 * node + 1] else 2 * node + 1
    return node - size


@numba.njit(cache=True)
def _potentials(problem: Problem, c: Curves, d: int, at: int, potential: ndarray) -> None:
    """Add to each unit the bytes that would leave device d at a rank with it (M_pot)."""
    a, n = problem.arrays, len(c.rank)
    for owner in range(len(a.tensor_op)):
        if a.tensor_alias[owner] >= 0 or a.tensor_bytes[owner] == 0:
            continue
        maker = a.tensor_op[owner]
        unit = a.group[maker]
        home, residual = c.place[maker], a.memory[maker] == RESIDUAL
        end = n if residual else c.rank[maker]
        stays = 0  # copies that its readers on d would need
        for i in range(c.alias_ptr[owner], c.alias_ptr[owner + 1]):
            t = c.alias[i]
            begin_here, end_here, alone = n, -1, -1
            for edge in range(a.consumer_ptr[t], a.consumer_ptr[t + 1]):
                op = a.consumer_op[edge]
                reader, r = a.group[op], c.rank[op]
                if c.place[op] != d:
                    end = max(end, r - 1)
                    continue
                end = max(end, r)
                if reader == unit:
                    continue
                begin_here, end_here = min(begin_here, r), max(end_here, r)
                if r >= at:
                    alone = reader if alone in (-1, reader) else -2
            if begin_here <= at <= end_here:
                stays += a.tensor_bytes[t]
                if home != d and alone >= 0:
                    potential[alone] += a.tensor_bytes[t]
        if home == d and (residual or c.rank[maker] <= at <= end):
            potential[unit] += max(0, a.tensor_bytes[owner] - stays)


@numba.njit(cache=True)
def _neighbourhood(problem: Problem, c: Curves, unit: int, comm: ndarray) -> float:
    """Fill the seconds of communication with each device; return the unit's own seconds."""
    a, work = problem.arrays, 0.0
    comm[:] = 0.0
    for i in range(problem.member_ptr[unit], problem.member_ptr[unit + 1]):
        op = problem.member[i]
        work += problem.seconds[op]
        for edge in range(a.input_ptr[op], a.input_ptr[op + 1]):
            t = a.input_tensor[edge]
            if a.group[a.tensor_op[t]] != unit:
                cost = problem.latency + a.tensor_bytes[t] * problem.byte_seconds
                comm[c.place[a.tensor_op[t]]] += cost
        for t in range(a.output_ptr[op], a.output_ptr[op + 1]):
            cost = problem.latency + a.tensor_bytes[t] * problem.byte_seconds
            for edge in range(a.consumer_ptr[t], a.consumer_ptr[t + 1]):
                later = a.consumer_op[edge]
                if a.group[later] != unit:
                    comm[c.place[later]] += cost
    return work


@numba.njit(cache=True)
def _try_to_move(
    problem: Problem, c: Curves, unit: int, d: int, at: int, comm: ndarray, stamp: ndarray
) -> bool:
    """Move a unit off device d if that helps there and hurts nowhere."""
    k = len(c.most)
    tree = RangeMax(c.top[d], c.add[d])
    before = max_range(tree, at, at + 1)
    peaks = c.top[:, 1].copy()
    tried = np.zeros(k, dtype=np.bool_)
    tried[d] = True
    while True:
        q = -1
        for other in range(k):
            better = (
                q < 0
                or comm[other] > comm[q]
                or (comm[other] == comm[q] and peaks[other] - c.most[other] < peaks[q] - c.most[q])
            )
            if not tried[other] and problem.runs[unit, other] and better:
                q = other
        if q < 0:
            return False
        tried[q] = True
        move_unit(problem, c, unit, q, stamp)
        fine = max_range(tree, at, at + 1) < before
        for other in range(k):
            if c.top[other, 1] > max(c.most[other], peaks[other]):
                fine = False
        if fine:
            return True
        move_unit(problem, c, unit, d, stamp)


@numba.njit(cache=True)
def _resolve_kernel(problem: Problem, c: Curves, moved: Bool[ndarray, " g"]) -> bool:
    k, units = len(c.most), len(moved)
    stamp = np.zeros(len(problem.arrays.tensor_op) + 1, dtype=np.int64)
    potential = np.empty(units, dtype=np.int64)
    comm = np.empty(k)
    cost = np.empty(units)
    while True:
        d = 0
        for other in range(k):
            if c.top[other, 1] - c.most[other] > c.top[d, 1] - c.most[d]:
                d = other
        if c.top[d, 1] <= c.most[d]:
            return True
        at = _highest(c.top[d])
        potential[:] = 0
        _potentials(problem, c, d, at, potential)
        chosen = np.flatnonzero((potential > 0) & ~moved)
        for unit in chosen:
            work = _neighbourhood(problem, c, unit, comm)
            cost[unit] = work + comm[d]
        by_ratio = chosen[np.argsort(cost[chosen] / potential[chosen], kind="mergesort")]
        by_cost = chosen[np.argsort(cost[chosen], kind="mergesort")]
        tree = RangeMax(c.top[d], c.add[d])
        progress = False
        i, j = 0, 0
        while max_range(tree, at, at + 1) > c.most[d]:
            over = max_range(tree, at, at + 1) - c.most[d]
            while i < len(by_ratio) and moved[by_ratio[i]]:
                i += 1
            while j < len(by_cost) and (moved[by_cost[j]] or potential[by_cost[j]] < over):
                j += 1
            if i == len(by_ratio):
                break
            unit = by_ratio[i]
            if j < len(by_cost) and cost[by_cost[j]] < cost[unit]:
                unit = by_cost[j]
            moved[unit] = True
            _neighbourhood(problem, c, unit, comm)
            progress |= _try_to_move(problem, c, unit, d, at, comm, stamp)
        if max_range(tree, at, at + 1) > c.most[d] and not progress:
            return False
