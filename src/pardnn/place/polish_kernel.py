"""The search of `polish`: changes of a placement and a global order, simulated one by one."""

# Kernels: an element of an array is a number, which pyright cannot see.
# pyright: reportArgumentType=false, reportReturnType=false, reportAssignmentType=false

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np
from jaxtyping import Bool, Float64, Int64
from numpy import ndarray

from pardnn.graph.csr import GraphArrays
from pardnn.sim.machine import Machine


class Task(NamedTuple):
    """What stays as it is during a search. Members of a group g: member[member_ptr[g]:...]."""

    runs: Bool[ndarray, "g k"]
    member_ptr: Int64[ndarray, " g+1"]
    member: Int64[ndarray, " n"]
    tail: Float64[ndarray, " n"]  # seconds that no plan can save after an op


@numba.njit(cache=True)
def _start(
    a: GraphArrays, machine: Machine, place: ndarray, finish: ndarray, op: int, begin: float
) -> float:
    """When the inputs of an op have arrived on its device, but not before `begin`."""
    d = place[op]
    for edge in range(a.input_ptr[op], a.input_ptr[op + 1]):
        t = a.input_tensor[edge]
        earlier = a.tensor_op[t]
        p = place[earlier]
        at = finish[earlier]
        if p != d:
            at += machine.latency[p, d] + a.tensor_bytes[t] / machine.bandwidth[p, d]
        begin = max(begin, at)
    for edge in range(a.after_ptr[op], a.after_ptr[op + 1]):
        earlier = a.after_op[edge]
        begin = max(begin, finish[earlier] + machine.latency[place[earlier], d])
    return begin


@numba.njit(cache=True)
def times_kernel(
    a: GraphArrays,
    machine: Machine,
    place: ndarray,
    order: ndarray,
    start: ndarray,
    finish: ndarray,
) -> None:
    """Fill `start` and `finish` for ops that run in a global order."""
    free = np.zeros(len(machine.device_class))
    for op in order:
        d = place[op]
        start[op] = _start(a, machine, place, finish, op, free[d])
        finish[op] = start[op] + machine.seconds[machine.device_class[d], op]
        free[d] = finish[op]


@numba.njit(cache=True)
def _run_from(
    a: GraphArrays,
    machine: Machine,
    place: ndarray,
    order: ndarray,
    begin: int,
    tail: ndarray,
    limit: float,
    free: ndarray,
    finish: ndarray,
) -> float:
    """Simulate from position `begin`, times before which stand; infinite if `limit` is passed."""
    free[:] = 0.0
    for p in range(begin):
        free[place[order[p]]] = finish[order[p]]
    for p in range(begin, len(order)):
        op = order[p]
        d = place[op]
        end = _start(a, machine, place, finish, op, free[d])
        end += machine.seconds[machine.device_class[d], op]
        if end + tail[op] > limit:
            return np.inf
        finish[op] = end
        free[d] = end
    return free.max()


@numba.njit(cache=True)
def _critical(
    a: GraphArrays,
    machine: Machine,
    place: ndarray,
    order: ndarray,
    finish: ndarray,
    chain: ndarray,
) -> int:
    """Fill `chain` with the ops of the critical path, last first; return how many."""
    n, k = len(order), len(machine.device_class)
    before = np.empty(n, dtype=np.int64)  # the op before it on its device
    last = np.full(k, -1, dtype=np.int64)
    op = order[0]
    for other in order:
        before[other] = last[place[other]]
        last[place[other]] = other
        if finish[other] > finish[op]:
            op = other
    count = 0
    while op >= 0:
        chain[count] = op
        count += 1
        d = place[op]
        free = finish[before[op]] if before[op] >= 0 else 0.0
        latest, follower = free, before[op]
        for edge in range(a.input_ptr[op], a.input_ptr[op + 1]):
            t = a.input_tensor[edge]
            earlier = a.tensor_op[t]
            p = place[earlier]
            at = finish[earlier]
            if p != d:
                at += machine.latency[p, d] + a.tensor_bytes[t] / machine.bandwidth[p, d]
            if at > latest:
                latest, follower = at, earlier
        for edge in range(a.after_ptr[op], a.after_ptr[op + 1]):
            earlier = a.after_op[edge]
            at = finish[earlier] + machine.latency[place[earlier], d]
            if at > latest:
                latest, follower = at, earlier
        op = follower
    return count


