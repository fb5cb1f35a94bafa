"""Refinement (ParDNN, 4.1.1): swaps of clusters, then switches of ops on the critical path.

*Swap*: a secondary and one of another device that lies within its span change places if the larger
of the two devices' work in the span, plus communication, gets smaller; each at most once.

*Critical-path switch*: along the longest path of the partitioned graph (communication between
devices counted, contention not), an endpoint of an edge that crosses devices joins the other end's
device if that shortens every path through it. Then levels are computed anew.

Reference: thesis, section 4.1.1. Deviations: a swap tries the `SWAP_CANDIDATES` nearest partners;
a switch moves a whole co-location group.
"""

# Kernels: an element of an array is a number, which pyright cannot see.
# pyright: reportArgumentType=false, reportReturnType=false

from __future__ import annotations

import numba
import numpy as np
from jaxtyping import Int64
from numpy import ndarray

from pardnn.place.pardnn.clusters import Clusters, Problem
from pardnn.place.pardnn.fenwick import fenwick_sum
from pardnn.place.pardnn.mapping import Spans, add_work, traffic, transfer_seconds
from pardnn.sim.levels import bottom_levels, top_levels

#: Partners tried per cluster. More than this many clusters that start within one span are alike.
SWAP_CANDIDATES = 8


def swap_clusters(
    problem: Problem, clusters: Clusters, spans: Spans, device: Int64[ndarray, " c"]
) -> Int64[ndarray, " c"]:
    """Return the devices of the clusters after the swaps. O(C log C + swaps V log V)."""
    k = problem.machine.num_devices
    device = device.copy()
    secondaries = k + np.argsort(spans.begin[k:], kind="stable")
    place = device[clusters.of]
    work = np.zeros((k, len(spans.levels) + 1))
    _swap_kernel(problem, clusters, spans, secondaries, device, place, work)
    return device


def switch_critical_path(
    problem: Problem, place: Int64[ndarray, " n"]
) -> tuple[Int64[ndarray, " n"], int]:
    """Return the placement after one round of switches, and their number. O(ops + edges)."""
    top = top_levels(problem.arrays, problem.machine, place)
    bottom = bottom_levels(problem.arrays, problem.machine, place)
    place = place.copy()
    return place, _switch_kernel(problem, top, bottom, place)


@numba.njit(cache=True)
def _communication(
    problem: Problem,
    p: int,
    count_in: ndarray,
    bytes_in: ndarray,
    count_out: ndarray,
    bytes_out: ndarray,
) -> float:
    cost = 0.0
    for q in range(len(count_in) - 1):
        if q != p:
            cost += transfer_seconds(problem.machine, q, p, count_in[q], bytes_in[q])
            cost += transfer_seconds(problem.machine, p, q, count_out[q], bytes_out[q])
    return cost


@numba.njit(cache=True)
def _work_inside(problem: Problem, spans: Spans, c: int, begin: int, end: int, d: int) -> float:
    """Seconds of cluster c's ops on device d, of those whose level lies in [begin, end)."""
    machine, total = problem.machine, 0.0
    for i in range(spans.ptr[c], spans.ptr[c + 1]):
        op = spans.op[i]
        if begin <= spans.level[op] < end:
            total += machine.seconds[machine.device_class[d], op]
    return total


@numba.njit(cache=True)
def _can_run(problem: Problem, spans: Spans, c: int, d: int) -> bool:
    for i in range(spans.ptr[c], spans.ptr[c + 1]):
        if not problem.runs[problem.arrays.group[spans.op[i]], d]:
            return False
    return True


@numba.njit(cache=True)
def _swap_kernel(
    problem: Problem,
    clusters: Clusters,
    spans: Spans,
    secondaries: ndarray,
    device: ndarray,
    place: ndarray,
    work: ndarray,
) -> None:
    k, s = problem.runs.shape[1], len(secondaries)
    load = np.zeros(k)
    for op in range(len(place)):
        add_work(problem, spans, op, place[op], 1.0, work, load)
    seen = np.full(len(problem.arrays.tensor_op), -1, dtype=np.int64)
    counts = np.zeros((4, k + 1), dtype=np.int64)
    done = np.zeros(len(device), dtype=np.bool_)
    first, stamp = 0, 0
    for i in range(s):
        c = secondaries[i]
        begin, end, p = spans.begin[c], spans.end[c], device[c]
        while first < s and spans.begin[secondaries[first]] < begin:
            first += 1
        tried = 0
        for j in range(first, s):
            other = secondaries[j]
            if done[c] or spans.begin[other] >= end or tried == SWAP_CANDIDATES:
                break
            q = device[other]
            if q == p or done[other] or spans.end[other] > end:
                continue
            tried += 1
            mine = _work_inside(problem, spans, c, begin, end, p)
            theirs = _work_inside(problem, spans, other, begin, end, q)
            at_p = fenwick_sum(work[p], end) - fenwick_sum(work[p], begin)
            at_q = fenwick_sum(work[q], end) - fenwick_sum(work[q], begin)
            gain = max(at_p, at_q) - max(at_p - mine + theirs, at_q - theirs + mine)
            if (
                gain <= 0
                or not _can_run(problem, spans, c, q)
                or not _can_run(problem, spans, other, p)
            ):
                continue
            for moved, old, new in ((c, p, q), (other, q, p)):
                seen[:] = -1
                traffic(
                    problem, clusters, spans, moved, place, seen, stamp,
                    counts[0], counts[1], counts[2], counts[3],
                )  # fmt: skip
                gain += _communication(problem, old, counts[0], counts[1], counts[2], counts[3])
                gain -= _communication(problem, new, counts[0], counts[1], counts[2], counts[3])
            if gain <= 0:
                continue
            for moved, old, new in ((c, p, q), (other, q, p)):
                done[moved] = True
                device[moved] = new
                for x in range(spans.ptr[moved], spans.ptr[moved + 1]):
                    add_work(problem, spans, spans.op[x], old, -1.0, work, load)
                    add_work(problem, spans, spans.op[x], new, 1.0, work, load)
                    place[spans.op[x]] = new


