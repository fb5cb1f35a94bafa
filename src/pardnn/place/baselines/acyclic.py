"""Acyclic blocks: data flows between devices in one direction only, across steps too.

Problem: consecutive steps overlap as long as no device waits for what another one does at the end
of the previous step. Layers that are not trained do not depend on the previous step, so the devices
that run them can begin the next batch.
Idea: a co-location group holds its state on one device, so the graph of groups has a cycle wherever
a step needs a result of the previous one: a trained layer's weight, the loss, the gradient, the
update. The list of strongly connected components, in topological order, is cut into one contiguous
block per device, so that the slowest block is as fast as possible. Data then flows one way, and if
links keep up, the period is the computation of the busiest device.
Complexity: O(ops + edges).
References: Tarjan, "Depth-first search and linear graph algorithms", SIAM J. Computing 1972;
Herrmann et al., "Multilevel algorithms for acyclic partitioning of directed acyclic graphs", SIAM
J. Scientific Computing 2019.
Deviations: blocks of one topological order, without refinement, since local search follows.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float64, Int64
from numpy import ndarray

from pardnn.graph.csr import op_edges
from pardnn.graph.ir import Graph
from pardnn.kernels.jit import kernel
from pardnn.place.colocation import closed_arrays, legal_placement, runnable, speed_shares
from pardnn.place.decision import Decision, fitted
from pardnn.sim.machine import Machine, fastest_seconds

#: Halvings of the interval that holds the time of the slowest block: then it is exact to rounding.
HALVINGS = 60


def place_acyclic(
    graph: Graph, machine: Machine, capacities: list[int | None], *, seed: int = 0
) -> Decision:
    """Cut the strongly connected components of groups into K contiguous blocks.

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
    seconds = fastest_seconds(machine)
    pairs = arrays.group[op_edges(arrays)]
    component = components(pairs, int(arrays.group.max(initial=-1)) + 1)[arrays.group]
    work = np.bincount(component, weights=np.where(np.isfinite(seconds), seconds, 0.0))
    block = blocks(work, speed_shares(machine))
    place = legal_placement(arrays, runnable(arrays, machine), block[component])
    return fitted(graph, machine, place, capacities)


def components(pairs: Int64[ndarray, "pairs 2"], num_nodes: int) -> Int64[ndarray, " n"]:
    """Return the strongly connected component of each node, numbered in topological order.

    Args:
        pairs: Edges, from and to.
        num_nodes: Number of nodes.
    """
    order = np.argsort(pairs[:, 0], kind="stable")
    counts = np.bincount(pairs[:, 0], minlength=num_nodes)
    begin = np.concatenate([[0], np.cumsum(counts)])
    found = np.empty(num_nodes, dtype=np.int64)
    count = _components_kernel(found, begin, np.ascontiguousarray(pairs[order, 1]))
    return count - 1 - found


def blocks(
    work: Float64[ndarray, " components"], share: Float64[ndarray, " k"]
) -> Int64[ndarray, " components"]:
    """Return the block of each component: one per device, contiguous, balanced by speed.

    Args:
        work: Seconds of each component.
        share: Fraction of the work that each device does in the same time; they sum to 1.
    """
    low, high = 0.0, float(work.sum()) / float(share[share > 0].min())
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        is_enough = _filled(work, share, middle).max(initial=0) < len(share)
        low, high = (low, middle) if is_enough else (middle, high)
    return _filled(work, share, high)


def _filled(
    work: Float64[ndarray, " components"], share: Float64[ndarray, " k"], limit: float
) -> Int64[ndarray, " components"]:
    """Return blocks, each as large as its device's share of a limit; K of what is left over."""
    ends, block = np.cumsum(work), np.full(len(work), len(share))
    begin = 0
    for device, part in enumerate(share.tolist()):
        before = ends[begin - 1] if begin else 0.0
        end = int(np.searchsorted(ends, before + part * limit, side="right"))
        block[begin:end] = device
        begin = max(begin, end)
    return block


@kernel
def _components_kernel(
    component: Int64[ndarray, " n"], begin: Int64[ndarray, " n+1"], successor: Int64[ndarray, " e"]
) -> int:
    """Fill the component of each node, numbered against the edges; return how many there are.

    Args:
        component: Filled.
        begin: Where the edges of each node begin in `successor`, and the end.
        successor: What each edge leads to.
    """
    n = len(component)
    component[:] = -1
    index, low = np.full(n, -1, dtype=np.int64), np.empty(n, dtype=np.int64)
    path, opened = np.empty(n, dtype=np.int64), np.empty(n, dtype=np.int64)
    edge = begin[:-1].copy()
    visited = open_size = found = 0
    for root in range(n):
        if index[root] >= 0:
            continue
        depth, path[0] = 1, root
        while depth > 0:
            node = path[depth - 1]
            if index[node] < 0:
                index[node] = low[node] = visited
                opened[open_size] = node
                visited, open_size = visited + 1, open_size + 1
            if edge[node] < begin[node + 1]:
                after = successor[edge[node]]
                edge[node] += 1
                if index[after] < 0:
                    path[depth] = after
                    depth += 1
                elif component[after] < 0:
                    low[node] = min(low[node], index[after])
                continue
            depth -= 1
            if depth > 0:
                low[path[depth - 1]] = min(low[path[depth - 1]], low[node])
            if low[node] == index[node]:
                while component[node] < 0:
                    open_size -= 1
                    component[opened[open_size]] = found
                found += 1
    return found