@numba.njit(cache=True)
def _give(a: GraphArrays, task: Task, place: ndarray, position: ndarray, op: int, d: int) -> int:
    """Put the group of an op on a device; return the first position concerned."""
    group, first = a.group[op], len(place)
    for i in range(task.member_ptr[group], task.member_ptr[group + 1]):
        place[task.member[i]] = d
        first = min(first, position[task.member[i]])
    return first


@numba.njit(cache=True)
def _window(a: GraphArrays, position: ndarray, op: int) -> tuple[int, int]:
    """First and last position where an op may stand, the other ops as they are."""
    first, last = 0, len(position) - 1
    for edge in range(a.input_ptr[op], a.input_ptr[op + 1]):
        first = max(first, position[a.tensor_op[a.input_tensor[edge]]] + 1)
    for edge in range(a.after_ptr[op], a.after_ptr[op + 1]):
        first = max(first, position[a.after_op[edge]] + 1)
    for t in range(a.output_ptr[op], a.output_ptr[op + 1]):
        for edge in range(a.consumer_ptr[t], a.consumer_ptr[t + 1]):
            last = min(last, position[a.consumer_op[edge]] - 1)
    for edge in range(a.before_ptr[op], a.before_ptr[op + 1]):
        last = min(last, position[a.before_op[edge]] - 1)
    return first, last


@numba.njit(cache=True)
def _shift(order: ndarray, position: ndarray, op: int, to: int) -> None:
    """Move an op to a position of the order; those between move up."""
    at = position[op]
    step = 1 if to > at else -1
    while at != to:
        order[at] = order[at + step]
        position[order[at]] = at
        at += step
    order[to] = op
    position[op] = to


@numba.njit(cache=True)
def search_kernel(
    a: GraphArrays,
    machine: Machine,
    task: Task,
    place: ndarray,
    order: ndarray,
    changes: int,
    tolerance: float,
    state: int,
) -> int:
    """Leave the best plan found in `place` and `order`; return the state of the generator."""
    n, k = len(order), len(machine.device_class)
    free, chain = np.zeros(k), np.empty(n, dtype=np.int64)
    finish, trial = np.zeros(n), np.zeros(n)
    position = np.empty(n, dtype=np.int64)
    for p in range(n):
        position[order[p]] = p
    now = _run_from(a, machine, place, order, 0, task.tail, np.inf, free, finish)
    best, best_place, best_order = now, place.copy(), order.copy()
    length = 0
    for change in range(changes):
        if length == 0:
            length = _critical(a, machine, place, order, finish, chain)
        state = state * 48271 % 2147483647
        op = chain[state % length]
        state = state * 48271 % 2147483647
        kind = state % 4
        state = state * 48271 % 2147483647
        old, other, other_old, at = place[op], -1, -1, position[op]
        first, to, d = n, at, old
        if kind < 3:
            d = state % k if kind == 0 else place[chain[state % length]]
            if kind == 2:
                other = order[min(max(at + state % 33 - 16, 0), n - 1)]
                d = place[other]
                other_old = d
                if a.group[other] == a.group[op] or not task.runs[a.group[other], old]:
                    continue
            if d == old or not task.runs[a.group[op], d]:
                continue
            first = _give(a, task, place, position, op, d)
            if other >= 0:
                first = min(first, _give(a, task, place, position, other, old))
        state = state * 48271 % 2147483647
        if kind == 3 or state % 2 == 0:
            low, high = _window(a, position, op)
            state = state * 48271 % 2147483647
            low, high = max(low, at - 64), min(high, at + 64)
            to = low + state % (high - low + 1)
            first = min(first, at, to)
            _shift(order, position, op, to)
        trial[:] = finish
        limit = best * (1 + tolerance * (1 - change / changes))
        time = _run_from(a, machine, place, order, first, task.tail, limit, free, trial)
        if time <= limit:
            now, length = time, 0
            finish, trial = trial, finish
            if now < best * (1 - 1e-12):
                best = now
                best_place[:] = place
                best_order[:] = order
            continue
        _shift(order, position, op, at)
        _give(a, task, place, position, op, old)
        if other >= 0:
            _give(a, task, place, position, other, other_old)
    place[:] = best_place
    order[:] = best_order
    return state
