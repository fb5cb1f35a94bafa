"""Clusters as nodes of a graph: when each could run, how much work is there, what crosses.

Edges inside a cluster are gone, and what belongs to one is in one place, so that mapping and swaps
read a few neighbouring rows per cluster. O((ops + edges) + ops log levels).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Float64, Int64
from numpy import ndarray

from pardnn.kernels.jit import kernel
from pardnn.place.pardnn.problem import Clusters, Problem, cluster_rows, clustered_levels
from pardnn.sim.flow import Edges

#: Distinct top levels that are told apart, and bins where there are more: the trees of 16 devices
#: then take 512 KiB.
MOST_LEVELS, LEVEL_BINS = 1 << 14, 1 << 12
#: Of the whole work: differences of sums below it are nothing.
ROUNDING = 1e-12


class Spans(NamedTuple):
    """Clusters as nodes: when they could run, by the levels of the clustered graph, and edges.

    Attributes:
        levels: The distinct top levels, in seconds, or where their bins begin.
        begin: First level of a cluster's span.
        end: After its last level.
        weight: Seconds of work.
        potential: Seconds of work of others that may run within the span.
        inside: Seconds per device class within the span; 0 for what a class cannot run.
        ptr: Where the ops of a cluster begin in `level` and `seconds`.
        level: Rank of each op's top level among `levels`, cluster by cluster.
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


def spans_of(problem: Problem, clusters: Clusters) -> Spans:
    """Return the clusters as nodes."""
    c = len(clusters.head)
    ptr, op = cluster_rows(clusters.of, c)
    top, bottom = clustered_levels(problem, clusters.of)
    levels = np.unique(top)
    start, end = np.zeros(c), np.full(c, float((top + bottom).max()))
    flow = problem.flow
    _span_kernel(
        flow.earlier.ptr, flow.earlier.edge, flow.later.ptr, flow.later.edge, problem.seconds,
        clusters.head, clusters.tail, top, start, end,
    )  # fmt: skip
    if len(levels) > MOST_LEVELS:
        levels = levels[np.arange(LEVEL_BINS) * len(levels) // LEVEL_BINS]
        begin = np.searchsorted(levels, start, side="right") - 1  # the bin that it lies in
    else:
        begin = np.searchsorted(levels, start)
    level = (np.searchsorted(levels, top, side="right") - 1)[op]
    end = np.searchsorted(levels, end)
    mine = np.repeat(np.arange(c), np.diff(ptr))
    within = (begin[mine] <= level) & (level < end[mine])
    rows = able_seconds(problem)[:, op]
    fastest = problem.seconds[op]
    work = np.bincount(level, weights=fastest, minlength=len(levels))
    until = np.concatenate([[0.0], np.cumsum(work)])
    others = until[end] - until[begin] - _sums(mine, within, fastest, c)
    into, out = _contracted(problem, clusters.of, c)
    return Spans(
        levels=levels,
        begin=begin.astype(np.int64),
        end=end.astype(np.int64),
        weight=np.bincount(mine, weights=fastest, minlength=c),
        potential=np.where(others > ROUNDING * until[-1], others, 0.0),
        inside=np.array([_sums(mine, within, row, c) for row in rows]),
        ptr=ptr,
        level=level.astype(np.int64),
        seconds=rows,
        into=into,
        out=out,
    )


def able_seconds(problem: Problem) -> Float64[ndarray, "f n"]:
    """Return seconds per device class, 0 for what it cannot run."""
    seconds = problem.machine.seconds
    return np.where(np.isfinite(seconds), seconds, 0.0)


def _sums(mine: ndarray, within: ndarray, seconds: ndarray, num_clusters: int) -> ndarray:
    return np.bincount(mine, weights=np.where(within, seconds, 0.0), minlength=num_clusters)


def _contracted(problem: Problem, of: ndarray, num_clusters: int) -> tuple[Edges, Edges]:
    """Edges between clusters that carry tensors, into and out of each, each tensor once."""
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


@kernel
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


@kernel
def _contract_kernel(
    consumer_ptr: ndarray,
    consumer_op: ndarray,
    tensor_op: ndarray,
    size: ndarray,
    of: ndarray,
    seen: ndarray,
    at: ndarray,
    into: ndarray,
    out: ndarray,
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
