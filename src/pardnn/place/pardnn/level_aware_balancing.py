"""Level-aware load balancing, LALB (ParDNN, Eq. 4.2 and Algorithm 2, lines 8 to 15).

Each secondary cluster that was not merged, heaviest first, goes to the device with the least sum of
two terms: the work that is already there within `span(sc)`, and the communication of sc with other
devices. So load is balanced at the time when the cluster runs, not over the whole step. Ties go to
the device with which it communicates most (the thesis's rule), then to the less loaded one, then to
the first.

Work by top level is kept in one Fenwick tree per device.
O(V log V + S (K log V + K D)) for S secondaries that communicate with D devices each.

Reference: thesis, section 4.1.1, "Mapping".

Deviations: a transfer costs what the link between the two devices costs, and a tensor is sent once;
a device that cannot run all of a cluster is not chosen while another can.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float64, Int64
from numpy import ndarray

from pardnn.kernels.fenwick import fenwick_add, fenwick_sums
from pardnn.kernels.jit import helper, kernel
from pardnn.place.pardnn.cluster_graph import ClusterGraph, count_transfers
from pardnn.place.pardnn.problem import Problem


class Loads(NamedTuple):
    """What devices compute, and scratch for what they send.

    Attributes:
        work: Fenwick trees of each device's seconds by level.
        load: Seconds of each device in all.
        count: Scratch of `count_transfers`.
        last: Scratch of `count_transfers`.
    """

    work: Float64[ndarray, "l+1 k"]
    load: Float64[ndarray, " k"]
    count: Int64[ndarray, "4 k+1"]
    last: Int64[ndarray, " k+1"]


def balance_by_level(
    problem: Problem,
    cluster_graph: ClusterGraph,
    heaviest: Int64[ndarray, " s"],
    allowed: Bool[ndarray, "c k"],
    device: Int64[ndarray, " c"],
) -> None:
    """Give every cluster that has none yet a device, by Eq. 4.2.

    Args:
        problem: The problem.
        cluster_graph: The clusters.
        heaviest: The secondaries, heaviest first.
        allowed: Whether a cluster may go to a device.
        device: Of each cluster, -1 for none yet. Filled.
    """
    machine = problem.machine
    _balance_kernel(
        machine.device_class, machine.latency, 1 / machine.bandwidth,
        (problem.latency, problem.byte_seconds), cluster_graph, heaviest, allowed,
        loads_of(problem, cluster_graph, device), device,
    )  # fmt: skip


def loads_of(problem: Problem, cluster_graph: ClusterGraph, device: Int64[ndarray, " c"]) -> Loads:
    """Return the loads of clusters on their devices, -1 for none yet.

    Args:
        problem: The problem.
        cluster_graph: The clusters.
        device: Of each cluster.
    """
    k, machine = problem.machine.num_devices, problem.machine
    loads = Loads(
        work=np.zeros((len(cluster_graph.levels) + 1, k)),
        load=np.zeros(k),
        count=np.zeros((4, k + 1), dtype=np.int64),
        last=np.empty(k + 1, dtype=np.int64),
    )
    _load_kernel(cluster_graph, machine.device_class, device, loads)
    return loads


@kernel
def _load_kernel(
    g: ClusterGraph,
    device_class: Int64[ndarray, " k"],
    device: Int64[ndarray, " c"],
    loads: Loads,
) -> None:
    """Fill the trees: the work of each level first, then sums, in linear time."""
    work = loads.work
    for c in range(len(device)):
        d = device[c]
        if d >= 0:
            for i in range(g.ptr[c], g.ptr[c + 1]):
                amount = g.seconds[device_class[d], i]
                work[g.level[i] + 1, d] += amount
                loads.load[d] += amount
    for at in range(1, len(work)):
        above = at + (at & -at)
        if above < len(work):
            for d in range(work.shape[1]):
                work[above, d] += work[at, d]


@kernel
def _balance_kernel(
    device_class: Int64[ndarray, " k"],
    latency: Float64[ndarray, "k k"],
    byte_seconds: Float64[ndarray, "k k"],
    slowest: tuple[float, float],
    g: ClusterGraph,
    heaviest: Int64[ndarray, " s"],
    allowed: Bool[ndarray, "c k"],
    loads: Loads,
    device: Int64[ndarray, " c"],
) -> None:
    work, load, count = loads.work, loads.load, loads.count
    cost, into, out = np.empty(len(load)), g.into, g.out
    for c in heaviest:
        if device[c] >= 0:
            continue
        count_transfers(c, into.ptr, into.edge, out.ptr, out.edge, device, loads.last, count)
        fenwick_sums(work, g.begin[c], g.end[c], cost)
        add_transfers(count, latency, byte_seconds, cost)
        best, best_comm = np.int64(-1), 0.0  # as a literal, it would compile `add_work` twice
        for p in range(len(cost)):
            comm = (count[0, p] + count[2, p]) * slowest[0]
            comm += (count[1, p] + count[3, p]) * slowest[1]
            if not allowed[c, p] or (best >= 0 and cost[p] > cost[best]):
                continue
            lower = best < 0 or cost[p] < cost[best] or comm > best_comm
            if lower or (comm == best_comm and load[p] < load[best]):
                best, best_comm = p, comm
        device[c] = best
        add_work(g, c, best, 1.0, device_class[best], loads)


@helper
def add_transfers(
    count: Int64[ndarray, "4 q"],
    latency: Float64[ndarray, "k k"],
    byte_seconds: Float64[ndarray, "k k"],
    cost: Float64[ndarray, " k"],
) -> None:
    """Add to each device's cost the communication with the others if the cluster is there.

    Args:
        count: From `count_transfers`.
        latency: Seconds.
        byte_seconds: Seconds per byte.
        cost: Seconds of each device. Added to.
    """
    for q in range(len(cost)):
        if count[0, q] > 0:
            for p in range(len(cost)):
                if p != q:
                    cost[p] += count[0, q] * latency[q, p] + count[1, q] * byte_seconds[q, p]
        if count[2, q] > 0:
            for p in range(len(cost)):
                if p != q:
                    cost[p] += count[2, q] * latency[p, q] + count[3, q] * byte_seconds[p, q]


@helper
def add_work(g: ClusterGraph, c: int, d: int, sign: float, device_class: int, loads: Loads) -> None:
    """Add a cluster's seconds to the tree and the load of a device, or take them away.

    Args:
        g: The clusters.
        c: The cluster.
        d: The device.
        sign: 1 or -1.
        device_class: Of the device.
        loads: Changed.
    """
    for i in range(g.ptr[c], g.ptr[c + 1]):
        amount = sign * g.seconds[device_class, i]
        fenwick_add(loads.work, g.level[i], d, amount)
        loads.load[d] += amount
