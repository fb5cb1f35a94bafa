"""List scheduling that starts from clusters: the last pass of refinement (ours).

Ops in order of a key, each on the device where `finish + downstream` is smallest. `finish` is the
earliest finish there (Topcuoglu et al., HEFT, 2002); `downstream` is the longest path from there to
the end of the step if every later op stays on its *home*, the device of the placement that the pass
starts from. Without homes it is plain HEFT. Repeated with its own result as the new homes, it moves
ops away from late devices and keeps them near the ops that wait for them.

Link contention is ignored while choosing; the simulator decides. O((ops + edges) K + ops log ops);
with equal links between all devices O(ops K + edges + ops log ops).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float64, Int64
from numpy import ndarray

from pardnn.kernels.jit import helper, kernel
from pardnn.kernels.sorting import inverse_permutation, stable_order
from pardnn.place.pardnn.problem import Problem
from pardnn.sim.timeline import Timeline, static_timeline


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


class ListSchedule(NamedTuple):
    """A schedule.

    Attributes:
        place: Device of each op.
        start: Seconds.
        finish: Seconds.
        order: Ops in the order in which they were placed, a topological one.
    """

    place: Int64[ndarray, " n"]
    start: Float64[ndarray, " n"]
    finish: Float64[ndarray, " n"]
    order: Int64[ndarray, " n"]

    @property
    def makespan(self) -> float:
        """Seconds until the last op has finished."""
        return float(self.finish.max())


def list_schedule(problem: Problem, key: Float64[ndarray, " n"], homes: Homes) -> ListSchedule:
    """Return a placement and its schedule.

    Args:
        problem: The problem.
        key: Of each op; the smallest is placed first. It never decreases along an edge.
        homes: What the pass starts from.
    """
    n, adjacency, machine = problem.arrays.num_ops, problem.adjacency, problem.machine
    order = adjacency.order[stable_order(key[adjacency.order])]
    made = ListSchedule(np.empty(n, dtype=np.int64), np.empty(n), np.empty(n), order)
    latency, byte_seconds = machine.latency.copy(), 1 / machine.bandwidth
    for within in (latency, byte_seconds):
        np.fill_diagonal(within, 0.0)
    _list_kernel(
        order, adjacency.predecessors.ptr, adjacency.predecessors.edge, adjacency.successors.ptr,
        adjacency.successors.edge, machine.seconds, machine.device_class, latency, byte_seconds,
        latency.T.copy(), byte_seconds.T.copy(), _are_equal(latency) and _are_equal(byte_seconds),
        problem.arrays.group, problem.runs, homes.place, homes.bottom, homes.fixed.copy(),
        made.place, made.start, made.finish,
    )  # fmt: skip
    return made


def _are_equal(links: Float64[ndarray, "k k"]) -> bool:
    """Whether all links between two devices are equal."""
    apart = links[~np.eye(len(links), dtype=bool)]
    return bool((apart == apart[:1]).all())


def list_schedule_timeline(problem: Problem, made: ListSchedule) -> Timeline:
    """Return the timeline of a list schedule."""
    dispatch = inverse_permutation(made.order)
    return static_timeline(
        problem.arrays, problem.machine, made.place, made.start, made.finish, dispatch
    )


@helper
def _raise_until(
    op: int,
    ptr: Int64[ndarray, " p"],
    edge: Int64[ndarray, "x 3"],
    place: Int64[ndarray, " h"],
    done: Float64[ndarray, " h"],
    latency: Float64[ndarray, "k k"],
    byte_seconds: Float64[ndarray, "k k"],
    equal_links: bool,
    until: Float64[ndarray, " k"],
) -> None:
    """Raise `until` to when all that an op's edges lead to is on a device, for each device.

    With equal links that is the latest arrival from another device: all but one of the devices wait
    for the same one, and the device that this one comes from for the latest from the others.
    """
    first, second, source = -np.inf, -np.inf, -1
    for e in range(ptr[op], ptr[op + 1]):
        other = edge[e, 0]
        p, left, size = place[other], done[other], max(edge[e, 2], 0)
        if not equal_links:
            for d in range(len(until)):
                until[d] = max(until[d], left + (latency[p, d] + size * byte_seconds[p, d]))
            continue
        until[p] = max(until[p], left)
        at = left + (latency[0, -1] + size * byte_seconds[0, -1])
        if p == source:
            first = max(first, at)
        elif at > first:
            first, second, source = at, first, p
        else:
            second = max(second, at)
    if source >= 0:
        here = max(until[source], second)
        for d in range(len(until)):
            until[d] = max(until[d], first)
        until[source] = here


@kernel
def _list_kernel(
    order: Int64[ndarray, " n"],
    predecessor_ptr: Int64[ndarray, " p"],
    predecessor: Int64[ndarray, "x 3"],
    successor_ptr: Int64[ndarray, " p"],
    successor: Int64[ndarray, "x 3"],
    seconds: Float64[ndarray, "f n"],
    device_class: Int64[ndarray, " k"],
    latency: Float64[ndarray, "k k"],
    byte_seconds: Float64[ndarray, "k k"],
    latency_to: Float64[ndarray, "k k"],
    byte_seconds_to: Float64[ndarray, "k k"],
    equal_links: bool,
    group: Int64[ndarray, " n"],
    runs: Bool[ndarray, "g k"],
    home: Int64[ndarray, " h"],
    bottom: Float64[ndarray, " h"],
    fixed: Int64[ndarray, " g"],
    place: Int64[ndarray, " n"],
    start: Float64[ndarray, " n"],
    finish: Float64[ndarray, " n"],
) -> None:
    k = len(device_class)
    free, ready, score, end = np.zeros(k), np.empty(k), np.empty(k), np.empty(k)
    for op in order:
        best = fixed[group[op]]
        if best >= 0:
            begin = free[best]
            for e in range(predecessor_ptr[op], predecessor_ptr[op + 1]):
                p, size = place[predecessor[e, 0]], max(predecessor[e, 2], 0)
                comm = latency[p, best] + size * byte_seconds[p, best]
                begin = max(begin, finish[predecessor[e, 0]] + comm)
        else:
            for d in range(k):
                ready[d], score[d] = free[d], 0.0
            _raise_until(
                op,
                predecessor_ptr,
                predecessor,
                place,
                finish,
                latency,
                byte_seconds,
                equal_links,
                ready,
            )
            if len(home) > 0:
                _raise_until(
                    op,
                    successor_ptr,
                    successor,
                    home,
                    bottom,
                    latency_to,
                    byte_seconds_to,
                    equal_links,
                    score,
                )
            least = np.inf
            # Without a branch, which the processor would guess wrong: the second loop seldom takes
            # one.
            for d in range(k):
                end[d] = ready[d] + seconds[device_class[d], op]
                score[d] += end[d] if runs[group[op], d] else np.inf
                least = min(least, score[d])
            for d in range(k):
                if score[d] > least or (best >= 0 and end[d] > end[best]):
                    continue
                if best < 0 or end[d] < end[best] or (len(home) > 0 and d == home[op]):
                    best = d
            fixed[group[op]], begin = best, ready[best]
        place[op], start[op] = best, begin
        finish[op] = begin + seconds[device_class[best], op]
        free[best] = finish[op]
