"""Graph slicing (ParDNN, Alg. 1): K critical paths, then the rest as paths or single ops.

K times: weighted levels on the ops not yet peeled; start at the op of largest `tl + bl`, follow the
successor with the largest `comm + bl`, and peel the path as a primary cluster. Then levels once
more, with edges inside a primary free, and the rest is peeled into secondary clusters along the
successor of largest `tl + bl`, without recomputation. O(K (ops + edges) + ops log ops).

Reference: Qararyah et al., "A computational-graph partitioning method for training
memory-constrained DNNs", thesis, section 4.1.1.

Deviations: a critical path follows `comm + bl`, since the largest `tl + bl` alone can hop onto
another critical path; ties go to the larger `bl`, so a chain is entered at its head, then to the
smaller op number. A path that meets a co-location group takes all of it.
"""

from __future__ import annotations

import numba
import numpy as np
from jaxtyping import Float64
from numpy import ndarray

from pardnn.place.pardnn.clusters import Clusters, Problem, clustered_levels, levels_kernel


def slice_graph(problem: Problem, num_primaries: int) -> Clusters:
    """Return primary and secondary clusters, secondaries in the order of discovery.

    Args:
        problem: The problem.
        num_primaries: K. With fewer than K disjoint paths, the spare primaries are empty.
    """
    n = problem.arrays.num_ops
    of = np.full(n, -1, dtype=np.int64)
    head = np.full(num_primaries + n, -1, dtype=np.int64)
    tail = np.full(num_primaries + n, -1, dtype=np.int64)
    _primary_kernel(problem, num_primaries, of, head, tail)
    top, bottom = clustered_levels(problem, of)
    weighted = top + bottom
    starts = np.lexsort((np.arange(n), -bottom, -weighted)).astype(np.int64)
    count = _secondary_kernel(problem, num_primaries, weighted, bottom, starts, of, head, tail)
    return Clusters(of, head[:count].copy(), tail[:count].copy())


@numba.njit(cache=True)
def _own(problem: Problem, op: int, cluster: int, of: ndarray, peeled: ndarray) -> None:
    """Give an op and its whole group to a cluster."""
    group = problem.arrays.group[op]
    for i in range(problem.member_ptr[group], problem.member_ptr[group + 1]):
        of[problem.member[i]] = cluster
        peeled[problem.member[i]] = True


@numba.njit(cache=True)
def _primary_kernel(
    problem: Problem, num_primaries: int, of: ndarray, head: ndarray, tail: ndarray
) -> None:
    n = len(of)
    top, bottom = np.zeros(n), np.zeros(n)
    peeled = np.zeros(n, dtype=np.bool_)
    nowhere = np.full(n, -1, dtype=np.int64)
    for cluster in range(num_primaries):
        levels_kernel(problem, nowhere, peeled, top, bottom)
        op = -1
        for other in range(n):
            if peeled[other]:
                continue
            if op < 0:
                op = other
                continue
            gain = (top[other] + bottom[other]) - (top[op] + bottom[op])
            if gain > 0 or (gain == 0 and bottom[other] > bottom[op]):
                op = other
        if op < 0:
            return
        head[cluster] = op
        while op >= 0:
            tail[cluster] = op
            _own(problem, op, cluster, of, peeled)
            op = _next_on_critical_path(problem, op, bottom, peeled)


@numba.njit(cache=True)
def _next_on_critical_path(problem: Problem, op: int, bottom: ndarray, peeled: ndarray) -> int:
    a = problem.arrays
    best, longest = -1, -1.0
    for t in range(a.output_ptr[op], a.output_ptr[op + 1]):
        cost = problem.latency + a.tensor_bytes[t] * problem.byte_seconds
        for edge in range(a.consumer_ptr[t], a.consumer_ptr[t + 1]):
            later = a.consumer_op[edge]
            path = cost + bottom[later]
            if not peeled[later] and (path > longest or (path == longest and later < best)):
                best, longest = later, path
    for edge in range(a.before_ptr[op], a.before_ptr[op + 1]):
        later = a.before_op[edge]
        path = bottom[later]
        if not peeled[later] and (path > longest or (path == longest and later < best)):
            best, longest = later, path
    return best


@numba.njit(cache=True)
def _heavier(
    later: int, best: int, weighted: Float64[ndarray, " n"], bottom: Float64[ndarray, " n"]
) -> bool:
    if best < 0 or weighted[later] != weighted[best]:
        return best < 0 or weighted[later] > weighted[best]
    if bottom[later] != bottom[best]:
        return bottom[later] > bottom[best]
    return later < best


@numba.njit(cache=True)
def _secondary_kernel(
    problem: Problem,
    count: int,
    weighted: ndarray,
    bottom: ndarray,
    starts: ndarray,
    of: ndarray,
    head: ndarray,
    tail: ndarray,
) -> int:
    a = problem.arrays
    peeled = of >= 0
    for start in starts:
        if peeled[start]:
            continue
        head[count] = start
        op = start
        while op >= 0:
            tail[count] = op
            _own(problem, op, count, of, peeled)
            best = -1
            for t in range(a.output_ptr[op], a.output_ptr[op + 1]):
                for edge in range(a.consumer_ptr[t], a.consumer_ptr[t + 1]):
                    later = a.consumer_op[edge]
                    if not peeled[later] and _heavier(later, best, weighted, bottom):
                        best = later
            for edge in range(a.before_ptr[op], a.before_ptr[op + 1]):
                later = a.before_op[edge]
                if not peeled[later] and _heavier(later, best, weighted, bottom):
                    best = later
            op = best
        count += 1
    return count
