"""Clusters as nodes of a graph: their time windows, their potentials, the transfers between them.

`span(sc)` is the window in which a cluster could run, and `potential(sc)` the work of other
clusters that could run at the same time (thesis, Table 4.2). Both come from the levels of the
clustered graph, in which an edge within a cluster costs nothing. Edges between clusters are stored
row by row, so that mapping and swaps read a few neighbouring rows per cluster.
O((ops + edges) + ops log levels).

Deviations: a tensor is counted once per cluster, however many of its ops read it. Above
`MAX_LEVELS` distinct top levels, neighbours are counted as one, so that the Fenwick trees over
them stay in the cache.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float64, Int64
from numpy import ndarray

from pardnn.kernels.jit import helper, kernel
from pardnn.place.pardnn.problem import Clusters, Problem, cluster_rows, clustered_levels
from pardnn.sim.adjacency import Edges

#: Most distinct top levels that are kept apart, and bins if there are more: the trees of 16
#: devices then take 512 KiB.
MAX_LEVELS, LEVEL_BINS = 1 << 14, 1 << 12
#: Of the whole work: differences of sums below it are nothing.
ROUNDING = 1e-12


class ClusterGraph(NamedTuple):
    """Clusters, their time windows and the tensors that cross between them.

    Attributes:
        levels: The distinct top levels, in seconds, or where their bins begin.
        begin: First level of a cluster's span.
        end: The level after its span.
        weight: Seconds of work.
        potential: Seconds of work of other clusters that may run within the span.
        inside: Seconds per device class within the span; 0 for what a class cannot run.
        ptr: Where the ops of a cluster begin in `level` and `seconds`.
        level: Index of each op's top level among `levels`, cluster by cluster.
        seconds: Seconds of each op per device class, in the same order; 0 where it cannot run.
        into: What a cluster reads from others, each tensor once: other cluster, tensor, bytes.
        out: What others read of it, each tensor once per cluster, in the order of the tensors.
    """

    levels: Float64[ndarray, " l"]
    begin: Int64[ndarray, " c"]
    end: Int64[ndarray, " c"]
    weight: Float64[ndarray, " c"]
    potential: Float64[ndarray, " c"]
    inside: Float64[ndarray, "f c"]
    ptr: Int64[ndarray, " c+1"]
    level: Int64[ndarray, " n"]
    seconds: Float64[ndarray, "f n"]
    into: Edges
    out: Edges


def cluster_graph_of(problem: Problem, clusters: Clusters) -> ClusterGraph:
    """Return the clusters as nodes of a graph."""
    c = len(clusters.head)
    ptr, op = cluster_rows(clusters.of, c)
    top, bottom = clustered_levels(problem, clusters.of)
    levels = np.unique(top)
    start, end = np.zeros(c), np.full(c, float((top + bottom).max()))
    predecessors, successors = problem.adjacency.predecessors, problem.adjacency.successors
    _span_kernel(
        predecessors.ptr, predecessors.edge, successors.ptr, successors.edge, problem.seconds,
        clusters.head, clusters.tail, top, start, end,
    )  # fmt: skip
    if len(levels) > MAX_LEVELS:
        levels = levels[np.arange(LEVEL_BINS) * len(levels) // LEVEL_BINS]
        begin = np.searchsorted(levels, start, side="right") - 1  # the bin that it lies in
    else:
        begin = np.searchsorted(levels, start)
    level = (np.searchsorted(levels, top, side="right") - 1)[op]
    end = np.searchsorted(levels, end)
    cluster = np.repeat(np.arange(c), np.diff(ptr))
    within = (begin[cluster] <= level) & (level < end[cluster])
    rows = np.where(np.isfinite(problem.machine.seconds), problem.machine.seconds, 0.0)
    # Row by row in memory, which an index would not keep: else kernels are compiled once more.
    rows = np.take(rows, op, axis=1)
    fastest = problem.seconds[op]
    work = np.bincount(level, weights=fastest, minlength=len(levels))
    until = np.concatenate([[0.0], np.cumsum(work)])
    others = until[end] - until[begin] - _work_within(cluster, within, fastest, c)
    into, out = _edges_between(problem, clusters.of, c)
    return ClusterGraph(
        levels=levels,
        begin=begin.astype(np.int64),
        end=end.astype(np.int64),
        weight=np.bincount(cluster, weights=fastest, minlength=c),
        potential=np.where(others > ROUNDING * until[-1], others, 0.0),
        inside=np.array([_work_within(cluster, within, row, c) for row in rows]),
        ptr=ptr,
        level=level.astype(np.int64),
        seconds=rows,
        into=into,
        out=out,
    )


def _work_within(
    cluster: Int64[ndarray, " n"],
    within: Bool[ndarray, " n"],
    seconds: Float64[ndarray, " n"],
    num_clusters: int,
) -> Float64[ndarray, " c"]:
    """Return the seconds of each cluster's ops that lie within its span."""
    return np.bincount(cluster, weights=np.where(within, seconds, 0.0), minlength=num_clusters)


