"""m-ETF: repeatedly, of all ready ops and devices, the pair that can start first.

An op starts on a device when its inputs have arrived and the device is free; ties go to the op that
comes first in topological order, then to the smaller device. A device where the op does not fit is
left out: a device holds residual storages, and other storages and received copies until their last
consumer is scheduled; the first op of a group takes the whole group and its residual bytes.

Reference: Jeon et al., "Baechi: fast device placement of machine learning graphs", SoCC 2020, after
Hwang, Chow, Anger, Lee, "Scheduling precedence graphs in systems with interprocessor communication
times", SIAM J. Computing 1989.

Deviations: an op that fits nowhere is placed as if memory were unlimited, and the order is repaired
afterwards, if it can be. O((ops + edges) K + ops K log ops) without limits: each device has one
heap of ops whose inputs are still on their way, and one of ops that wait only for the device.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float64, Int64
from numpy import ndarray

from pardnn.graph.csr import RESIDUAL, GraphArrays
from pardnn.graph.ir import Graph
from pardnn.kernels.heap import heap_pop, heap_push
from pardnn.kernels.jit import helper, kernel
from pardnn.kernels.sorting import inverse_permutation
from pardnn.place.colocation import closed_arrays, runnable
from pardnn.place.decision import Decision, fitted
from pardnn.place.ordering.memory_bounded import limits
from pardnn.sim.machine import Machine
from pardnn.sim.peak import residual_bytes
from pardnn.sim.timeline import Timeline, static_timeline


def place_m_etf(
    graph: Graph, machine: Machine, capacities: list[int | None], *, seed: int = 0
) -> Decision:
    """Place and order by m-ETF.

    Args:
        graph: The graph.
        machine: Durations and links.
        capacities: Usable bytes of each device; None is unlimited.
        seed: Not used.

    Raises:
        InfeasibleError: E301, if this placement does not fit; E302, if an op can run nowhere.
    """
    del seed
    no_favourites = np.full(graph.arrays.num_ops, -1, dtype=np.int64)
    place, timeline = etf_timeline(closed_arrays(graph), machine, capacities, no_favourites)
    return fitted(graph, machine, place, capacities, timeline)


def etf_timeline(
    arrays: GraphArrays,
    machine: Machine,
    capacities: list[int | None],
    favourite: Int64[ndarray, " n"],
) -> tuple[Int64[ndarray, " n"], Timeline]:
    """Return the placement and schedule of m-ETF, or of m-SCT if ops have favourite children.

    Args:
        arrays: The graph, with closed groups.
        machine: Durations and links.
        capacities: Usable bytes of each device; None is unlimited.
        favourite: Favourite child of each op, -1 for none: after its parent a device waits for it,
            unless another op can start there at once and nowhere sooner.
    """
    n, k = arrays.num_ops, machine.num_devices
    position = inverse_permutation(arrays.topological)
    residual = residual_bytes(arrays)
    task = _Task(runnable(arrays, machine), limits(capacities), residual, position, favourite)
    state = _State(
        place=np.full(n, -1, dtype=np.int64),
        start=np.zeros(n),
        finish=np.zeros(n),
        dispatch=np.full(n, -1, dtype=np.int64),
        ready=np.zeros((n, k)),
        free=np.zeros(k),
        used=np.zeros(k, dtype=np.int64),
        group_place=np.full(len(residual), -1, dtype=np.int64),
        reads_left=np.zeros(arrays.num_tensors, dtype=np.int64),
        copied=np.zeros((arrays.num_tensors, k), dtype=np.bool_),
        copy_bytes=np.zeros((arrays.num_tensors, k), dtype=np.int64),
    )
    _etf_kernel(arrays, machine, task, state)
    return state.place, static_timeline(
        arrays, machine, state.place, state.start, state.finish, state.dispatch
    )


class _Task(NamedTuple):
    runs: Bool[ndarray, "g k"]
    capacity: Int64[ndarray, " k"]
    residual: Int64[ndarray, " g"]  # bytes of a group
    position: Int64[ndarray, " n"]
    favourite: Int64[ndarray, " n"]


class _State(NamedTuple):
    place: Int64[ndarray, " n"]
    start: Float64[ndarray, " n"]
    finish: Float64[ndarray, " n"]
    dispatch: Int64[ndarray, " n"]
    ready: Float64[ndarray, "n k"]  # when the inputs of an op have arrived on a device
    free: Float64[ndarray, " k"]
    used: Int64[ndarray, " k"]
    group_place: Int64[ndarray, " g"]
    reads_left: Int64[ndarray, " t"]  # of a storage, by its owner
    copied: Bool[ndarray, "t k"]
    copy_bytes: Int64[ndarray, "t k"]  # of all copies of a storage


@helper
def _allowed(a: GraphArrays, task: _Task, s: _State, op: int, d: int) -> bool:
    group = a.group[op]
    if s.group_place[group] >= 0 and s.group_place[group] != d:
        return False
    return bool(task.runs[group, d])


@helper
def _fits(a: GraphArrays, task: _Task, s: _State, op: int, d: int) -> bool:
    needed = a.workspace[op]
    for t in range(a.output_ptr[op], a.output_ptr[op + 1]):
        if a.tensor_alias[t] < 0 and a.memory[op] != RESIDUAL:
            needed += a.tensor_bytes[t]
    for edge in range(a.input_ptr[op], a.input_ptr[op + 1]):
        t = a.input_tensor[edge]
        if s.place[a.tensor_op[t]] != d and not s.copied[t, d]:
            needed += a.tensor_bytes[t]
    if s.group_place[a.group[op]] < 0:
        needed += task.residual[a.group[op]]
    return s.used[d] + needed <= task.capacity[d]


@helper
def _take(a: GraphArrays, task: _Task, s: _State, op: int, d: int) -> bool:
    """Account for an op on its device; return whether anything was freed."""
    group = a.group[op]
    if s.group_place[group] < 0:
        s.group_place[group] = d
        s.used[d] += task.residual[group]
    freed = False
    for t in range(a.output_ptr[op], a.output_ptr[op + 1]):
        if a.tensor_alias[t] < 0 and a.memory[op] != RESIDUAL and s.reads_left[t] > 0:
            s.used[d] += a.tensor_bytes[t]
    for edge in range(a.input_ptr[op], a.input_ptr[op + 1]):
        t = a.input_tensor[edge]
        owner = a.tensor_owner[t]
        if s.place[a.tensor_op[t]] != d and not s.copied[t, d]:
            s.copied[t, d] = True
            s.used[d] += a.tensor_bytes[t]
            s.copy_bytes[owner, d] += a.tensor_bytes[t]
        s.reads_left[owner] -= 1
        if s.reads_left[owner] == 0:
            freed = True
            if a.memory[a.tensor_op[owner]] != RESIDUAL:
                s.used[s.place[a.tensor_op[owner]]] -= a.tensor_bytes[owner]
            for q in range(len(s.used)):
                s.used[q] -= s.copy_bytes[owner, q]
                s.copy_bytes[owner, q] = 0
    return freed


@helper
def _arrive(machine: Machine, s: _State, op: int, successor: int, size: int) -> None:
    p = s.place[op]
    for d in range(len(s.free)):
        comm = 0.0 if d == p else machine.latency[p, d] + size / machine.bandwidth[p, d]
        s.ready[successor, d] = max(s.ready[successor, d], s.finish[op] + comm)


@helper
def _reserved(
    a: GraphArrays, task: _Task, s: _State, missing: Int64[ndarray, " n"], last: int, d: int
) -> int:
    """Return the favourite child that device d waits for after its last op; -1 for none."""
    child = task.favourite[last] if last >= 0 else -1
    if child < 0 or s.place[child] >= 0 or missing[child] > 0:
        return -1
    if not _allowed(a, task, s, child, d) or not _fits(a, task, s, child, d):
        return -1
    here = max(s.ready[child, d], s.free[d])
    for q in range(len(s.free)):
        if _allowed(a, task, s, child, q) and max(s.ready[child, q], s.free[q]) < here:
            return -1
    return int(child)


@kernel
def _etf_kernel(a: GraphArrays, machine: Machine, task: _Task, s: _State) -> None:
    n, k = len(s.place), len(machine.device_class)
    missing = np.empty(n, dtype=np.int64)
    # Per device: ops by arrival of their inputs, ops that wait for the device alone, the blocked.
    key, item = np.empty((2, k, n + 1)), np.empty((2, k, n + 1), dtype=np.int64)
    size = np.zeros((2, k), dtype=np.int64)
    blocked, num_blocked = np.empty((k, n), dtype=np.int64), np.zeros(k, dtype=np.int64)
    last = np.full(k, -1, dtype=np.int64)
    for op in range(n):
        missing[op] = a.input_ptr[op + 1] - a.input_ptr[op] + a.after_ptr[op + 1] - a.after_ptr[op]
        for edge in range(a.input_ptr[op], a.input_ptr[op + 1]):
            s.reads_left[a.tensor_owner[a.input_tensor[edge]]] += 1
        if missing[op] == 0:
            _offer(a, task, s, op, key, item, size)
    # Not as literals, for each of which what takes them would be compiled again.
    limited, nothing = n > 0, np.int64(0)
    for count in range(n):
        op, d = _first_pair(a, task, s, limited, key, item, size, blocked, num_blocked)
        if op < 0:
            limited = n < 0
            _unblock(task, s, key, item, size, blocked, num_blocked)
            op, d = _first_pair(a, task, s, limited, key, item, size, blocked, num_blocked)
        begin = max(s.ready[op, d], s.free[d])
        child = _reserved(a, task, s, missing, last[d], d)
        if child >= 0 and begin > s.free[d]:
            op, begin = child, max(s.ready[child, d], s.free[d])
        s.place[op], s.start[op], s.dispatch[op] = d, begin, count
        s.finish[op] = begin + machine.seconds[machine.device_class[d], op]
        s.free[d], last[d] = s.finish[op], op
        if _take(a, task, s, op, d):
            _unblock(task, s, key, item, size, blocked, num_blocked)
        for t in range(a.output_ptr[op], a.output_ptr[op + 1]):
            for edge in range(a.consumer_ptr[t], a.consumer_ptr[t + 1]):
                successor = a.consumer_op[edge]
                _arrive(machine, s, op, successor, a.tensor_bytes[t])
                missing[successor] -= 1
                if missing[successor] == 0:
                    _offer(a, task, s, successor, key, item, size)
        for edge in range(a.before_ptr[op], a.before_ptr[op + 1]):
            successor = a.before_op[edge]
            _arrive(machine, s, op, successor, nothing)
            missing[successor] -= 1
            if missing[successor] == 0:
                _offer(a, task, s, successor, key, item, size)


@helper
def _offer(
    a: GraphArrays,
    task: _Task,
    s: _State,
    op: int,
    key: Float64[ndarray, "2 k x"],
    item: Int64[ndarray, "2 k x"],
    size: Int64[ndarray, "2 k"],
) -> None:
    for d in range(len(s.free)):
        if _allowed(a, task, s, op, d):
            _queue(task, s, op, d, key, item, size)


@helper
def _queue(
    task: _Task,
    s: _State,
    op: int,
    d: int,
    key: Float64[ndarray, "2 k x"],
    item: Int64[ndarray, "2 k x"],
    size: Int64[ndarray, "2 k"],
) -> None:
    """Put the position of an op into a heap of a device; equal keys go by it."""
    at = task.position[op]
    if s.ready[op, d] <= s.free[d]:
        size[1, d] = heap_push(key[1, d], item[1, d], size[1, d], 0.0, at)
    else:
        size[0, d] = heap_push(key[0, d], item[0, d], size[0, d], s.ready[op, d], at)


@helper
def _unblock(
    task: _Task,
    s: _State,
    key: Float64[ndarray, "2 k x"],
    item: Int64[ndarray, "2 k x"],
    size: Int64[ndarray, "2 k"],
    blocked: Int64[ndarray, "k n"],
    num_blocked: Int64[ndarray, " k"],
) -> None:
    for d in range(len(s.free)):
        for i in range(num_blocked[d]):
            if s.place[blocked[d, i]] < 0:
                _queue(task, s, blocked[d, i], d, key, item, size)
        num_blocked[d] = 0


@helper
def _first_pair(
    a: GraphArrays,
    task: _Task,
    s: _State,
    limited: bool,
    key: Float64[ndarray, "2 k x"],
    item: Int64[ndarray, "2 k x"],
    size: Int64[ndarray, "2 k"],
    blocked: Int64[ndarray, "k n"],
    num_blocked: Int64[ndarray, " k"],
) -> tuple[int, int]:
    """Return the op and device that can start first; (-1, -1) if memory forbids them all."""
    best, where, soonest = -1, -1, np.inf
    for d in range(len(s.free)):
        while True:
            while size[0, d] > 0 and key[0, d, 0] <= s.free[d]:
                at = item[0, d, 0]
                size[0, d] = heap_pop(key[0, d], item[0, d], size[0, d])
                size[1, d] = heap_push(key[1, d], item[1, d], size[1, d], 0.0, at)
            queue = 1 if size[1, d] > 0 else 0
            if size[queue, d] == 0:
                break
            op = a.topological[item[queue, d, 0]]
            gone = s.place[op] >= 0 or not _allowed(a, task, s, op, d)
            if gone or (limited and not _fits(a, task, s, op, d)):
                size[queue, d] = heap_pop(key[queue, d], item[queue, d], size[queue, d])
                if not gone:
                    blocked[d, num_blocked[d]] = op
                    num_blocked[d] += 1
                continue
            begin = max(s.ready[op, d], s.free[d])
            sooner = best < 0 or begin < soonest
            if sooner or (begin == soonest and task.position[op] < task.position[best]):
                best, where, soonest = op, d, begin
            break
    return int(best), where
