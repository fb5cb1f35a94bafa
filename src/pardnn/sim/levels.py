"""Top and bottom levels: longest paths to and from each op, in seconds.

`tl(n)` is the longest path from a source to n, without n; `bl(n)` the longest from n to a sink,
with n (thesis, table 4.2). Edges within a device or cluster cost 0. O(ops + edges) each.
"""

# Kernels: an element of an array is a number, which pyright cannot see.
# pyright: reportArgumentType=false, reportReturnType=false

from __future__ import annotations

import numba
import numpy as np
from jaxtyping import Float64, Int64
from numpy import ndarray

from pardnn.graph.csr import GraphArrays
from pardnn.sim.machine import Machine, fastest_seconds


def bottom_levels(
    arrays: GraphArrays, machine: Machine, place: Int64[ndarray, " n"] | None = None
) -> Float64[ndarray, " n"]:
    """Return bottom levels.

    Args:
        arrays: The graph.
        machine: Durations and links.
        place: Device of each op: durations and links are those used, and edges within a device
            cost 0. None: fastest durations, and every edge costs the slowest link.
    """
    levels = np.zeros(arrays.num_ops)
    _bottom_kernel(arrays, machine, *_placed(arrays, machine, place), slowest_link(machine), levels)
    return levels


def top_levels(
    arrays: GraphArrays, machine: Machine, place: Int64[ndarray, " n"] | None = None
) -> Float64[ndarray, " n"]:
    """Return top levels, with the arguments of `bottom_levels`."""
    levels = np.zeros(arrays.num_ops)
    _top_kernel(arrays, machine, *_placed(arrays, machine, place), slowest_link(machine), levels)
    return levels


def _placed(
    arrays: GraphArrays, machine: Machine, place: ndarray | None
) -> tuple[ndarray, ndarray]:
    """Seconds of each op, and its place; an empty place stands for none."""
    if place is None:
        return fastest_seconds(machine), np.empty(0, dtype=np.int64)
    place = np.ascontiguousarray(place, dtype=np.int64)
    return machine.seconds[machine.device_class[place], np.arange(arrays.num_ops)], place


def slowest_link(machine: Machine) -> tuple[float, float]:
    """Return (latency, seconds per byte) that no usable link exceeds; zeros for one device."""
    off_diagonal = ~np.eye(machine.num_devices, dtype=bool) & np.isfinite(machine.latency)
    if not off_diagonal.any():
        return 0.0, 0.0
    return (
        float(machine.latency[off_diagonal].max()),
        float(1.0 / machine.bandwidth[off_diagonal].min()),
    )


@numba.njit(cache=True)
def _edge_seconds(
    machine: Machine,
    place: ndarray,
    slowest: tuple[float, float],
    earlier: int,
    later: int,
    num_bytes: int,
) -> float:
    """Seconds of an edge; an order edge (num_bytes < 0) costs the latency alone."""
    size = max(num_bytes, 0)
    if len(place) == 0:
        return slowest[0] + size * slowest[1] if num_bytes >= 0 else 0.0
    d, q = place[earlier], place[later]
    if d == q:
        return 0.0
    return machine.latency[d, q] + size / machine.bandwidth[d, q]


@numba.njit(cache=True)
def _bottom_kernel(
    a: GraphArrays,
    machine: Machine,
    seconds: ndarray,
    place: ndarray,
    slowest: tuple[float, float],
    levels: ndarray,
) -> None:
    for i in range(len(levels) - 1, -1, -1):
        op = a.topological[i]
        longest = 0.0
        for t in range(a.output_ptr[op], a.output_ptr[op + 1]):
            for edge in range(a.consumer_ptr[t], a.consumer_ptr[t + 1]):
                later = a.consumer_op[edge]
                path = levels[later] + _edge_seconds(
                    machine, place, slowest, op, later, a.tensor_bytes[t]
                )
                longest = max(longest, path)
        for edge in range(a.before_ptr[op], a.before_ptr[op + 1]):
            later = a.before_op[edge]
            path = levels[later] + _edge_seconds(machine, place, slowest, op, later, -1)
            longest = max(longest, path)
        levels[op] = longest + seconds[op]


@numba.njit(cache=True)
def _top_kernel(
    a: GraphArrays,
    machine: Machine,
    seconds: ndarray,
    place: ndarray,
    slowest: tuple[float, float],
    levels: ndarray,
) -> None:
    for i in range(len(levels)):
        op = a.topological[i]
        longest = 0.0
        for edge in range(a.input_ptr[op], a.input_ptr[op + 1]):
            t = a.input_tensor[edge]
            earlier = a.tensor_op[t]
            path = (levels[earlier] + seconds[earlier]) + _edge_seconds(
                machine, place, slowest, earlier, op, a.tensor_bytes[t]
            )
            longest = max(longest, path)
        for edge in range(a.after_ptr[op], a.after_ptr[op + 1]):
            earlier = a.after_op[edge]
            path = (levels[earlier] + seconds[earlier]) + _edge_seconds(
                machine, place, slowest, earlier, op, -1
            )
            longest = max(longest, path)
        levels[op] = longest
