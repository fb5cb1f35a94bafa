"""Mapping (ParDNN, Algorithm 2): every cluster gets a device.

First the initial merge (`initial_merge`), then level-aware load balancing of the clusters that are
left (`level_aware_balancing`). Each primary stands for one device: the heaviest one for the fastest
device.

Reference: thesis, section 4.1.1, "Mapping".

Deviations: devices may differ, and may not be able to run every op. If no device can run all of a
cluster, its groups are mapped one by one to a device that can run them.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Int64
from numpy import ndarray

from pardnn.kernels.sorting import stable_order
from pardnn.place.colocation import next_runnable
from pardnn.place.pardnn.cluster_graph import ClusterGraph, cluster_graph_of
from pardnn.place.pardnn.initial_merge import merge_into_primaries
from pardnn.place.pardnn.level_aware_balancing import balance_by_level
from pardnn.place.pardnn.problem import Clusters, Problem


def map_clusters(problem: Problem, clusters: Clusters) -> tuple[Int64[ndarray, " c"], ClusterGraph]:
    """Return the device of each cluster, and the clusters as a graph."""
    k = problem.machine.num_devices
    cluster_graph = cluster_graph_of(problem, clusters)
    device = np.full(len(clusters.head), -1, dtype=np.int64)
    device[:k] = _devices_of_primaries(problem)
    heaviest = k + stable_order(-cluster_graph.weight[k:])
    allowed = can_run(problem, clusters)
    allowed[~allowed.any(axis=1)] = True
    merge_into_primaries(problem, cluster_graph, heaviest, allowed, device)
    balance_by_level(problem, cluster_graph, heaviest, allowed, device)
    return device, cluster_graph


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
    """Return the device of each op: that of its cluster, or the next that can run its group.

    Args:
        problem: The problem.
        clusters: The clusters.
        device: Of each cluster.
    """
    place, group = device[clusters.of], problem.arrays.group
    illegal = np.flatnonzero(~problem.runs[group, place])
    place[illegal] = next_runnable(problem.runs[group[illegal]], place[illegal])
    return place


def _devices_of_primaries(problem: Problem) -> Int64[ndarray, " k"]:
    """Heaviest primary to the fastest device, by the work that a device can do at all."""
    seconds = problem.machine.seconds
    able = np.isfinite(seconds).sum(axis=1)
    total = np.where(np.isfinite(seconds), seconds, 0.0).sum(axis=1)
    classes = problem.machine.device_class
    return np.lexsort((total[classes], -able[classes])).astype(np.int64)
