"""Graph slicing (ParDNN, Algorithm 1): K critical paths, then the rest as paths or single ops.

K times: compute bottom levels of the remaining ops; start at the op with the largest `bl`, where
the longest path begins, follow the successor with the largest `comm + bl`, and peel off the path as
a primary cluster. Then compute levels once more, with edges inside a primary free, and peel the
rest into secondary clusters along the successor with the largest `w_lvl = tl + bl`, without
recomputation. O(K (ops + edges) + ops log ops).

Reference: thesis, section 4.1.1, "Graph slicing"; levels are defined in its Table 4.2.

Deviations: a critical path follows `comm + bl`, since the largest `tl + bl` alone can hop onto
another critical path; ties go to the larger `bl`, so a chain is entered at its head, then to the
smaller op number. A path that meets a co-location group takes all of it.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float64, Int64
from numpy import ndarray

from pardnn.kernels.jit import kernel
from pardnn.kernels.sorting import MANY_KEYS, stable_order
from pardnn.place.pardnn.problem import Clusters, Problem, clustered_levels
from pardnn.sim.levels import longest_paths


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
    _peel_primaries(problem, num_primaries, of, head, tail)
    top, bottom = clustered_levels(problem, of)
    starts = _by_level(problem, np.flatnonzero(of < 0), top, bottom)
    position = np.full(n, n, dtype=np.int64)
    position[starts] = np.arange(len(starts))
    successors = problem.adjacency.successors
    count = _secondary_kernel(
        num_primaries, starts, successors.ptr, successors.edge, problem.arrays.group,
        problem.member_ptr, problem.member, position, of, head, tail,
    )  # fmt: skip
    return Clusters(of, head[:count].copy(), tail[:count].copy())


def _by_level(
    problem: Problem,
    ops: Int64[ndarray, " m"],
    top: Float64[ndarray, " n"],
    bottom: Float64[ndarray, " n"],
) -> Int64[ndarray, " m"]:
    """Sort ops by decreasing `tl + bl`, then by decreasing `bl`, then by number."""
    if len(ops) <= MANY_KEYS:
        return ops[np.lexsort((-bottom[ops], -(top + bottom)[ops]))]
    # Sums that differ by rounding are alike. Of ops on one longest path, the first is `bl`'s too.
    waiting = np.zeros(len(top), dtype=np.bool_)
    waiting[ops] = True
    ordered = problem.adjacency.order[waiting[problem.adjacency.order]]
    return ordered[stable_order(-(top + bottom)[ordered])]


def _peel_primaries(
    problem: Problem,
    num_primaries: int,
    of: Int64[ndarray, " n"],
    head: Int64[ndarray, " c"],
    tail: Int64[ndarray, " c"],
) -> None:
    adjacency, left = problem.adjacency, problem.seconds.copy()  # minus infinity once peeled
    for cluster in range(num_primaries):
        bottom = longest_paths(adjacency.reverse, adjacency.successors, problem.comm, left)[1]
        op = int(bottom.argmax())
        if bottom[op] == -np.inf:
            return
        head[cluster] = op
        tail[cluster] = _primary_kernel(
            op, cluster, adjacency.successors.ptr, adjacency.successors.edge, problem.comm, bottom,
            problem.arrays.group, problem.member_ptr, problem.member, of, left,
        )  # fmt: skip


@kernel
def _primary_kernel(
    op: int,
    cluster: int,
    ptr: Int64[ndarray, " p"],
    edge: Int64[ndarray, "x 3"],
    comm: Float64[ndarray, " x"],
    bottom: Float64[ndarray, " n"],
    group: Int64[ndarray, " n"],
    member_ptr: Int64[ndarray, " g1"],
    member: Int64[ndarray, " n"],
    of: Int64[ndarray, " n"],
    left: Float64[ndarray, " n"],
) -> int:
    """Peel the critical path that starts at an op; return its last op."""
    while True:
        for i in range(member_ptr[group[op]], member_ptr[group[op] + 1]):
            of[member[i]] = cluster
            left[member[i]] = -np.inf
        best, longest = -1, -1.0
        for e in range(ptr[op], ptr[op + 1]):
            successor = edge[e, 0]
            path = comm[e] + bottom[successor]
            nearer = path > longest or (path == longest and successor < best)
            if nearer and left[successor] >= 0:
                best, longest = successor, path
        if best < 0:
            return op
        op = best


@kernel
def _secondary_kernel(
    count: int,
    starts: Int64[ndarray, " m"],
    ptr: Int64[ndarray, " p"],
    edge: Int64[ndarray, "x 3"],
    group: Int64[ndarray, " n"],
    member_ptr: Int64[ndarray, " g1"],
    member: Int64[ndarray, " n"],
    position: Int64[ndarray, " n"],
    of: Int64[ndarray, " n"],
    head: Int64[ndarray, " c"],
    tail: Int64[ndarray, " c"],
) -> int:
    """Peel paths along the smallest position; what is peeled gets the position n."""
    n = len(position)
    alone = len(member_ptr) == n + 1
    for start in starts:
        if position[start] == n:
            continue
        head[count] = start
        op = start
        while op >= 0:
            tail[count] = op
            of[op], position[op] = count, n
            if not alone:
                for i in range(member_ptr[group[op]], member_ptr[group[op] + 1]):
                    of[member[i]], position[member[i]] = count, n
            best, least = -1, n
            for e in range(ptr[op], ptr[op + 1]):
                if position[edge[e, 0]] < least:
                    best, least = edge[e, 0], position[edge[e, 0]]
            op = best
        count += 1
    return count
