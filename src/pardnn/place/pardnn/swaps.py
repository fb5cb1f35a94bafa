"""Cluster swaps, the first refinement policy of ParDNN (thesis, section 4.1.1, "Refinement").

A secondary cluster and one on another device that lies within its span change places if the larger
of the two devices' work in the span, plus the change of communication, gets smaller. Each cluster
is swapped at most once. O(C (log C + K log V) + swaps V) for C clusters.

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
from pardnn.kernels.jit import kernel
from pardnn.kernels.sorting import stable_order
from pardnn.place.pardnn.cluster_graph import ClusterGraph, count_transfers
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
    s, work, count = len(secondaries), loads.work, loads.count
    cost, within = np.empty(work.shape[1]), np.empty(work.shape[1])
    into, out = g.into, g.out
    done = np.zeros(len(device), dtype=np.bool_)
    first = 0
    for i in range(s):
        c = secondaries[i]
        begin, end, p = g.begin[c], g.end[c], device[c]
        while first < s and g.begin[secondaries[first]] < begin:
            first += 1
        if done[c]:
            continue
        fenwick_sums(work, begin, end, within)
        tried = 0
        for j in range(first, min(s, first + SWAP_SCAN)):
            other = secondaries[j]
            if done[c] or g.begin[other] >= end or tried == SWAP_CANDIDATES:
                break
            q = device[other]
            if q == p or done[other] or g.end[other] > end:
                continue
            tried += 1
            mine, theirs = g.inside[device_class[p], c], g.inside[device_class[q], other]
            gain = max(within[p], within[q])
            gain -= max(within[p] - mine + theirs, within[q] - theirs + mine)
            if gain <= 0 or not can_run[c, q] or not can_run[other, p]:
                continue
            for moved, old, new in ((c, p, q), (other, q, p)):
                cost[:] = 0.0
                count_transfers(
                    moved, into.ptr, into.edge, out.ptr, out.edge, device, loads.last, count
                )
                add_transfers(count, latency, byte_seconds, cost)
                gain += cost[old] - cost[new]
            if gain <= 0:
                continue
            for moved, old, new in ((c, p, q), (other, q, p)):
                done[moved], device[moved] = True, new
                for sign, d in ((-1.0, old), (1.0, new)):
                    add_work(g, moved, d, sign, device_class[d], loads)
