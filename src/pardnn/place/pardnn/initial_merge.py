"""Initial merge (ParDNN, Algorithm 2, lines 1 to 7; thesis, section 4.1.1, "Mapping").

A secondary cluster whose communication exceeds its potential, `comm(sc) - potential(sc) > 0`, could
not hide its messages behind other work and would gain nothing from another device. It joins the
primary with which it communicates most. O(C log C + edges between clusters) for C clusters.

Deviations: clusters are merged heaviest first, since the thesis names no order; one that
communicates with no primary that can run it is left for level-aware balancing. A tensor is sent to
a cluster once, at the cost of the slowest link.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Int64
from numpy import ndarray

from pardnn.kernels.jit import kernel
from pardnn.place.pardnn.cluster_graph import ClusterGraph, count_transfers
from pardnn.place.pardnn.problem import Problem


def merge_into_primaries(
    problem: Problem,
    cluster_graph: ClusterGraph,
    heaviest: Int64[ndarray, " s"],
    allowed: Bool[ndarray, "c k"],
    device: Int64[ndarray, " c"],
) -> None:
    """Give the clusters whose communication exceeds their potential the device of a primary.

    Args:
        problem: The problem.
        cluster_graph: The clusters.
        heaviest: The secondaries, heaviest first.
        allowed: Whether a cluster may go to a device.
        device: Of each cluster, -1 for none yet; the primaries have theirs. Filled.
    """
    k = problem.machine.num_devices
    count, last = np.zeros((4, k + 1), dtype=np.int64), np.empty(k + 1, dtype=np.int64)
    slowest = (problem.latency, problem.byte_seconds)
    _merge_kernel(slowest, cluster_graph, heaviest, allowed, count, last, device)


@kernel
def _merge_kernel(
    slowest: tuple[float, float],
    g: ClusterGraph,
    heaviest: Int64[ndarray, " s"],
    allowed: Bool[ndarray, "c k"],
    count: Int64[ndarray, "4 q"],
    last: Int64[ndarray, " q"],
    device: Int64[ndarray, " c"],
) -> None:
    for c in heaviest:
        count_transfers(c, g.into.ptr, g.into.edge, g.out.ptr, g.out.edge, device, last, count)
        total, best, largest = 0.0, -1, 0.0
        for d in range(count.shape[1]):
            comm = (count[0, d] + count[2, d]) * slowest[0]
            comm += (count[1, d] + count[3, d]) * slowest[1]
            total += comm
            if comm > largest and d < allowed.shape[1] and allowed[c, d]:
                best, largest = d, comm
        if total > g.potential[c] and best >= 0:
            device[c] = best
