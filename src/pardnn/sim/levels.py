"""Top and bottom levels: longest paths to and from each op, in seconds.

`tl(n)` is the longest path from a source to n, without n; `bl(n)` the longest from n to a sink,
with n (thesis, table 4.2). Edges within a device or cluster cost 0. O(ops + edges) each.
"""

# Kernels: an element of an array is a number, which pyright cannot see.
# pyright: reportArgumentType=false, reportReturnType=false

from __future__ import annotations

import numpy as np
from jaxtyping import Float64, Int64
from numpy import ndarray

from pardnn.graph.csr import GraphArrays
from pardnn.kernels.jit import kernel
from pardnn.sim.adjacency import BYTES, Adjacency, Edges, predecessor_edges, successor_edges
from pardnn.sim.machine import Machine, fastest_seconds


def bottom_levels(
    arrays: GraphArrays,
    machine: Machine,
    place: Int64[ndarray, " n"] | None = None,
    adjacency: Adjacency | None = None,
) -> Float64[ndarray, " n"]:
    """Return bottom levels.

    Args:
        arrays: The graph.
        machine: Durations and links.
        place: Device of each op: durations and links are those used, and edges within a device
            cost 0. None: fastest durations, and every edge costs the slowest link.
        adjacency: The graph's edges, if they are known.
    """
    edges = adjacency.successors if adjacency else successor_edges(arrays)
    reverse = adjacency.reverse if adjacency else arrays.topological[::-1].copy()
    if place is None:
        seconds, comm = fastest_seconds(machine), slowest_comm(edges, machine)
    else:
        seconds = placed_seconds(machine, place)
        comm = placed_comm(edges, place, machine.latency, machine.bandwidth)
    return longest_paths(reverse, edges, comm, seconds)[1]


def top_levels(
    arrays: GraphArrays,
    machine: Machine,
    place: Int64[ndarray, " n"] | None = None,
    adjacency: Adjacency | None = None,
) -> Float64[ndarray, " n"]:
    """Return top levels; arguments as in `bottom_levels`.

    Args:
        arrays: The graph.
        machine: Durations and links.
        place: As in `bottom_levels`.
        adjacency: The graph's edges, if they are known.
    """
    edges = adjacency.predecessors if adjacency else predecessor_edges(arrays)
    order = adjacency.order if adjacency else arrays.topological.copy()
    if place is None:
        seconds, comm = fastest_seconds(machine), slowest_comm(edges, machine)
    else:
        seconds = placed_seconds(machine, place)
        latency, bandwidth = machine.latency.T.copy(), machine.bandwidth.T.copy()
        comm = placed_comm(edges, place, latency, bandwidth)
    return longest_paths(order, edges, comm, seconds)[0]


def longest_paths(
    order: Int64[ndarray, " n"],
    edges: Edges,
    comm: Float64[ndarray, " x"],
    seconds: Float64[ndarray, " n"],
) -> tuple[Float64[ndarray, " n"], Float64[ndarray, " n"]]:
    """Return the longest path over `edges` from each op: without the op, and with it.

    Args:
        order: Ops, each after those its edges lead to.
        edges: In one direction.
        comm: Seconds of each edge.
        seconds: Of each op; minus infinity takes an op out of the graph.
    """
    without, with_op = np.empty(len(order)), np.empty(len(order))
    _longest_kernel(order, edges.ptr, edges.edge, comm, seconds, without, with_op)
    return without, with_op


def slowest_comm(edges: Edges, machine: Machine) -> Float64[ndarray, " x"]:
    """Return the seconds of each edge over the slowest link; order edges cost nothing."""
    latency, byte_seconds = slowest_link(machine)
    size = edges.edge[:, BYTES]
    return np.where(size >= 0, latency + size * byte_seconds, 0.0)


def placed_comm(
    edges: Edges,
    place: Int64[ndarray, " n"],
    latency: Float64[ndarray, "k k"],
    bandwidth: Float64[ndarray, "k k"],
) -> Float64[ndarray, " x"]:
    """Return the seconds of each edge of a placement; an order edge costs the latency alone.

    Args:
        edges: In one direction.
        place: Device of each op.
        latency: Seconds, from the device of the op to that of the other end.
        bandwidth: Bytes per second, from the device of the op to that of the other end.
    """
    comm = np.empty(len(edges.edge))
    place = np.ascontiguousarray(place, dtype=np.int64)
    _placed_comm_kernel(edges.ptr, edges.edge, place, latency, bandwidth, comm)
    return comm


def placed_seconds(machine: Machine, place: Int64[ndarray, " n"]) -> Float64[ndarray, " n"]:
    """Return the seconds of each op on its device."""
    if len(machine.seconds) == 1:
        return machine.seconds[0]
    return machine.seconds[machine.device_class[place], np.arange(len(place))]


def slowest_link(machine: Machine) -> tuple[float, float]:
    """Return (latency, seconds per byte) that no usable link exceeds; zeros for one device."""
    off_diagonal = ~np.eye(machine.num_devices, dtype=bool) & np.isfinite(machine.latency)
    if not off_diagonal.any():
        return 0.0, 0.0
    return (
        float(machine.latency[off_diagonal].max()),
        float(1.0 / machine.bandwidth[off_diagonal].min()),
    )


@kernel
def _longest_kernel(
    order: Int64[ndarray, " n"],
    ptr: Int64[ndarray, " p"],
    edge: Int64[ndarray, "x 3"],
    comm: Float64[ndarray, " x"],
    seconds: Float64[ndarray, " n"],
    without: Float64[ndarray, " n"],
    with_op: Float64[ndarray, " n"],
) -> None:
    for op in order:
        longest = 0.0
        for e in range(ptr[op], ptr[op + 1]):
            longest = max(longest, with_op[edge[e, 0]] + comm[e])
        without[op] = longest
        with_op[op] = longest + seconds[op]


@kernel
def _placed_comm_kernel(
    ptr: Int64[ndarray, " p"],
    edge: Int64[ndarray, "x 3"],
    place: Int64[ndarray, " n"],
    latency: Float64[ndarray, "k k"],
    bandwidth: Float64[ndarray, "k k"],
    comm: Float64[ndarray, " x"],
) -> None:
    for op in range(len(place)):
        d = place[op]
        for e in range(ptr[op], ptr[op + 1]):
            q = place[edge[e, 0]]
            comm[e] = 0.0
            if q != d:
                comm[e] = latency[d, q] + max(edge[e, 2], 0) / bandwidth[d, q]
