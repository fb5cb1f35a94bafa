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
one, to a device that can run them. Above `spans.MOST_LEVELS` distinct top levels, neighbours are
counted as one, so that the trees stay in the cache.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float64, Int64
from numpy import ndarray

from pardnn.kernels.fenwick import fenwick_add, fenwick_sums
from pardnn.kernels.jit import helper, kernel
from pardnn.kernels.sorting import stable_order
from pardnn.place.pardnn.cluster_graph import Spans, spans_of
from pardnn.place.pardnn.problem import Clusters, Problem


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
    heaviest = k + stable_order(-spans.weight[k:])
    allowed = can_run(problem, clusters)
    allowed[~allowed.any(axis=1)] = True
    slowest = (problem.latency, problem.byte_seconds)
    _merge_kernel(slowest, spans, heaviest, allowed, loads_of(problem, spans, device[:0]), device)
    _balance_kernel(
        machine.device_class, machine.latency, 1 / machine.bandwidth, slowest, spans, heaviest,
        allowed, loads_of(problem, spans, device), device,
    )  # fmt: skip
    return device, spans


def loads_of(problem: Problem, spans: Spans, device: Int64[ndarray, " c"]) -> Loads:
    """Return the loads of clusters on their devices, -1 for none yet; empty ones for no devices."""
    k, machine = problem.machine.num_devices, problem.machine
    loads = Loads(
        work=np.zeros((len(spans.levels) + 1, k)),
        load=np.zeros(k),
        count=np.zeros((4, k + 1), dtype=np.int64),
        last=np.empty(k + 1, dtype=np.int64),
    )
    _load_kernel(spans, machine.device_class, device, loads)
    return loads


def can_run(problem: Problem, clusters: Clusters) -> Bool[ndarray, "c k"]:
    """Return whether a device can run every op of a cluster."""
    can = np.ones((len(clusters.head), problem.machine.num_devices), dtype=np.bool_)
    if not problem.runs.all():
        for d in range(problem.machine.num_devices):
            can[clusters.of[~problem.runs[problem.arrays.group, d]], d] = False
    return can


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


@kernel
def _load_kernel(spans: Spans, device_class: ndarray, device: ndarray, loads: Loads) -> None:
    """Fill the trees: the work of each level first, then sums, in linear time."""
    work = loads.work
    for c in range(len(device)):
        d = device[c]
        if d >= 0:
            for i in range(spans.ptr[c], spans.ptr[c + 1]):
                amount = spans.seconds[device_class[d], i]
                work[spans.level[i] + 1, d] += amount
                loads.load[d] += amount
    for at in range(1, len(work)):
        above = at + (at & -at)
        if above < len(work):
            for d in range(work.shape[1]):
                work[above, d] += work[at, d]


@helper
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


@kernel
def _merge_kernel(
    slowest: tuple[float, float],
    spans: Spans,
    heaviest: ndarray,
    allowed: ndarray,
    loads: Loads,
    device: ndarray,
) -> None:
    count, into, out = loads.count, spans.into, spans.out
    for c in heaviest:
        traffic(c, into.ptr, into.edge, out.ptr, out.edge, device, loads.last, count)
        total, best, most = 0.0, -1, 0.0
        for d in range(count.shape[1]):
            cost = (count[0, d] + count[2, d]) * slowest[0]
            cost += (count[1, d] + count[3, d]) * slowest[1]
            total += cost
            if cost > most and d < allowed.shape[1] and allowed[c, d]:
                best, most = d, cost
        if total > spans.potential[c] and best >= 0:
            device[c] = best


@kernel
def _balance_kernel(
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
    cost, into, out = np.empty(len(load)), spans.into, spans.out
    for c in heaviest:
        if device[c] >= 0:
            continue
        traffic(c, into.ptr, into.edge, out.ptr, out.edge, device, loads.last, count)
        fenwick_sums(work, spans.begin[c], spans.end[c], cost)
        add_transfers(count, latency, byte_seconds, cost)
        best, best_comm = np.int64(-1), 0.0  # as a literal, it would compile `add_work` twice
        for p in range(len(cost)):
            comm = (count[0, p] + count[2, p]) * slowest[0]
            comm += (count[1, p] + count[3, p]) * slowest[1]
            if not allowed[c, p] or (best >= 0 and cost[p] > cost[best]):
                continue
            lower = best < 0 or cost[p] < cost[best] or comm > best_comm
            if lower or (comm == best_comm and load[p] < load[best]):
                best, best_comm = p, comm
        device[c] = best
        add_work(spans, c, best, 1.0, device_class[best], loads)


@helper
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


@helper
def add_work(spans: Spans, c: int, d: int, sign: float, device_class: int, loads: Loads) -> None:
    """Add a cluster's seconds to the tree and the load of a device, or take them away."""
    for i in range(spans.ptr[c], spans.ptr[c + 1]):
        amount = sign * spans.seconds[device_class, i]
        fenwick_add(loads.work, spans.level[i], d, amount)
        loads.load[d] += amount
