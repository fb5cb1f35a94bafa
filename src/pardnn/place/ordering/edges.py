"""Edges of a placed step and its longest paths: how early ops start, how long the step goes on."""

# Kernels: an element of an array is a number, which pyright cannot see.
# pyright: reportArgumentType=false

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Float64, Int64
from numpy import ndarray

from pardnn.graph.csr import GraphArrays
from pardnn.kernels.jit import kernel
from pardnn.sim.machine import Machine


class Edges(NamedTuple):
    """Ops and what waits for them, for one placement.

    Attributes:
        place: Device of each op.
        seconds: Of each op on its device.
        ptr: Of each op, into `successor`.
        successor: Ops that wait for it.
        delay: Seconds from its end until the successor may start; 0 within a device.
        missing: Number of edges that end in each op.
    """

    place: Int64[ndarray, " n"]
    seconds: Float64[ndarray, " n"]
    ptr: Int64[ndarray, " n+1"]
    successor: Int64[ndarray, " e"]
    delay: Float64[ndarray, " e"]
    missing: Int64[ndarray, " n"]


def edges_of(arrays: GraphArrays, machine: Machine, place: Int64[ndarray, " n"]) -> Edges:
    """Return the edges of a placement.

    Args:
        arrays: The graph.
        machine: Durations and links.
        place: Device of each op.
    """
    a, n = arrays, arrays.num_ops
    ops = np.arange(n)
    reader = np.repeat(ops, np.diff(a.input_ptr))
    source = np.concatenate([a.tensor_op[a.input_tensor], a.after_op])
    target = np.concatenate([reader, np.repeat(ops, np.diff(a.after_ptr))])
    size = np.zeros(len(source))
    size[: len(reader)] = a.tensor_bytes[a.input_tensor]
    one, other = place[source], place[target]
    with np.errstate(divide="ignore", invalid="ignore"):
        delay = machine.latency[one, other] + size / machine.bandwidth[one, other]
    delay = np.where(one == other, 0.0, delay)
    turn = np.lexsort((target, source))
    ptr = np.zeros(n + 1, dtype=np.int64)
    np.cumsum(np.bincount(source, minlength=n), out=ptr[1:])
    return Edges(
        np.array(place, dtype=np.int64),
        machine.seconds[machine.device_class[place], ops],
        ptr,
        target[turn].astype(np.int64),
        delay[turn],
        np.bincount(target, minlength=n).astype(np.int64),
    )


@kernel
def heads(e: Edges, order: Int64[ndarray, " n"]) -> Float64[ndarray, " n"]:
    """Return the earliest start of each op in seconds, by data and messages alone.

    Args:
        e: The edges.
        order: Any topological order.
    """
    head = np.zeros(len(order))
    for op in order:
        for i in range(e.ptr[op], e.ptr[op + 1]):
            after = e.successor[i]
            head[after] = max(head[after], head[op] + e.seconds[op] + e.delay[i])
    return head


@kernel
def tails(e: Edges, order: Int64[ndarray, " n"], queued: int) -> Float64[ndarray, " n"]:
    """Return a lower bound on the seconds from each op's start to the end of the step.

    Args:
        e: The edges.
        order: A topological order.
        queued: 1: each device runs its ops in the order; 0: data and messages alone.
    """
    tail, behind = np.zeros(len(order)), np.zeros(int(e.place.max()) + 1)
    for turn in range(len(order) - 1, -1, -1):
        op = order[turn]
        longest = behind[e.place[op]] if queued > 0 else 0.0
        for i in range(e.ptr[op], e.ptr[op + 1]):
            longest = max(longest, e.delay[i] + tail[e.successor[i]])
        tail[op] = e.seconds[op] + longest
        behind[e.place[op]] = tail[op]
    return tail


def placed_bound(edges: Edges, order: Int64[ndarray, " n"]) -> float:
    """Return a lower bound in seconds for all schedules of a placed step.

    The ops of a device that cannot start before some time run one after the other, and then what
    depends on the last of them; likewise backwards. The longest path is a bound, too.

    Args:
        edges: Of the placement.
        order: Any topological order.
    """
    head, tail = heads(edges, order), tails(edges, order, 0)
    bound = float((head + tail).max(initial=0.0))
    rest = tail - edges.seconds
    for d in np.unique(edges.place):
        here = (edges.place == d) & (edges.seconds > 0)
        if here.any():
            for first, last in ((head[here], rest[here]), (rest[here], head[here])):
                late = np.argsort(-first, kind="stable")
                work = np.cumsum(edges.seconds[here][late])
                least = first[late] + work + np.minimum.accumulate(last[late])
                bound = max(bound, float(least.max()))
    return bound
