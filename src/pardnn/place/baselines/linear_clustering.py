"""Linear clustering, clusters mapped by guided load balancing, earliest start time first.

1. Clustering: repeatedly, the longest path of the remaining graph, communication included, becomes
   a cluster. Its edges then cost nothing.
2. Mapping (GLB): clusters in the order of their start, each to the device with the least work.
3. Order, "EST first": among ready ops the one with the earliest estimated start time, its top
   level in the mapped graph; then the one with the largest bottom level.

References: Kim, Browne, "A general approach to mapping of parallel computation upon multiprocessor
architectures", ICPP 1988; Radulescu, van Gemund, "GLB: a low-cost scheduling algorithm for
distributed-memory architectures", HiPC 1998; the combination is that of Wang, Sinnen,
"List-scheduling versus cluster-scheduling", IEEE TPDS 2018, and of the ParDNN thesis, 6.4.

Deviations: levels are not recomputed after each path but repaired: only those of ancestors of the
path can change. A path that meets a group takes all of it; if no device can run all of a cluster,
its groups are mapped one by one. O(paths (ops + edges) log ops) at worst, as published; on the
graphs of networks near O((ops + edges) log ops).
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Float64, Int64
from numpy import ndarray

from pardnn.graph.csr import GraphArrays, transposed
from pardnn.graph.ir import Graph
from pardnn.kernels.heap import heap_pop, heap_push
from pardnn.kernels.jit import helper, kernel
from pardnn.kernels.sorting import inverse_permutation
from pardnn.place.colocation import closed_arrays, runnable
from pardnn.place.decision import Decision, fitted
from pardnn.sim.dynamic import emulate
from pardnn.sim.levels import bottom_levels, slowest_link, top_levels
from pardnn.sim.machine import Machine, fastest_seconds
from pardnn.sim.timeline import Timeline


def place_linear_clustering(
    graph: Graph, machine: Machine, capacities: list[int | None], *, seed: int = 0
) -> Decision:
    """Place by linear clustering and GLB, order by "EST first".

    Args:
        graph: The graph.
        machine: Durations and links.
        capacities: Usable bytes of each device; None is unlimited.
        seed: Not used.

    Raises:
        InfeasibleError: E301, if this placement does not fit; E302, if an op can run nowhere.
    """
    del seed
    arrays = closed_arrays(graph)
    runs = runnable(arrays, machine)
    place = balanced(arrays, machine, runs, linear_clusters(arrays, machine))
    return fitted(graph, machine, place, capacities, earliest_first(arrays, machine, place))


def earliest_first(arrays: GraphArrays, machine: Machine, place: Int64[ndarray, " n"]) -> Timeline:
    """Return the schedule of a placement by earliest estimated start time.

    Args:
        arrays: The graph.
        machine: Durations and links.
        place: Device of each op.
    """
    start, left = top_levels(arrays, machine, place), bottom_levels(arrays, machine, place)
    turn = inverse_permutation(np.lexsort((-left, start)))
    return emulate(arrays, machine, place, turn.astype(np.float64))


def linear_clusters(arrays: GraphArrays, machine: Machine) -> Int64[ndarray, " n"]:
    """Return the cluster of each op, numbered in the order in which they were found."""
    n = arrays.num_ops
    position = inverse_permutation(arrays.topological)
    num_groups = int(arrays.group.max()) + 1
    members = transposed(np.arange(n + 1), arrays.group, num_groups)
    of = np.full(n, -1, dtype=np.int64)
    _paths_kernel(arrays, *members, position, fastest_seconds(machine), slowest_link(machine), of)
    return of


def balanced(
    arrays: GraphArrays,
    machine: Machine,
    runs: Bool[ndarray, "g k"],
    clusters: Int64[ndarray, " n"],
) -> Int64[ndarray, " n"]:
    """Return the placement of clusters by GLB.

    Args:
        arrays: The graph, with closed groups.
        machine: Durations and links.
        runs: Which devices run which group.
        clusters: Cluster of each op; groups are not split.
    """
    n, k = arrays.num_ops, machine.num_devices
    can = np.ones((int(clusters.max()) + 1, k), dtype=bool)
    np.logical_and.at(can, clusters, runs[arrays.group])
    is_split = np.all(~can, axis=1)[clusters]
    _, unit = np.unique(np.where(is_split, len(can) + arrays.group, clusters), return_inverse=True)
    can = np.ones((int(unit.max()) + 1, k), dtype=bool)
    np.logical_and.at(can, unit, runs[arrays.group])
    top = np.zeros(n)
    _start_kernel(arrays, unit, fastest_seconds(machine), slowest_link(machine), top)
    begin = np.full(len(can), np.inf)
    np.minimum.at(begin, unit, top)
    position = inverse_permutation(arrays.topological)
    first = np.full(len(can), n)
    np.minimum.at(first, unit, position)
    work = np.zeros((len(can), len(machine.seconds)))
    for row, seconds in enumerate(machine.seconds):
        np.add.at(work[:, row], unit, np.where(np.isfinite(seconds), seconds, 0.0))
    device = np.empty(len(can), dtype=np.int64)
    load = np.zeros(k)
    for cluster in np.lexsort((first, begin)).tolist():
        ends = np.where(can[cluster], load + work[cluster, machine.device_class], np.inf)
        best = int(ends.argmin())
        device[cluster], load[best] = best, ends[best]
    return device[unit]


@helper
def _level(
    a: GraphArrays,
    op: int,
    seconds: Float64[ndarray, " n"],
    link: tuple[float, float],
    level: Float64[ndarray, " n"],
    of: Int64[ndarray, " n"],
) -> tuple[float, int]:
    """Longest path from an op through what no cluster has, and the op that follows on it."""
    longest, follower = 0.0, -1
    for t in range(a.output_ptr[op], a.output_ptr[op + 1]):
        cost = link[0] + a.tensor_bytes[t] * link[1]
        for edge in range(a.consumer_ptr[t], a.consumer_ptr[t + 1]):
            successor = a.consumer_op[edge]
            if of[successor] < 0 and (follower < 0 or level[successor] + cost > longest):
                longest, follower = level[successor] + cost, successor
    for edge in range(a.before_ptr[op], a.before_ptr[op + 1]):
        successor = a.before_op[edge]
        if of[successor] < 0 and (follower < 0 or level[successor] > longest):
            longest, follower = level[successor], successor
    return longest + seconds[op], follower


@kernel
def _paths_kernel(
    a: GraphArrays,
    member_ptr: Int64[ndarray, " g1"],
    member: Int64[ndarray, " n"],
    position: Int64[ndarray, " n"],
    seconds: Float64[ndarray, " n"],
    link: tuple[float, float],
    of: Int64[ndarray, " n"],
) -> None:
    n = len(of)
    level = np.zeros(n)
    for i in range(n - 1, -1, -1):
        op = a.topological[i]
        level[op] = _level(a, op, seconds, link, level, of)[0]
    # Levels only fall: an op whose key is out of date is pushed again.
    key, item = np.empty(n + 1), np.empty(n + 1, dtype=np.int64)
    waiting = 0
    for op in range(n):
        waiting = heap_push(key, item, waiting, -level[op], op)
    stale_key, stale = np.empty(n + 1), np.empty(n + 1, dtype=np.int64)
    marked = np.zeros(n, dtype=np.bool_)
    taken = np.empty(n, dtype=np.int64)
    count = 0
    while waiting > 0:
        op, pushed_level = item[0], -key[0]
        waiting = heap_pop(key, item, waiting)
        if of[op] >= 0:
            continue
        if level[op] < pushed_level:
            waiting = heap_push(key, item, waiting, -level[op], op)
            continue
        num_taken = 0
        while op >= 0:
            group = a.group[op]
            # The followers of a path are read before its op is taken: they are not clustered yet.
            for i in range(member_ptr[group], member_ptr[group + 1]):
                of[member[i]] = count
                taken[num_taken] = member[i]
                num_taken += 1
            op = _level(a, op, seconds, link, level, of)[1]
        count += 1
        changed = np.int64(0)  # a literal would compile what takes it twice
        for i in range(num_taken):
            changed = _mark_predecessors(
                a, taken[i], position, of, marked, stale_key, stale, changed
            )
        while changed > 0:
            op = stale[0]
            changed = heap_pop(stale_key, stale, changed)
            marked[op] = False
            now = _level(a, op, seconds, link, level, of)[0]
            if now < level[op]:
                level[op] = now
                changed = _mark_predecessors(a, op, position, of, marked, stale_key, stale, changed)


@helper
def _mark_predecessors(
    a: GraphArrays,
    op: int,
    position: Int64[ndarray, " n"],
    of: Int64[ndarray, " n"],
    marked: Bool[ndarray, " n"],
    stale_key: Float64[ndarray, " x"],
    stale: Int64[ndarray, " x"],
    changed: int,
) -> int:
    """Queue the predecessors of an op whose level may have changed, last in the graph first."""
    for edge in range(a.input_ptr[op], a.input_ptr[op + 1]):
        predecessor = a.tensor_op[a.input_tensor[edge]]
        if of[predecessor] < 0 and not marked[predecessor]:
            marked[predecessor] = True
            changed = heap_push(
                stale_key, stale, changed, -float(position[predecessor]), predecessor
            )
    for edge in range(a.after_ptr[op], a.after_ptr[op + 1]):
        predecessor = a.after_op[edge]
        if of[predecessor] < 0 and not marked[predecessor]:
            marked[predecessor] = True
            changed = heap_push(
                stale_key, stale, changed, -float(position[predecessor]), predecessor
            )
    return changed


@kernel
def _start_kernel(
    a: GraphArrays,
    unit: Int64[ndarray, " n"],
    seconds: Float64[ndarray, " n"],
    link: tuple[float, float],
    top: Float64[ndarray, " n"],
) -> None:
    for op in a.topological:
        for edge in range(a.input_ptr[op], a.input_ptr[op + 1]):
            t = a.input_tensor[edge]
            predecessor = a.tensor_op[t]
            cost = 0.0 if unit[predecessor] == unit[op] else link[0] + a.tensor_bytes[t] * link[1]
            top[op] = max(top[op], top[predecessor] + seconds[predecessor] + cost)
        for edge in range(a.after_ptr[op], a.after_ptr[op + 1]):
            predecessor = a.after_op[edge]
            top[op] = max(top[op], top[predecessor] + seconds[predecessor])
