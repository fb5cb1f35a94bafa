"""Refinement (ParDNN, 4.1.1): swaps of clusters, then switches of ops on the critical path.

*Swap*: a secondary and one of another device that lies within its span change places if the larger
of the two devices' work in the span, plus communication, gets smaller; each at most once.

*Critical-path switch*: along the longest path of the partitioned graph (communication between
devices counted, contention not), an endpoint of an edge that crosses devices joins the other end's
device if that shortens every path through it. Then levels are computed anew.

Reference: thesis, section 4.1.1. Deviations: a swap tries the `SWAP_CANDIDATES` nearest partners,
among the `SWAP_SCAN` clusters that start next; a switch moves a whole co-location group.
"""

# Kernels: an element of an array is a number, which pyright cannot see.
# pyright: reportArgumentType=false, reportReturnType=false

from __future__ import annotations

import numpy as np
from jaxtyping import Int64
from numpy import ndarray

from pardnn.kernels.fenwick import fenwick_sums
from pardnn.kernels.jit import helper, kernel
from pardnn.kernels.sorting import stable_order
from pardnn.place.pardnn.cluster_graph import Spans
from pardnn.place.pardnn.mapping import (
    Loads,
    add_transfers,
    add_work,
    can_run,
    loads_of,
    traffic,
)
from pardnn.place.pardnn.problem import Clusters, Problem
from pardnn.sim.levels import bottom_levels, top_levels

#: Partners tried per cluster. More than this many clusters that start within one span are alike.
SWAP_CANDIDATES = 8
#: Clusters looked at for partners: where all are on one device, there are none to be found.
SWAP_SCAN = 256


def swap_clusters(
    problem: Problem, clusters: Clusters, spans: Spans, device: Int64[ndarray, " c"]
) -> Int64[ndarray, " c"]:
    """Return the devices of the clusters after the swaps. O(C (log C + K log V) + swaps V)."""
    k, machine = problem.machine.num_devices, problem.machine
    device = device.copy()
    secondaries = k + stable_order(spans.begin[k:].astype(np.float64))
    _swap_kernel(
        machine.device_class, machine.latency, 1 / machine.bandwidth, spans, secondaries,
        can_run(problem, clusters), loads_of(problem, spans, device), device,
    )  # fmt: skip
    return device


def switch_critical_path(
    problem: Problem, place: Int64[ndarray, " n"]
) -> tuple[Int64[ndarray, " n"], int]:
    """Return the placement after one round of switches, and their number. O(ops + edges)."""
    top = top_levels(problem.arrays, problem.machine, place, problem.flow)
    bottom = bottom_levels(problem.arrays, problem.machine, place, problem.flow)
    start = int(np.where(top == 0.0, bottom, -1.0).argmax())
    flow, machine, new = problem.flow, problem.machine, place.copy()
    switched = _switch_kernel(
        flow.earlier.ptr, flow.earlier.edge, flow.later.ptr, flow.later.edge, machine.seconds,
        machine.device_class, machine.latency, machine.bandwidth, problem.arrays.group,
        problem.member_ptr, problem.member, problem.runs, top, bottom, start, place, new,
    )  # fmt: skip
    return new, switched


