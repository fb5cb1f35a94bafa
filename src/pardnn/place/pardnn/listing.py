"""List scheduling that starts from clusters: the last pass of refinement (ours).

Ops in order of a key, each on the device where `finish + downstream` is smallest. `finish` is the
earliest finish there (Topcuoglu et al., HEFT, 2002); `downstream` is the longest way from there to
the end of the step if every later op stays on its *home*, the device of the placement that the pass
starts from. Without homes it is plain HEFT. Repeated with its own result as the new homes, it moves
ops off the device that is late and keeps them near those that wait for them.

Link contention is ignored while choosing; the judge decides. O((ops + edges) K + ops log ops).
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np
from jaxtyping import Float64, Int64
from numpy import ndarray

from pardnn.place.pardnn.clusters import Problem
from pardnn.sim.heap import heap_pop, heap_push
from pardnn.sim.timeline import Timeline
from pardnn.sim.transfers import transfers_of


class Homes(NamedTuple):
    """What a pass starts from.

    Attributes:
        place: Device of each op; empty for none.
        bottom: Bottom levels of that placement, in seconds.
        fixed: Device of each group, -1 where the pass may choose.
    """

    place: Int64[ndarray, " h"]
    bottom: Float64[ndarray, " h"]
    fixed: Int64[ndarray, " g"]


class Listing(NamedTuple):
    """A schedule under construction."""

    place: Int64[ndarray, " n"]
    start: Float64[ndarray, " n"]
    finish: Float64[ndarray, " n"]
    dispatch: Int64[ndarray, " n"]


def list_schedule(
    problem: Problem, key: Float64[ndarray, " n"], homes: Homes
) -> tuple[Int64[ndarray, " n"], Timeline]:
    """Return a placement and its schedule.

    Args:
        problem: The problem.
        key: Of each op; among ready ops the smallest is placed first.
        homes: What the pass starts from.
    """
    n = problem.arrays.num_ops
    made = Listing(
        np.full(n, -1, dtype=np.int64), np.zeros(n), np.zeros(n), np.empty(n, dtype=np.int64)
    )
    key = np.ascontiguousarray(key, dtype=np.float64)
    _list_kernel(problem, key, homes, homes.fixed.copy(), made)
    return made.place, listed_timeline(problem, made)


def listed_timeline(problem: Problem, made: Listing) -> Timeline:
    """Return the timeline of a schedule whose transfers start when their tensor exists."""
    a, machine = problem.arrays, problem.machine
    transfers = transfers_of(a, made.place, machine.num_devices)
    maker = a.tensor_op[transfers.tensor]
    source, target = made.place[maker], transfers.target
    seconds = machine.latency[source, target] + (
        a.tensor_bytes[transfers.tensor] / machine.bandwidth[source, target]
    )
    return Timeline(
        start=made.start,
        finish=made.finish,
        dispatch=made.dispatch,
        message_tensor=transfers.tensor,
        message_source=source,
        message_target=target,
        message_start=made.finish[maker],
        message_finish=made.finish[maker] + seconds,
    )


@numba.njit(cache=True)
def _list_kernel(
    problem: Problem, key: ndarray, homes: Homes, fixed: ndarray, made: Listing
) -> None:
    a, machine = problem.arrays, problem.machine
    n, k = len(key), len(machine.device_class)
    missing = np.empty(n, dtype=np.int64)
    heap_key, heap_op = np.empty(n), np.empty(n, dtype=np.int64)
    free, ready, downstream = np.zeros(k), np.empty(k), np.empty(k)
    size = 0
    for op in range(n):
        missing[op] = a.input_ptr[op + 1] - a.input_ptr[op] + a.after_ptr[op + 1] - a.after_ptr[op]
        if missing[op] == 0:
            size = heap_push(heap_key, heap_op, size, key[op], op)
    count = 0
    while size > 0:
        op = heap_op[0]
        size = heap_pop(heap_key, heap_op, size)
        group = a.group[op]
        _ready_times(problem, op, made, free, ready)
        best = fixed[group]
        if best < 0:
            _downstream(problem, op, homes, downstream)
            best = _best_device(problem, op, homes, ready, downstream)
            fixed[group] = best
        made.place[op] = best
        made.start[op] = ready[best]
        made.finish[op] = ready[best] + machine.seconds[machine.device_class[best], op]
        made.dispatch[op] = count
        free[best] = made.finish[op]
        count += 1
        for t in range(a.output_ptr[op], a.output_ptr[op + 1]):
            for edge in range(a.consumer_ptr[t], a.consumer_ptr[t + 1]):
                later = a.consumer_op[edge]
                missing[later] -= 1
                if missing[later] == 0:
                    size = heap_push(heap_key, heap_op, size, key[later], later)
        for edge in range(a.before_ptr[op], a.before_ptr[op + 1]):
            later = a.before_op[edge]
            missing[later] -= 1
            if missing[later] == 0:
                size = heap_push(heap_key, heap_op, size, key[later], later)


@numba.njit(cache=True)
def _ready_times(problem: Problem, op: int, made: Listing, free: ndarray, ready: ndarray) -> None:
    """Fill when each device could start the op: it is free and all inputs have arrived."""
    a, machine, k = problem.arrays, problem.machine, len(free)
    ready[:] = free
    for i in range(a.input_ptr[op], a.input_ptr[op + 1]):
        t = a.input_tensor[i]
        earlier = a.tensor_op[t]
        p, done = made.place[earlier], made.finish[earlier]
        for d in range(k):
            at = done
            if d != p:
                at += machine.latency[p, d] + a.tensor_bytes[t] / machine.bandwidth[p, d]
            ready[d] = max(ready[d], at)
    for i in range(a.after_ptr[op], a.after_ptr[op + 1]):
        earlier = a.after_op[i]
        p, done = made.place[earlier], made.finish[earlier]
        for d in range(k):
            ready[d] = max(ready[d], done + (machine.latency[p, d] if d != p else 0.0))


@numba.njit(cache=True)
def _downstream(problem: Problem, op: int, homes: Homes, downstream: ndarray) -> None:
    """Fill the longest way from the op's end on each device to the end of the step."""
    a, machine, k = problem.arrays, problem.machine, len(downstream)
    downstream[:] = 0.0
    if len(homes.place) == 0:
        return
    for t in range(a.output_ptr[op], a.output_ptr[op + 1]):
        for edge in range(a.consumer_ptr[t], a.consumer_ptr[t + 1]):
            later = a.consumer_op[edge]
            q = homes.place[later]
            for d in range(k):
                way = homes.bottom[later]
                if d != q:
                    way += machine.latency[d, q] + a.tensor_bytes[t] / machine.bandwidth[d, q]
                downstream[d] = max(downstream[d], way)
    for edge in range(a.before_ptr[op], a.before_ptr[op + 1]):
        later = a.before_op[edge]
        q = homes.place[later]
        for d in range(k):
            way = homes.bottom[later] + (machine.latency[d, q] if d != q else 0.0)
            downstream[d] = max(downstream[d], way)


@numba.njit(cache=True)
def _best_device(
    problem: Problem, op: int, homes: Homes, ready: ndarray, downstream: ndarray
) -> int:
    machine, group = problem.machine, problem.arrays.group[op]
    home = homes.place[op] if len(homes.place) > 0 else -1
    best, best_score, best_finish = -1, np.inf, np.inf
    for d in range(len(ready)):
        if not problem.runs[group, d]:
            continue
        finish = ready[d] + machine.seconds[machine.device_class[d], op]
        score = finish + downstream[d]
        tie = score == best_score and (
            finish < best_finish or (finish == best_finish and d == home)
        )
        if best < 0 or score < best_score or tie:
            best, best_score, best_finish = d, score, finish
    return best
