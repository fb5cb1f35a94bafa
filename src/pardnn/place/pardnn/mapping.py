"""Mapping of clusters to devices (ParDNN, Alg. 2): initial merge, then level-aware balancing.

*Initial merge*: a secondary whose communication is more than the work that could hide it (its
*potential*, the work of others that may run within its span) gains nothing from a device of its own
and joins the primary that it communicates with most.

*LALB* (Eq. 4.2): the others, heaviest first, each go to the device with the least sum of work
already there within the cluster's span and communication with the other devices. Work by level is
kept in one Fenwick tree per device over the top levels. O(V log V + K S log V) for S secondaries.

Reference: thesis, section 4.1.1.

Deviations: clusters are merged heaviest first; a tensor is counted once, however many ops of the
cluster read it; communication costs what the link of the two devices costs; a device that cannot
run all of a cluster is not chosen while another can. Where none can, its groups are sent, one by
one, to a device that can run them.
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np
from jaxtyping import Bool, Float64, Int64
from numpy import ndarray

from pardnn.place.pardnn.clusters import Clusters, Problem, cluster_rows, clustered_levels
from pardnn.place.pardnn.fenwick import fenwick_add, fenwick_sum
from pardnn.sim.machine import Machine


class Spans(NamedTuple):
    """When clusters could run, by the levels of the clustered graph."""

    level: Int64[ndarray, " n"]  # rank of each op's top level among the distinct ones
    levels: Float64[ndarray, " l"]  # the distinct top levels, in seconds
    begin: Int64[ndarray, " c"]  # first level of the span
    end: Int64[ndarray, " c"]  # after its last level
    weight: Float64[ndarray, " c"]  # seconds of work
    ptr: Int64[ndarray, " c+1"]
    op: Int64[ndarray, " n"]  # ops of each cluster


def map_clusters(problem: Problem, clusters: Clusters) -> tuple[Int64[ndarray, " c"], Spans]:
    """Return the device of each cluster, and the spans by which they were chosen."""
    k = problem.machine.num_devices
    spans = spans_of(problem, clusters)
    device = np.full(len(clusters.head), -1, dtype=np.int64)
    device[:k] = _devices_of_primaries(problem)
    heaviest = k + np.argsort(-spans.weight[k:], kind="stable")
    allowed = _allowed(problem, clusters)
    place = device[clusters.of]
    work = np.zeros((k, len(spans.levels) + 1))
    _merge_kernel(problem, clusters, spans, heaviest, allowed, device, place)
    _balance_kernel(problem, clusters, spans, heaviest, allowed, device, place, work)
    return device, spans


def spans_of(problem: Problem, clusters: Clusters) -> Spans:
    """Return spans and weights of the clusters. O((V + E) + V log V)."""
    ptr, op = cluster_rows(clusters.of, len(clusters.head))
    top, bottom = clustered_levels(problem, clusters.of)
    levels, level = np.unique(top, return_inverse=True)
    c = len(clusters.head)
    start, end = np.zeros(c), np.zeros(c)
    _span_kernel(problem, clusters, top, float((top + bottom).max()), start, end)
    return Spans(
        level=level.astype(np.int64),
        levels=levels,
        begin=np.searchsorted(levels, start).astype(np.int64),
        end=np.searchsorted(levels, end).astype(np.int64),
        weight=np.bincount(clusters.of, weights=problem.seconds, minlength=c),
        ptr=ptr,
        op=op,
    )


def placement(
    problem: Problem, clusters: Clusters, device: Int64[ndarray, " c"]
) -> Int64[ndarray, " n"]:
    """Return the device of each op: that of its cluster, or the next that can run its group."""
    wish = device[clusters.of]
    k = problem.machine.num_devices
    bad = np.flatnonzero(~problem.runs[problem.arrays.group, wish])
    turns = (wish[bad][:, None] + np.arange(k)[None, :]) % k
    can = np.take_along_axis(problem.runs[problem.arrays.group[bad]], turns, axis=1)
    wish[bad] = np.take_along_axis(turns, can.argmax(axis=1)[:, None], axis=1)[:, 0]
    return wish


def _devices_of_primaries(problem: Problem) -> Int64[ndarray, " k"]:
    """Heaviest primary to the fastest device, by the work that a device can do at all."""
    seconds = problem.machine.seconds
    able = np.isfinite(seconds).sum(axis=1)
    total = np.where(np.isfinite(seconds), seconds, 0.0).sum(axis=1)
    classes = problem.machine.device_class
    return np.lexsort((total[classes], -able[classes])).astype(np.int64)


def _allowed(problem: Problem, clusters: Clusters) -> Bool[ndarray, "c k"]:
    allowed = np.ones((len(clusters.head), problem.machine.num_devices), dtype=np.bool_)
    for d in range(problem.machine.num_devices):
        allowed[clusters.of[~problem.runs[problem.arrays.group, d]], d] = False
    allowed[~allowed.any(axis=1)] = True
    return allowed


@numba.njit(cache=True)
def _span_kernel(
    problem: Problem,
    clusters: Clusters,
    top: ndarray,
    makespan: float,
    start: ndarray,
    end: ndarray,
) -> None:
    a, seconds = problem.arrays, problem.seconds
    for c in range(len(start)):
        op = clusters.head[c]
        if op < 0:
            continue
        for edge in range(a.input_ptr[op], a.input_ptr[op + 1]):
            earlier = a.tensor_op[a.input_tensor[edge]]
            start[c] = max(start[c], top[earlier] + seconds[earlier])
        for edge in range(a.after_ptr[op], a.after_ptr[op + 1]):
            earlier = a.after_op[edge]
            start[c] = max(start[c], top[earlier] + seconds[earlier])
        op = clusters.tail[c]
        end[c] = makespan
        for t in range(a.output_ptr[op], a.output_ptr[op + 1]):
            for edge in range(a.consumer_ptr[t], a.consumer_ptr[t + 1]):
                end[c] = min(end[c], top[a.consumer_op[edge]])
        for edge in range(a.before_ptr[op], a.before_ptr[op + 1]):
            end[c] = min(end[c], top[a.before_op[edge]])
        end[c] = max(end[c], start[c])


@numba.njit(cache=True)
def traffic(
    problem: Problem,
    clusters: Clusters,
    spans: Spans,
    c: int,
    place: ndarray,
    seen: ndarray,
    stamp: int,
    count_in: ndarray,
    bytes_in: ndarray,
    count_out: ndarray,
    bytes_out: ndarray,
) -> None:
    """Count the transfers between cluster c and each device.

    Args:
        problem: The problem.
        clusters: The clusters.
        spans: Their ops.
        c: A cluster.
        place: Device of each op, -1 where there is none yet; those count for device K.
        seen: Scratch, one number per tensor.
        stamp: A number that `seen` does not hold.
        count_in: Filled with the transfers from each device (K + 1), and so on.
        bytes_in: Filled.
        count_out: Filled.
        bytes_out: Filled.
    """
    a, k = problem.arrays, len(count_in) - 1
    count_in[:], bytes_in[:], count_out[:], bytes_out[:] = 0, 0, 0, 0
    last = np.full(k + 1, -1, dtype=np.int64)
    for i in range(spans.ptr[c], spans.ptr[c + 1]):
        op = spans.op[i]
        for edge in range(a.input_ptr[op], a.input_ptr[op + 1]):
            t = a.input_tensor[edge]
            earlier = a.tensor_op[t]
            if clusters.of[earlier] != c and seen[t] != stamp:
                seen[t] = stamp
                count_in[place[earlier]] += 1
                bytes_in[place[earlier]] += a.tensor_bytes[t]
        for t in range(a.output_ptr[op], a.output_ptr[op + 1]):
            for edge in range(a.consumer_ptr[t], a.consumer_ptr[t + 1]):
                later = a.consumer_op[edge]
                if clusters.of[later] != c and last[place[later]] != t:
                    last[place[later]] = t
                    count_out[place[later]] += 1
                    bytes_out[place[later]] += a.tensor_bytes[t]


@numba.njit(cache=True)
def _merge_kernel(
    problem: Problem,
    clusters: Clusters,
    spans: Spans,
    heaviest: ndarray,
    allowed: ndarray,
    device: ndarray,
    place: ndarray,
) -> None:
    n, k = len(place), problem.runs.shape[1]
    tree = np.zeros(len(spans.levels) + 1)
    for op in range(n):
        fenwick_add(tree, spans.level[op], problem.seconds[op])
    seen = np.full(len(problem.arrays.tensor_op), -1, dtype=np.int64)
    count_in, bytes_in = np.zeros(k + 1, dtype=np.int64), np.zeros(k + 1, dtype=np.int64)
    count_out, bytes_out = np.zeros(k + 1, dtype=np.int64), np.zeros(k + 1, dtype=np.int64)
    for c in heaviest:
        begin, end = spans.begin[c], spans.end[c]
        potential = fenwick_sum(tree, end) - fenwick_sum(tree, begin)
        for i in range(spans.ptr[c], spans.ptr[c + 1]):
            op = spans.op[i]
            if begin <= spans.level[op] < end:
                potential -= problem.seconds[op]
        traffic(
            problem, clusters, spans, c, place, seen, c, count_in, bytes_in, count_out, bytes_out
        )
        total, best, most = 0.0, -1, 0.0
        for d in range(k + 1):
            cost = (count_in[d] + count_out[d]) * problem.latency
            cost += (bytes_in[d] + bytes_out[d]) * problem.byte_seconds
            total += cost
            if d < k and allowed[c, d] and cost > most:
                best, most = d, cost
        if total - potential > 0 and best >= 0:
            device[c] = best
            for i in range(spans.ptr[c], spans.ptr[c + 1]):
                place[spans.op[i]] = best


@numba.njit(cache=True)
def _balance_kernel(
    problem: Problem,
    clusters: Clusters,
    spans: Spans,
    heaviest: ndarray,
    allowed: ndarray,
    device: ndarray,
    place: ndarray,
    work: ndarray,
) -> None:
    machine, k = problem.machine, problem.runs.shape[1]
    load = np.zeros(k)
    for op in range(len(place)):
        if place[op] >= 0:
            add_work(problem, spans, op, place[op], 1.0, work, load)
    seen = np.full(len(problem.arrays.tensor_op), -1, dtype=np.int64)
    count_in, bytes_in = np.zeros(k + 1, dtype=np.int64), np.zeros(k + 1, dtype=np.int64)
    count_out, bytes_out = np.zeros(k + 1, dtype=np.int64), np.zeros(k + 1, dtype=np.int64)
    for c in heaviest:
        if device[c] >= 0:
            continue
        traffic(
            problem, clusters, spans, c, place, seen, c, count_in, bytes_in, count_out, bytes_out
        )
        best, best_cost, best_comm = -1, 0.0, 0.0
        for p in range(k):
            if not allowed[c, p]:
                continue
            cost = fenwick_sum(work[p], spans.end[c]) - fenwick_sum(work[p], spans.begin[c])
            for q in range(k):
                if q != p:
                    cost += transfer_seconds(machine, q, p, count_in[q], bytes_in[q])
                    cost += transfer_seconds(machine, p, q, count_out[q], bytes_out[q])
            comm = (count_in[p] + count_out[p]) * problem.latency
            comm += (bytes_in[p] + bytes_out[p]) * problem.byte_seconds
            tie = cost == best_cost and (
                comm > best_comm or (comm == best_comm and load[p] < load[best])
            )
            if best < 0 or cost < best_cost or tie:
                best, best_cost, best_comm = p, cost, comm
        device[c] = best
        for i in range(spans.ptr[c], spans.ptr[c + 1]):
            place[spans.op[i]] = best
            add_work(problem, spans, spans.op[i], best, 1.0, work, load)


@numba.njit(cache=True)
def transfer_seconds(machine: Machine, source: int, target: int, count: int, size: int) -> float:
    """Seconds of `count` messages with `size` bytes in all."""
    if count == 0:
        return 0.0
    return count * machine.latency[source, target] + size / machine.bandwidth[source, target]


@numba.njit(cache=True)
def add_work(
    problem: Problem,
    spans: Spans,
    op: int,
    d: int,
    sign: float,
    work: ndarray,
    load: ndarray,
) -> None:
    """Add an op's seconds to the tree and the load of a device, or take them away."""
    seconds = problem.machine.seconds[problem.machine.device_class[d], op]
    if np.isfinite(seconds):
        fenwick_add(work[d], spans.level[op], sign * seconds)
        load[d] += sign * seconds
