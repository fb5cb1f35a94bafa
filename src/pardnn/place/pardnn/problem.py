"""The problem as arrays, clusters of ops, and levels of the clustered graph: used by every step.

A *group* is a set of co-located ops, most often one op alone. Groups are assigned to clusters
before mapping: the first path that meets a group takes all of it, and later paths skip it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float64, Int64
from numpy import ndarray

from pardnn.graph.csr import GraphArrays
from pardnn.kernels.jit import kernel
from pardnn.kernels.sorting import inverse_permutation, stable_order
from pardnn.place.colocation import runnable
from pardnn.place.pardnn.view_priority import Views, views_of
from pardnn.sim.adjacency import OTHER, Adjacency, Edges, adjacency_of
from pardnn.sim.levels import longest_paths, slowest_comm, slowest_link
from pardnn.sim.machine import Machine, fastest_seconds


class Problem(NamedTuple):
    """A graph on a machine.

    Attributes:
        arrays: The graph; `group` holds the closed co-location groups.
        machine: Durations and links.
        adjacency: The graph's edges.
        seconds: Of each op on the fastest device.
        comm: Seconds of each edge of `adjacency.successors` over the slowest link.
        latency: Of the slowest link.
        byte_seconds: Seconds per byte of the slowest link.
        runs: Whether a device can run all of a group.
        member_ptr: Ops of group g are `member[member_ptr[g]:member_ptr[g + 1]]`.
        member: The ops.
        views: Ops that only view a tensor.
        fixed: Device of each group that holds state in place, -1 for the others.
    """

    arrays: GraphArrays
    machine: Machine
    adjacency: Adjacency
    seconds: Float64[ndarray, " n"]
    comm: Float64[ndarray, " x"]
    latency: float
    byte_seconds: float
    runs: Bool[ndarray, "g k"]
    member_ptr: Int64[ndarray, " g+1"]
    member: Int64[ndarray, " n"]
    views: Views
    fixed: Int64[ndarray, " g"]


class Clusters(NamedTuple):
    """Disjoint clusters: first the primaries, one per device, then the secondaries.

    A cluster is a path, with the other ops of the groups that it met first.

    Attributes:
        of: Cluster of each op.
        head: First op of each path; -1 for an empty cluster.
        tail: Last op of each path; -1 for an empty cluster.
    """

    of: Int64[ndarray, " n"]
    head: Int64[ndarray, " c"]
    tail: Int64[ndarray, " c"]


def problem_of(
    arrays: GraphArrays,
    machine: Machine,
    adjacency: Adjacency | None = None,
    pins: Int64[ndarray, " n"] | None = None,
) -> Problem:
    """Return the problem; `arrays.group` must be closed, see `place.colocation.colocated`.

    Args:
        arrays: The graph.
        machine: Durations and links.
        adjacency: The graph's edges, if they are known.
        pins: The device of each op that its state ties to one; -1 for the others. None: no op is
            pinned.

    Raises:
        InfeasibleError: E302, if a group can run nowhere.
    """
    runs = runnable(arrays, machine)
    adjacency = adjacency or adjacency_of(arrays)
    latency, byte_seconds = slowest_link(machine)
    member_ptr, member = cluster_rows(arrays.group, len(runs))
    seconds = fastest_seconds(machine)
    fixed = np.full(len(runs), -1, dtype=np.int64)
    if pins is not None:
        fixed[arrays.group[pins >= 0]] = pins[pins >= 0]
    return Problem(
        arrays=arrays,
        machine=machine,
        adjacency=adjacency,
        seconds=seconds,
        comm=slowest_comm(adjacency.successors, machine),
        latency=latency,
        byte_seconds=byte_seconds,
        runs=runs,
        member_ptr=member_ptr,
        member=member,
        views=views_of(arrays, seconds),
        fixed=fixed,
    )


def cluster_rows(
    of: Int64[ndarray, " n"], num_clusters: int
) -> tuple[Int64[ndarray, " p"], Int64[ndarray, " m"]]:
    """Return the ops of each cluster as compressed sparse rows; negative clusters are left out."""
    counts = np.bincount(of + 1, minlength=num_clusters + 1)
    ptr = np.cumsum(counts) - counts[0]
    member = np.empty(int(ptr[-1]), dtype=np.int64)
    _rows_kernel(of, ptr[:-1].copy(), member)
    return ptr, member


def heaviest_first(problem: Problem, clusters: Clusters) -> Clusters:
    """Number the secondaries by decreasing work, in the order in which mapping reads their rows."""
    k, c = problem.machine.num_devices, len(clusters.head)
    weight = np.bincount(clusters.of, weights=problem.seconds, minlength=c)
    turn = np.concatenate([np.arange(k), k + stable_order(-weight[k:])])
    number = inverse_permutation(turn)
    return Clusters(number[clusters.of], clusters.head[turn], clusters.tail[turn])


def clustered_levels(
    problem: Problem, of: Int64[ndarray, " n"]
) -> tuple[Float64[ndarray, " n"], Float64[ndarray, " n"]]:
    """Return top and bottom levels on the whole graph; edges within a cluster cost nothing.

    Args:
        problem: The problem.
        of: Cluster of each op; ops with a negative one stand alone.
    """
    adjacency = problem.adjacency
    predecessor_comm = slowest_comm(adjacency.predecessors, problem.machine)
    before = _clustered_comm(adjacency.predecessors, predecessor_comm, of)
    after = _clustered_comm(adjacency.successors, problem.comm, of)
    top = longest_paths(adjacency.order, adjacency.predecessors, before, problem.seconds)[0]
    return top, longest_paths(adjacency.reverse, adjacency.successors, after, problem.seconds)[1]


def _clustered_comm(
    edges: Edges, comm: Float64[ndarray, " x"], of: Int64[ndarray, " n"]
) -> Float64[ndarray, " x"]:
    own = np.repeat(of, np.diff(edges.ptr))
    return np.where((own >= 0) & (own == of[edges.edge[:, OTHER]]), 0.0, comm)


@kernel
def _rows_kernel(
    of: Int64[ndarray, " n"], at: Int64[ndarray, " c"], member: Int64[ndarray, " m"]
) -> None:
    for op in range(len(of)):
        if of[op] >= 0:
            member[at[of[op]]] = op
            at[of[op]] += 1
