"""Cluster swaps, the first refinement policy of ParDNN (thesis, section 4.1.1, "Refinement").

A secondary cluster and one on another device within its span change places if that reduces the
larger of the two devices' work in the span, or communication, or both: the sum of the two gains, in
seconds, has to be positive. Of the partners tried, the one with the largest gain is taken. Each
cluster is swapped at most once. O(C (log C + K log V) + swaps V) for C clusters.

Deviations: a cluster tries the `SWAP_CANDIDATES` nearest partners, among the `SWAP_SCAN` clusters
that start next.
"""

# Kernels: an element of an array is a number, which pyright cannot see.
# pyright: reportArgumentType=false, reportReturnType=false

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Float64, Int64
from numpy import ndarray

from pardnn.kernels.fenwick import fenwick_sums
from pardnn.kernels.jit import helper, kernel
from pardnn.kernels.sorting import stable_order
from pardnn.place.pardnn.cluster_graph import ROUNDING, ClusterGraph, count_transfers
from pardnn.place.pardnn.level_aware_balancing import Loads, add_transfers, add_work, loads_of
from pardnn.place.pardnn.mapping import can_run
from pardnn.place.pardnn.problem import Clusters, Problem

#: Partners tried per cluster. More than this many clusters that start within one span are alike.
SWAP_CANDIDATES = 8
#: Clusters looked at for partners: where all are on one device, there are none to be found.
SWAP_SCAN = 256


def swap_clusters(
    problem: Problem,
    clusters: Clusters,
    cluster_graph: ClusterGraph,
    device: Int64[ndarray, " c"],
) -> Int64[ndarray, " c"]:
    """Return the devices of the clusters after the swaps.

    Args:
        problem: The problem.
        clusters: The clusters, primaries first.
        cluster_graph: The clusters as a graph.
        device: Of each cluster.
    """
    k, machine = problem.machine.num_devices, problem.machine
    device = device.copy()
    secondaries = k + stable_order(cluster_graph.begin[k:].astype(np.float64))
    _swap_kernel(
        machine.device_class, machine.latency, 1 / machine.bandwidth, cluster_graph, secondaries,
        can_run(problem, clusters), loads_of(problem, cluster_graph, device), device,
    )  # fmt: skip
    return device


@kernel
def _swap_kernel(
    device_class: Int64[ndarray, " k"],
    latency: Float64[ndarray, "k k"],
    byte_seconds: Float64[ndarray, "k k"],
    g: ClusterGraph,
    secondaries: Int64[ndarray, " s"],
    can_run: Bool[ndarray, "c k"],
    loads: Loads,
    device: Int64[ndarray, " c"],
) -> None:
    s, work = len(secondaries), loads.work
    mine, theirs, within = np.empty((3, work.shape[1]))
    done = np.zeros(len(device), dtype=np.bool_)
    first = 0
    for i in range(s):
        c = secondaries[i]
        begin, end, p = g.begin[c], g.end[c], device[c]
        while g.begin[secondaries[first]] < begin:  # c ends it
            first += 1
        if done[c]:
            continue
        tried, partner, largest = 0, -1, 0.0
        for j in range(first, min(s, first + SWAP_SCAN)):
            other = secondaries[j]
            if g.begin[other] >= end or tried == SWAP_CANDIDATES:
                break
            q = device[other]
            if q == p or done[other] or g.end[other] > end:
                continue
            if tried == 0:
                fenwick_sums(work, begin, end, within)
                _communication(g, c, device, latency, byte_seconds, loads, mine)
            tried += 1
            if not can_run[c, q] or not can_run[other, p]:
                continue
            here, there = g.inside[device_class[p]], g.inside[device_class[q]]
            gain = max(within[p], within[q]) - max(
                within[p] - here[c] + here[other], within[q] - there[other] + there[c]
            )
            # One after the other: what the two say to each other crosses devices after it, too.
            device[c] = q
            _communication(g, other, device, latency, byte_seconds, loads, theirs)
            device[c] = p
            gain += mine[p] - mine[q] + theirs[q] - theirs[p]
            if gain > largest * (1 + ROUNDING) + ROUNDING * within[p]:
                partner, largest = other, gain
        if partner >= 0:
            q = device[partner]
            for moved, old, new in ((c, p, q), (partner, q, p)):
                done[moved], device[moved] = True, new
                for sign, d in ((-1.0, old), (1.0, new)):
                    add_work(g, moved, d, sign, device_class[d], loads)


@helper
def _communication(
    g: ClusterGraph,
    c: int,
    device: Int64[ndarray, " c"],
    latency: Float64[ndarray, "k k"],
    byte_seconds: Float64[ndarray, "k k"],
    loads: Loads,
    cost: Float64[ndarray, " k"],
) -> None:
    """Fill the seconds that a cluster would communicate from each device."""
    cost[:] = 0.0
    count_transfers(
        c, g.into.ptr, g.into.edge, g.out.ptr, g.out.edge, device, loads.last, loads.count
    )
    add_transfers(loads.count, latency, byte_seconds, cost)
