"""Mapping of clusters to devices (ParDNN, Alg. 2): initial merge, then level-aware balancing.

*Initial merge*: a secondary whose communication is more than the work that could hide it (its
*potential*, the work of others that may run within its span) gains nothing from a device of its own
and joins the primary that it communicates with most.

*LALB* (Eq. 4.2): the others, heaviest first, each go to the device with the least sum of work
already there within the cluster's span and communication with the other devices. Work by level is
kept in one Fenwick tree per device over the top levels. O(V log V + S (K log V + K D)) for S
secondaries that communicate with D devices each.

Reference: thesis, section 4.1.1.

Deviations: clusters are merged heaviest first; a tensor is counted once, however many ops of the
cluster read it; communication costs what the link of the two devices costs; a device that cannot
run all of a cluster is not chosen while another can. Where none can, its groups are sent, one by
one, to a device that can run them. Above `MOST_LEVELS` distinct top levels, neighbours are counted
as one, so that the trees stay in the cache.
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np
from jaxtyping import Bool, Float64, Int64
from numpy import ndarray

from pardnn.place.pardnn.clusters import Clusters, Problem, cluster_rows, clustered_levels
from pardnn.place.pardnn.fenwick import fenwick_add, fenwick_sums
from pardnn.sim.flow import Edges

#: Distinct top levels that are told apart, and bins where there are more: the trees of 16 devices
#: then take 512 KiB.
MOST_LEVELS, LEVEL_BINS = 1 << 14, 1 << 12


class Spans(NamedTuple):
    """Clusters as nodes: when they could run, by the levels of the clustered graph, and edges.

    Attributes:
        level: Rank of each op's top level among `levels`.
        levels: The distinct top levels, in seconds, or where their bins begin.
        begin: First level of a cluster's span.
        end: After its last level.
        weight: Seconds of work.
        inside: Seconds per device class within the span; 0 for what a class cannot run.
        ptr: Where the ops of a cluster begin in `op`.
        op: Ops, cluster by cluster.
        into: What a cluster reads from others, each tensor once: other cluster, tensor, bytes.
        out: What others read of it, in the order of its tensors.
    """

    level: Int64[ndarray, " n"]
    levels: Float64[ndarray, " l"]
    begin: Int64[ndarray, " c"]
    end: Int64[ndarray, " c"]
    weight: Float64[ndarray, " c"]
    inside: Float64[ndarray, "f c"]
    ptr: Int64[ndarray, " c+1"]
    op: Int64[ndarray, " n"]
    into: Edges
    out: Edges


class Loads(NamedTuple):
    """Scratch for what devices do and send.

    Attributes:
        work: Fenwick trees of each device's seconds by level.
        load: Seconds of each device in all.
        count: For each device, and for none: transfers into a cluster, their bytes, transfers out
            of it, their bytes.
        last: A tensor for each device, and for none.
    """

    work: Float64[ndarray, "l+1 k"]
    load: Float64[ndarray, " k"]
    count: Int64[ndarray, "4 k+1"]
    last: Int64[ndarray, " k+1"]


def map_clusters(problem: Problem, clusters: Clusters) -> tuple[Int64[ndarray, " c"], Spans]:
    """Return the device of each cluster, and the spans by which they were chosen."""
    k, machine = problem.machine.num_devices, problem.machine
    spans = spans_of(problem, clusters)
    device = np.full(len(clusters.head), -1, dtype=np.int64)
    device[:k] = _devices_of_primaries(problem)
    heaviest = k + np.argsort(-spans.weight[k:], kind="stable")
    allowed = can_run(problem, clusters)
    allowed[~allowed.any(axis=1)] = True
    slowest = (problem.latency, problem.byte_seconds)
    _merge_kernel(
        problem.seconds, slowest, spans, heaviest, allowed, loads_of(problem, spans, 1), device
    )
    _balance_kernel(
        able_seconds(problem), machine.device_class, machine.latency, 1 / machine.bandwidth,
        slowest, spans, heaviest, allowed, loads_of(problem, spans, k), device,
    )  # fmt: skip
    return device, spans


def loads_of(problem: Problem, spans: Spans, columns: int) -> Loads:
    """Return empty loads, with one tree per column."""
    k = problem.machine.num_devices
    return Loads(
        work=np.zeros((len(spans.levels) + 1, columns)),
        load=np.zeros(columns),
        count=np.zeros((4, k + 1), dtype=np.int64),
        last=np.empty(k + 1, dtype=np.int64),
    )


def able_seconds(problem: Problem) -> Float64[ndarray, "f n"]:
    """Return seconds per device class, 0 for what it cannot run."""
    seconds = problem.machine.seconds
    return np.where(np.isfinite(seconds), seconds, 0.0)


def can_run(problem: Problem, clusters: Clusters) -> Bool[ndarray, "c k"]:
    """Return whether a device can run every op of a cluster."""
    can = np.ones((len(clusters.head), problem.machine.num_devices), dtype=np.bool_)
    if not problem.runs.all():
        for d in range(problem.machine.num_devices):
            can[clusters.of[~problem.runs[problem.arrays.group, d]], d] = False
    return can


def spans_of(problem: Problem, clusters: Clusters) -> Spans:
    """Return the clusters as nodes. O((V + E) + V log V)."""
    c = len(clusters.head)
    ptr, op = cluster_rows(clusters.of, c)
    top, bottom = clustered_levels(problem, clusters.of)
    levels = np.unique(top)
    start, end = np.zeros(c), np.full(c, float((top + bottom).max()))
    flow, of = problem.flow, clusters.of
    _span_kernel(
        flow.earlier.ptr, flow.earlier.edge, flow.later.ptr, flow.later.edge, problem.seconds,
        clusters.head, clusters.tail, top, start, end,
    )  # fmt: skip
    begins = np.searchsorted(levels, start)
    if len(levels) > MOST_LEVELS:
        levels = levels[np.arange(LEVEL_BINS) * len(levels) // LEVEL_BINS]
        begins = np.searchsorted(levels, start, side="right") - 1  # the bin that it lies in
    level = np.searchsorted(levels, top, side="right") - 1
    ends = np.searchsorted(levels, end)
    within = (begins[of] <= level) & (level < ends[of])
    inside = [
        np.bincount(of, weights=np.where(within, row, 0.0), minlength=c)
        for row in able_seconds(problem)
    ]
    into, out = np.empty_like(flow.earlier.edge), np.empty_like(flow.later.edge)
    into_ptr, out_ptr = np.zeros(c + 1, dtype=np.int64), np.zeros(c + 1, dtype=np.int64)
    seen = np.full(problem.arrays.num_tensors, -1, dtype=np.int64)
    _contract_kernel(flow.earlier.ptr, flow.earlier.edge, of, ptr, op, seen, into_ptr, into)
    _contract_kernel(flow.later.ptr, flow.later.edge, of, ptr, op, seen[:0], out_ptr, out)
    return Spans(
        level=level.astype(np.int64),
        levels=levels,
        begin=begins.astype(np.int64),
        end=ends.astype(np.int64),
        weight=np.bincount(of, weights=problem.seconds, minlength=c),
        inside=np.array(inside),
        ptr=ptr,
        op=op,
        into=Edges(into_ptr, into),
        out=Edges(out_ptr, out),
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


@numba.njit(cache=True)
def _span_kernel(
    earlier_ptr: ndarray,
    earlier: ndarray,
    later_ptr: ndarray,
    later: ndarray,
    seconds: ndarray,
    head: ndarray,
    tail: ndarray,
    top: ndarray,
    start: ndarray,
    end: ndarray,
) -> None:
    """Raise starts from 0 and lower ends from the makespan."""
    for c in range(len(start)):
        if head[c] < 0:
            end[c] = 0.0
            continue
        for e in range(earlier_ptr[head[c]], earlier_ptr[head[c] + 1]):
            start[c] = max(start[c], top[earlier[e, 0]] + seconds[earlier[e, 0]])
        for e in range(later_ptr[tail[c]], later_ptr[tail[c] + 1]):
            end[c] = min(end[c], top[later[e, 0]])
        end[c] = max(end[c], start[c])


@numba.njit(cache=True)
def _contract_kernel(
    ptr: ndarray,
    edge: ndarray,
    of: ndarray,
    member_ptr: ndarray,
    member: ndarray,
    seen: ndarray,
    cluster_ptr: ndarray,
    row: ndarray,
) -> None:
    """Fill the edges between clusters that carry tensors; with `seen`, each tensor once."""
    count = 0
    for c in range(len(cluster_ptr) - 1):
        for i in range(member_ptr[c], member_ptr[c + 1]):
            for e in range(ptr[member[i]], ptr[member[i] + 1]):
                other, t = of[edge[e, 0]], edge[e, 1]
                if t < 0 or other == c or (len(seen) > 0 and seen[t] == c):
                    continue
                if len(seen) > 0:
                    seen[t] = c
                row[count, 0], row[count, 1], row[count, 2] = other, t, edge[e, 2]
                count += 1
        cluster_ptr[c + 1] = count


@numba.njit(cache=True)
def traffic(
    c: int,
    into_ptr: Int64[ndarray, " p"],
    into: Int64[ndarray, "x 3"],
    out_ptr: Int64[ndarray, " p"],
    out: Int64[ndarray, "y 3"],
    device: Int64[ndarray, " c"],
    last: Int64[ndarray, " q"],
    count: Int64[ndarray, "4 q"],
) -> None:
    """Count the transfers between a cluster and each device.

    Args:
        c: The cluster.
        into_ptr: Its edges, see `Spans`.
        into: The same.
        out_ptr: The same.
        out: The same.
        device: Of each cluster, -1 where there is none yet; those count for device K.
        last: Scratch.
        count: Filled, see `Loads`.
    """
    count[:, :] = 0
    for e in range(into_ptr[c], into_ptr[c + 1]):
        d = device[into[e, 0]]
        count[0, d] += 1
        count[1, d] += into[e, 2]
    last[:] = -1
    for e in range(out_ptr[c], out_ptr[c + 1]):
        d = device[out[e, 0]]
        if last[d] != out[e, 1]:
            last[d] = out[e, 1]
            count[2, d] += 1
            count[3, d] += out[e, 2]


@numba.njit(cache=True)
def _merge_kernel(
    seconds: ndarray,
    slowest: tuple[float, float],
    spans: Spans,
    heaviest: ndarray,
    allowed: ndarray,
    loads: Loads,
    device: ndarray,
) -> None:
    count, potential = loads.count, np.zeros(1)
    for op in range(len(seconds)):
        fenwick_add(loads.work, spans.level[op], 0, seconds[op])
    into, out = spans.into, spans.out
    for c in heaviest:
        fenwick_sums(loads.work, spans.begin[c], spans.end[c], potential)
        for i in range(spans.ptr[c], spans.ptr[c + 1]):
            if spans.begin[c] <= spans.level[spans.op[i]] < spans.end[c]:
                potential[0] -= seconds[spans.op[i]]
        traffic(c, into.ptr, into.edge, out.ptr, out.edge, device, loads.last, count)
        total, best, most = 0.0, -1, 0.0
        for d in range(count.shape[1]):
            cost = (count[0, d] + count[2, d]) * slowest[0]
            cost += (count[1, d] + count[3, d]) * slowest[1]
            total += cost
            if cost > most and d < allowed.shape[1] and allowed[c, d]:
                best, most = d, cost
        if total > potential[0] and best >= 0:
            device[c] = best


@numba.njit(cache=True)
def _balance_kernel(
    seconds: ndarray,
    device_class: ndarray,
    latency: ndarray,
    byte_seconds: ndarray,
    slowest: tuple[float, float],
    spans: Spans,
    heaviest: ndarray,
    allowed: ndarray,
    loads: Loads,
    device: ndarray,
) -> None:
    work, load, count = loads.work, loads.load, loads.count
    cost = np.empty(len(load))
    for c in range(len(device)):
        if device[c] >= 0:
            add_work(
                c, device[c], 1.0, spans.ptr, spans.op, spans.level, seconds, device_class, work,
                load,
            )  # fmt: skip
    into, out = spans.into, spans.out
    for c in heaviest:
        if device[c] >= 0:
            continue
        traffic(c, into.ptr, into.edge, out.ptr, out.edge, device, loads.last, count)
        fenwick_sums(work, spans.begin[c], spans.end[c], cost)
        add_transfers(count, latency, byte_seconds, cost)
        best, best_comm = -1, 0.0
        for p in range(len(cost)):
            comm = (count[0, p] + count[2, p]) * slowest[0]
            comm += (count[1, p] + count[3, p]) * slowest[1]
            if not allowed[c, p] or (best >= 0 and cost[p] > cost[best]):
                continue
            lower = best < 0 or cost[p] < cost[best] or comm > best_comm
            if lower or (comm == best_comm and load[p] < load[best]):
                best, best_comm = p, comm
        device[c] = best
        add_work(c, best, 1.0, spans.ptr, spans.op, spans.level, seconds, device_class, work, load)


@numba.njit(cache=True)
def add_transfers(
    count: Int64[ndarray, "4 q"],
    latency: Float64[ndarray, "k k"],
    byte_seconds: Float64[ndarray, "k k"],
    cost: Float64[ndarray, " k"],
) -> None:
    """Add to each device's cost what the transfers take if the cluster is there."""
    for q in range(len(cost)):
        if count[0, q] > 0:
            for p in range(len(cost)):
                if p != q:
                    cost[p] += count[0, q] * latency[q, p] + count[1, q] * byte_seconds[q, p]
        if count[2, q] > 0:
            for p in range(len(cost)):
                if p != q:
                    cost[p] += count[2, q] * latency[p, q] + count[3, q] * byte_seconds[p, q]


@numba.njit(cache=True)
def add_work(
    c: int,
    d: int,
    sign: float,
    ptr: Int64[ndarray, " p"],
    op: Int64[ndarray, " n"],
    level: Int64[ndarray, " n"],
    seconds: Float64[ndarray, "f n"],
    device_class: Int64[ndarray, " k"],
    work: Float64[ndarray, "m k"],
    load: Float64[ndarray, " k"],
) -> None:
    """Add a cluster's seconds to the tree and the load of a device, or take them away."""
    for i in range(ptr[c], ptr[c + 1]):
        amount = sign * seconds[device_class[d], op[i]]
        fenwick_add(work, level[op[i]], d, amount)
        load[d] += amount
