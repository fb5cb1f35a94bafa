"""Critical-path switches, ParDNN's second refinement policy (thesis, section 4.1.1, "Refinement").

Once the graph is partitioned, edges between devices cost time and edges within one do not, so the
critical path differs from that of slicing. Along it, an endpoint of an edge that crosses devices
joins the other end's device if that shortens every path through it, according to the levels of its
neighbours. Then levels are computed again; one call is one round. O(ops + edges).

Deviations: a switch moves a whole co-location group, and only to a device that can run it.
Contention on the links is not counted.
"""

# Kernels: an element of an array is a number, which pyright cannot see.
# pyright: reportArgumentType=false, reportReturnType=false

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Float64, Int64
from numpy import ndarray

from pardnn.kernels.jit import helper, kernel
from pardnn.place.pardnn.problem import Problem
from pardnn.sim.levels import bottom_levels, top_levels


def switch_critical_path(
    problem: Problem, place: Int64[ndarray, " n"]
) -> tuple[Int64[ndarray, " n"], int]:
    """Return the placement after one round of switches, and their number."""
    adjacency, machine, new = problem.adjacency, problem.machine, place.copy()
    top = top_levels(problem.arrays, machine, place, adjacency)
    bottom = bottom_levels(problem.arrays, machine, place, adjacency)
    start = int(np.where(top == 0.0, bottom, -1.0).argmax())
    predecessors, successors = adjacency.predecessors, adjacency.successors
    switched = _switch_kernel(
        predecessors.ptr, predecessors.edge, successors.ptr, successors.edge, machine.seconds,
        machine.device_class, machine.latency, machine.bandwidth, problem.arrays.group,
        problem.member_ptr, problem.member, problem.runs, top, bottom, start, place, new,
    )  # fmt: skip
    return new, switched


@helper
def _comm(
    source: int,
    target: int,
    size: int,
    latency: Float64[ndarray, "k k"],
    bandwidth: Float64[ndarray, "k k"],
) -> float:
    """Return the communication cost of an edge in seconds; -1 bytes is an order edge."""
    if source == target:
        return 0.0
    return latency[source, target] + max(size, 0) / bandwidth[source, target]


@helper
def _path_through(
    op: int,
    d: int,
    predecessor_ptr: Int64[ndarray, " p"],
    predecessor: Int64[ndarray, "x 3"],
    successor_ptr: Int64[ndarray, " p"],
    successor: Int64[ndarray, "x 3"],
    seconds: Float64[ndarray, "f n"],
    device_class: Int64[ndarray, " k"],
    latency: Float64[ndarray, "k k"],
    bandwidth: Float64[ndarray, "k k"],
    group: Int64[ndarray, " n"],
    place: Int64[ndarray, " n"],
    top: Float64[ndarray, " n"],
    bottom: Float64[ndarray, " n"],
) -> float:
    """Longest path through an op if its group were on device d, by the levels of the others."""
    before, after = 0.0, 0.0
    for e in range(predecessor_ptr[op], predecessor_ptr[op + 1]):
        other = predecessor[e, 0]
        p = d if group[other] == group[op] else place[other]
        done = top[other] + seconds[device_class[p], other]
        before = max(before, done + _comm(p, d, predecessor[e, 2], latency, bandwidth))
    for e in range(successor_ptr[op], successor_ptr[op + 1]):
        other = successor[e, 0]
        q = d if group[other] == group[op] else place[other]
        after = max(after, bottom[other] + _comm(d, q, successor[e, 2], latency, bandwidth))
    return before + seconds[device_class[d], op] + after


@kernel
def _switch_kernel(
    predecessor_ptr: Int64[ndarray, " p"],
    predecessor: Int64[ndarray, "x 3"],
    successor_ptr: Int64[ndarray, " p"],
    successor: Int64[ndarray, "x 3"],
    seconds: Float64[ndarray, "f n"],
    device_class: Int64[ndarray, " k"],
    latency: Float64[ndarray, "k k"],
    bandwidth: Float64[ndarray, "k k"],
    group: Int64[ndarray, " n"],
    member_ptr: Int64[ndarray, " g1"],
    member: Int64[ndarray, " n"],
    runs: Bool[ndarray, "g k"],
    top: Float64[ndarray, " n"],
    bottom: Float64[ndarray, " n"],
    op: int,
    old: Int64[ndarray, " n"],
    place: Int64[ndarray, " n"],
) -> int:
    """Walk the critical path of `old` from its first op; change `place`, return the switches."""
    length, switched = bottom[op], 0
    while True:
        best, longest = -1, -1.0
        for e in range(successor_ptr[op], successor_ptr[op + 1]):
            other = successor[e, 0]
            path = bottom[other]
            path += _comm(old[op], old[other], successor[e, 2], latency, bandwidth)
            if path > longest:
                best, longest = other, path
        if best < 0:
            return switched
        if place[op] != place[best]:
            for moved, d in ((op, place[best]), (best, place[op])):
                begin, end = member_ptr[group[moved]], member_ptr[group[moved] + 1]
                longest = 0.0
                for i in range(begin, end):
                    longest = max(longest, _path_through(
                        member[i], d, predecessor_ptr, predecessor, successor_ptr, successor,
                        seconds, device_class, latency, bandwidth, group, place, top, bottom,
                    ))  # fmt: skip
                if runs[group[moved], d] and longest < length * (1 - 1e-9):
                    place[member[begin:end]] = d
                    switched += 1
                    break
        op = best
