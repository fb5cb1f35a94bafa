"""What the steps of ParDNN share: the problem as arrays, clusters, levels of clustered graphs.

A *group* is a set of co-located ops, most often one op alone. Groups are settled before mapping:
the path that meets a group first owns all of it, and later paths pass by.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float64, Int64
from numpy import ndarray

from pardnn.graph.csr import GraphArrays
from pardnn.kernels.jit import kernel
from pardnn.kernels.sorting import stable_order
from pardnn.place.colocation import runnable
from pardnn.place.pardnn.view_priority import Views, views_of
from pardnn.sim.flow import OTHER, Edges, Flow, flow_of
from pardnn.sim.levels import longest_paths, slowest_link, slowest_ways
from pardnn.sim.machine import Machine, fastest_seconds


class Problem(NamedTuple):
    """A graph on a machine, with what every step needs."""

    arrays: GraphArrays  # `group` holds the closed co-location groups
    machine: Machine
    flow: Flow
    seconds: Float64[ndarray, " n"]  # on the fastest device
    way: Float64[ndarray, " x"]  # seconds of each edge of `flow.later` over the slowest link
    latency: float  # of the slowest link
    byte_seconds: float  # of the slowest link
    runs: Bool[ndarray, "g k"]  # devices that can run all of a group
    member_ptr: Int64[ndarray, " g+1"]
    member: Int64[ndarray, " n"]  # ops of each group
    views: Views


class Clusters(NamedTuple):
    """Disjoint clusters: first the primaries, one per device, then the secondaries.

    A cluster is a path, with the other ops of the groups that it met first. An empty one has the
    head -1.
    """

    of: Int64[ndarray, " n"]  # cluster of each op
    head: Int64[ndarray, " c"]  # first op of the path
    tail: Int64[ndarray, " c"]  # last op of the path


def problem_of(arrays: GraphArrays, machine: Machine, flow: Flow | None = None) -> Problem:
    """Return the problem; `arrays.group` must be closed, see `place.groups.colocated`.

    Args:
        arrays: The graph.
        machine: Durations and links.
        flow: The graph's edges, if they are known.

    Raises:
        InfeasibleError: E302, if a group can run nowhere.
    """
    runs = runnable(arrays, machine)
    flow = flow or flow_of(arrays)
    latency, byte_seconds = slowest_link(machine)
    member_ptr, member = cluster_rows(arrays.group, len(runs))
    seconds = fastest_seconds(machine)
    return Problem(
        arrays=arrays,
        machine=machine,
        flow=flow,
        seconds=seconds,
        way=slowest_ways(flow.later, machine),
        latency=latency,
        byte_seconds=byte_seconds,
        runs=runs,
        member_ptr=member_ptr,
        member=member,
        views=views_of(arrays, seconds),
    )


def cluster_rows(
    of: Int64[ndarray, " n"], num_clusters: int
) -> tuple[Int64[ndarray, " p"], Int64[ndarray, " m"]]:
    """Return the ops of each cluster as compressed sparse rows; ops with a negative one are out."""
    counts = np.bincount(of + 1, minlength=num_clusters + 1)
    ptr = np.cumsum(counts) - counts[0]
    member = np.empty(int(ptr[-1]), dtype=np.int64)
    _rows_kernel(of, ptr[:-1].copy(), member)
    return ptr, member


def heaviest_first(problem: Problem, clusters: Clusters) -> Clusters:
    """Number the secondaries by decreasing work, as mapping visits them: rows are then in line."""
    k, c = problem.machine.num_devices, len(clusters.head)
    weight = np.bincount(clusters.of, weights=problem.seconds, minlength=c)
    turn = np.concatenate([np.arange(k), k + stable_order(-weight[k:])])
    number = np.empty(c, dtype=np.int64)
    number[turn] = np.arange(c)
    return Clusters(number[clusters.of], clusters.head[turn], clusters.tail[turn])


def clustered_levels(
    problem: Problem, of: Int64[ndarray, " n"]
) -> tuple[Float64[ndarray, " n"], Float64[ndarray, " n"]]:
    """Return top and bottom levels on the whole graph; edges within a cluster cost nothing.

    Args:
        problem: The problem.
        of: Cluster of each op; ops with a negative one stand alone.
    """
    flow = problem.flow
    earlier_way = slowest_ways(flow.earlier, problem.machine)
    before = _clustered_ways(flow.earlier, earlier_way, of)
    after = _clustered_ways(flow.later, problem.way, of)
    top = longest_paths(flow.order, flow.earlier, before, problem.seconds)[0]
    return top, longest_paths(flow.reverse, flow.later, after, problem.seconds)[1]


def _clustered_ways(edges: Edges, way: ndarray, of: ndarray) -> ndarray:
    mine = np.repeat(of, np.diff(edges.ptr))
    return np.where((mine >= 0) & (mine == of[edges.edge[:, OTHER]]), 0.0, way)


@kernel
def _rows_kernel(of: ndarray, at: ndarray, member: ndarray) -> None:
    for op in range(len(of)):
        if of[op] >= 0:
            member[at[of[op]]] = op
            at[of[op]] += 1