@numba.njit(cache=True)
def _way(problem: Problem, source: int, target: int, num_bytes: int) -> float:
    if source == target:
        return 0.0
    machine = problem.machine
    return machine.latency[source, target] + num_bytes / machine.bandwidth[source, target]


@numba.njit(cache=True)
def _path_through(
    problem: Problem, op: int, d: int, place: ndarray, top: ndarray, bottom: ndarray
) -> float:
    """Longest path through an op if its group were on device d, by the levels of the others."""
    a, machine = problem.arrays, problem.machine
    group = a.group[op]
    before, after = 0.0, 0.0
    for edge in range(a.input_ptr[op], a.input_ptr[op + 1]):
        t = a.input_tensor[edge]
        earlier = a.tensor_op[t]
        p = d if a.group[earlier] == group else place[earlier]
        done = top[earlier] + machine.seconds[machine.device_class[p], earlier]
        before = max(before, done + _way(problem, p, d, a.tensor_bytes[t]))
    for edge in range(a.after_ptr[op], a.after_ptr[op + 1]):
        earlier = a.after_op[edge]
        p = d if a.group[earlier] == group else place[earlier]
        done = top[earlier] + machine.seconds[machine.device_class[p], earlier]
        before = max(before, done + _way(problem, p, d, 0))
    for t in range(a.output_ptr[op], a.output_ptr[op + 1]):
        for edge in range(a.consumer_ptr[t], a.consumer_ptr[t + 1]):
            later = a.consumer_op[edge]
            q = d if a.group[later] == group else place[later]
            after = max(after, bottom[later] + _way(problem, d, q, a.tensor_bytes[t]))
    for edge in range(a.before_ptr[op], a.before_ptr[op + 1]):
        later = a.before_op[edge]
        q = d if a.group[later] == group else place[later]
        after = max(after, bottom[later] + _way(problem, d, q, 0))
    return before + machine.seconds[machine.device_class[d], op] + after


@numba.njit(cache=True)
def _next_on_path(problem: Problem, op: int, old: ndarray, bottom: ndarray) -> int:
    a, best, longest = problem.arrays, -1, -1.0
    for t in range(a.output_ptr[op], a.output_ptr[op + 1]):
        for edge in range(a.consumer_ptr[t], a.consumer_ptr[t + 1]):
            later = a.consumer_op[edge]
            path = bottom[later] + _way(problem, old[op], old[later], a.tensor_bytes[t])
            if path > longest:
                best, longest = later, path
    for edge in range(a.before_ptr[op], a.before_ptr[op + 1]):
        later = a.before_op[edge]
        path = bottom[later] + _way(problem, old[op], old[later], 0)
        if path > longest:
            best, longest = later, path
    return best


@numba.njit(cache=True)
def _switch_kernel(problem: Problem, top: ndarray, bottom: ndarray, place: ndarray) -> int:
    old = place.copy()
    op = 0
    for other in range(len(place)):
        if top[other] == 0.0 and bottom[other] > bottom[op]:
            op = other
    length, switched = bottom[op], 0
    later = _next_on_path(problem, op, old, bottom)
    while later >= 0:
        if place[op] != place[later]:
            for moved, d in ((op, place[later]), (later, place[op])):
                group = problem.arrays.group[moved]
                longest = 0.0
                for i in range(problem.member_ptr[group], problem.member_ptr[group + 1]):
                    path = _path_through(problem, problem.member[i], d, place, top, bottom)
                    longest = max(longest, path)
                if problem.runs[group, d] and longest < length * (1 - 1e-9):
                    for i in range(problem.member_ptr[group], problem.member_ptr[group + 1]):
                        place[problem.member[i]] = d
                    switched += 1
                    break
        op = later
        later = _next_on_path(problem, op, old, bottom)
    return switched