def _edges_between(
    problem: Problem, of: Int64[ndarray, " n"], num_clusters: int
) -> tuple[Edges, Edges]:
    """Return the edges that carry tensors into and out of each cluster, each tensor once."""
    a = problem.arrays
    graph = (a.consumer_ptr, a.consumer_op, a.tensor_op, a.tensor_bytes, of)
    ends = np.zeros((2, num_clusters + 1), dtype=np.int64)
    none = np.empty((0, 3), dtype=np.int64)
    _contract_kernel(*graph, np.full(num_clusters, -1), ends[:, 1:], none, none)
    np.cumsum(ends, axis=1, out=ends)
    into = np.empty((int(ends[0, -1]), 3), dtype=np.int64)
    out = np.empty_like(into)
    at = np.zeros((2, num_clusters + 1), dtype=np.int64)
    at[:, 1:] = ends[:, :-1]
    _contract_kernel(*graph, np.full(num_clusters, -1), at[:, 1:], into, out)
    return Edges(ends[0], into), Edges(ends[1], out)


@helper
def count_transfers(
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
        into_ptr: Of `ClusterGraph.into`.
        into: Of `ClusterGraph.into`.
        out_ptr: Of `ClusterGraph.out`.
        out: Of `ClusterGraph.out`.
        device: Of each cluster, -1 where there is none yet; those count for device K.
        last: Scratch: a tensor for each device, and for none.
        count: Filled. For each device, and for none: transfers into the cluster, their bytes,
            transfers out of it, their bytes.
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
def _span_kernel(
    predecessor_ptr: Int64[ndarray, " p"],
    predecessor: Int64[ndarray, "x 3"],
    successor_ptr: Int64[ndarray, " p"],
    successor: Int64[ndarray, "x 3"],
    seconds: Float64[ndarray, " n"],
    head: Int64[ndarray, " c"],
    tail: Int64[ndarray, " c"],
    top: Float64[ndarray, " n"],
    start: Float64[ndarray, " c"],
    end: Float64[ndarray, " c"],
) -> None:
    """Raise the starts of spans from 0 and lower their ends from the makespan."""
    for c in range(len(start)):
        if head[c] < 0:
            end[c] = 0.0
            continue
        for e in range(predecessor_ptr[head[c]], predecessor_ptr[head[c] + 1]):
            start[c] = max(start[c], top[predecessor[e, 0]] + seconds[predecessor[e, 0]])
        for e in range(successor_ptr[tail[c]], successor_ptr[tail[c] + 1]):
            end[c] = min(end[c], top[successor[e, 0]])
        end[c] = max(end[c], start[c])


@kernel
def _contract_kernel(
    consumer_ptr: Int64[ndarray, " t1"],
    consumer_op: Int64[ndarray, " e"],
    tensor_op: Int64[ndarray, " t"],
    size: Int64[ndarray, " t"],
    of: Int64[ndarray, " n"],
    seen: Int64[ndarray, " c"],
    at: Int64[ndarray, "2 c"],
    into: Int64[ndarray, "x 3"],
    out: Int64[ndarray, "x 3"],
) -> None:
    """Count the edges between clusters in `at`; with rows to fill, they begin there."""
    fill = len(into) > 0
    for t in range(len(tensor_op)):
        c = of[tensor_op[t]]
        for e in range(consumer_ptr[t], consumer_ptr[t + 1]):
            other = of[consumer_op[e]]
            if other == c or seen[other] == t:
                continue
            seen[other] = t
            if fill:
                row = into[at[0, other]]
                row[0], row[1], row[2] = c, t, size[t]
                row = out[at[1, c]]
                row[0], row[1], row[2] = other, t, size[t]
            at[0, other] += 1
            at[1, c] += 1