@kernel
def _swap_kernel(
    device_class: ndarray,
    latency: ndarray,
    byte_seconds: ndarray,
    spans: Spans,
    secondaries: ndarray,
    can_run: ndarray,
    loads: Loads,
    device: ndarray,
) -> None:
    s, work, count = len(secondaries), loads.work, loads.count
    cost, at = np.empty(work.shape[1]), np.empty(work.shape[1])
    into, out = spans.into, spans.out
    done = np.zeros(len(device), dtype=np.bool_)
    first = 0
    for i in range(s):
        c = secondaries[i]
        begin, end, p = spans.begin[c], spans.end[c], device[c]
        while first < s and spans.begin[secondaries[first]] < begin:
            first += 1
        if done[c]:
            continue
        fenwick_sums(work, begin, end, at)
        tried = 0
        for j in range(first, min(s, first + SWAP_SCAN)):
            other = secondaries[j]
            if done[c] or spans.begin[other] >= end or tried == SWAP_CANDIDATES:
                break
            q = device[other]
            if q == p or done[other] or spans.end[other] > end:
                continue
            tried += 1
            mine, theirs = spans.inside[device_class[p], c], spans.inside[device_class[q], other]
            gain = max(at[p], at[q]) - max(at[p] - mine + theirs, at[q] - theirs + mine)
            if gain <= 0 or not can_run[c, q] or not can_run[other, p]:
                continue
            for moved, old, new in ((c, p, q), (other, q, p)):
                cost[:] = 0.0
                traffic(moved, into.ptr, into.edge, out.ptr, out.edge, device, loads.last, count)
                add_transfers(count, latency, byte_seconds, cost)
                gain += cost[old] - cost[new]
            if gain <= 0:
                continue
            for moved, old, new in ((c, p, q), (other, q, p)):
                done[moved], device[moved] = True, new
                for sign, d in ((-1.0, old), (1.0, new)):
                    add_work(spans, moved, d, sign, device_class[d], loads)


@helper
def _way(source: int, target: int, size: int, latency: ndarray, bandwidth: ndarray) -> float:
    if source == target:
        return 0.0
    return latency[source, target] + max(size, 0) / bandwidth[source, target]


@helper
def _path_through(
    op: int,
    d: int,
    earlier_ptr: ndarray,
    earlier: ndarray,
    later_ptr: ndarray,
    later: ndarray,
    seconds: ndarray,
    device_class: ndarray,
    latency: ndarray,
    bandwidth: ndarray,
    group: ndarray,
    place: ndarray,
    top: ndarray,
    bottom: ndarray,
) -> float:
    """Longest path through an op if its group were on device d, by the levels of the others."""
    before, after = 0.0, 0.0
    for e in range(earlier_ptr[op], earlier_ptr[op + 1]):
        other = earlier[e, 0]
        p = d if group[other] == group[op] else place[other]
        done = top[other] + seconds[device_class[p], other]
        before = max(before, done + _way(p, d, earlier[e, 2], latency, bandwidth))
    for e in range(later_ptr[op], later_ptr[op + 1]):
        other = later[e, 0]
        q = d if group[other] == group[op] else place[other]
        after = max(after, bottom[other] + _way(d, q, later[e, 2], latency, bandwidth))
    return before + seconds[device_class[d], op] + after


@kernel
def _switch_kernel(
    earlier_ptr: ndarray,
    earlier: ndarray,
    later_ptr: ndarray,
    later: ndarray,
    seconds: ndarray,
    device_class: ndarray,
    latency: ndarray,
    bandwidth: ndarray,
    group: ndarray,
    member_ptr: ndarray,
    member: ndarray,
    runs: ndarray,
    top: ndarray,
    bottom: ndarray,
    op: int,
    old: ndarray,
    place: ndarray,
) -> int:
    """Walk the critical path of `old` from its first op; change `place`."""
    length, switched = bottom[op], 0
    while True:
        best, longest = -1, -1.0
        for e in range(later_ptr[op], later_ptr[op + 1]):
            path = bottom[later[e, 0]]
            path += _way(old[op], old[later[e, 0]], later[e, 2], latency, bandwidth)
            if path > longest:
                best, longest = later[e, 0], path
        if best < 0:
            return switched
        if place[op] != place[best]:
            for moved, d in ((op, place[best]), (best, place[op])):
                begin, end = member_ptr[group[moved]], member_ptr[group[moved] + 1]
                longest = 0.0
                for i in range(begin, end):
                    longest = max(longest, _path_through(
                        member[i], d, earlier_ptr, earlier, later_ptr, later, seconds,
                        device_class, latency, bandwidth, group, place, top, bottom,
                    ))  # fmt: skip
                if runs[group[moved], d] and longest < length * (1 - 1e-9):
                    place[member[begin:end]] = d
                    switched += 1
                    break
        op = best
