"""What the steps of ParDNN share: the problem as arrays, clusters, levels of clustered graphs.

A *group* is a set of co-located ops, most often one op alone. Groups are settled before mapping:
the path that meets a group first owns all of it, and later paths pass by.
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np
from jaxtyping import Bool, Float64, Int64
from numpy import ndarray

from pardnn.graph.csr import GraphArrays
from pardnn.place.baseline import runnable
from pardnn.sim.levels import slowest_link
from pardnn.sim.machine import Machine, fastest_seconds


class Problem(NamedTuple):
    """A graph on a machine, with what every step needs."""

    arrays: GraphArrays  # `group` holds the closed co-location groups
    machine: Machine
    seconds: Float64[ndarray, " n"]  # on the fastest device
    latency: float  # of the slowest link
    byte_seconds: float  # of the slowest link
    runs: Bool[ndarray, "g k"]  # devices that can run all of a group
    member_ptr: Int64[ndarray, " g+1"]
    member: Int64[ndarray, " n"]  # ops of each group


class Clusters(NamedTuple):
    """Disjoint clusters: first the primaries, one per device, then the secondaries.

    A cluster is a path, with the other ops of the groups that it met first. An empty one has the
    head -1.
    """

    of: Int64[ndarray, " n"]  # cluster of each op
    head: Int64[ndarray, " c"]  # first op of the path
    tail: Int64[ndarray, " c"]  # last op of the path


def problem_of(arrays: GraphArrays, machine: Machine) -> Problem:
    """Return the problem; `arrays.group` must be closed, see `place.groups.colocated`.

    Raises:
        InfeasibleError: E302, if a group can run nowhere.
    """
    runs = runnable(arrays, machine)
    counts = np.bincount(arrays.group, minlength=len(runs))
    latency, byte_seconds = slowest_link(machine)
    return Problem(
        arrays=arrays,
        machine=machine,
        seconds=fastest_seconds(machine),
        latency=latency,
        byte_seconds=byte_seconds,
        runs=runs,
        member_ptr=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        member=np.argsort(arrays.group, kind="stable").astype(np.int64),
    )


def cluster_rows(
    of: Int64[ndarray, " n"], num_clusters: int
) -> tuple[Int64[ndarray, " p"], Int64[ndarray, " m"]]:
    """Return the ops of each cluster as compressed sparse rows; ops with a negative one are out."""
    inside = np.flatnonzero(of >= 0)
    counts = np.bincount(of[inside], minlength=num_clusters)
    ptr = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    return ptr, inside[np.argsort(of[inside], kind="stable")].astype(np.int64)


def clustered_levels(
    problem: Problem, of: Int64[ndarray, " n"]
) -> tuple[Float64[ndarray, " n"], Float64[ndarray, " n"]]:
    """Return top and bottom levels on the whole graph; edges within a cluster cost nothing.

    Args:
        problem: The problem.
        of: Cluster of each op; ops with a negative one stand alone.
    """
    top, bottom = np.zeros(len(of)), np.zeros(len(of))
    levels_kernel(problem, of, np.zeros(len(of), dtype=np.bool_), top, bottom)
    return top, bottom


@numba.njit(cache=True)
def levels_kernel(
    problem: Problem, of: ndarray, peeled: ndarray, top: ndarray, bottom: ndarray
) -> None:
    """Fill the levels of the ops that are not peeled, on the graph without the peeled ones."""
    a, seconds = problem.arrays, problem.seconds
    for i in range(len(of)):
        op = a.topological[i]
        if peeled[op]:
            continue
        longest = 0.0
        for edge in range(a.input_ptr[op], a.input_ptr[op + 1]):
            t = a.input_tensor[edge]
            earlier = a.tensor_op[t]
            if peeled[earlier]:
                continue
            path = top[earlier] + seconds[earlier]
            if of[op] < 0 or of[op] != of[earlier]:
                path += problem.latency + a.tensor_bytes[t] * problem.byte_seconds
            longest = max(longest, path)
        for edge in range(a.after_ptr[op], a.after_ptr[op + 1]):
            earlier = a.after_op[edge]
            if not peeled[earlier]:
                longest = max(longest, top[earlier] + seconds[earlier])
        top[op] = longest
    for i in range(len(of) - 1, -1, -1):
        op = a.topological[i]
        if peeled[op]:
            continue
        longest = 0.0
        for t in range(a.output_ptr[op], a.output_ptr[op + 1]):
            cost = problem.latency + a.tensor_bytes[t] * problem.byte_seconds
            for edge in range(a.consumer_ptr[t], a.consumer_ptr[t + 1]):
                later = a.consumer_op[edge]
                if not peeled[later]:
                    apart = of[op] < 0 or of[op] != of[later]
                    longest = max(longest, bottom[later] + (cost if apart else 0.0))
        for edge in range(a.before_ptr[op], a.before_ptr[op + 1]):
            later = a.before_op[edge]
            if not peeled[later]:
                longest = max(longest, bottom[later])
        bottom[op] = longest + seconds[op]
