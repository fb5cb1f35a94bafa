"""Orders that need little memory, as positions of the ops in them.

Two topological orders can be blended: a weighted mean of the positions in both grows along every
edge, so sorting by it gives a topological order again; the weight says how close it is to each.
"""

# Kernels: an element of an array is a number, which pyright cannot see.
# pyright: reportReturnType=false

from __future__ import annotations

import numpy as np
from jaxtyping import Int64
from numpy import ndarray

from pardnn.graph.csr import RESIDUAL, GraphArrays
from pardnn.kernels.heap import heap_pop, heap_push
from pardnn.kernels.jit import helper, kernel
from pardnn.kernels.sorting import inverse_permutation
from pardnn.place.ordering.schedule import free_plan
from pardnn.plan.plan import PlanArrays
from pardnn.sim.peak import peaks

#: How many ops are followed from one that takes memory to one that gives back more.
CHAIN = 6
#: Ops that take no more than the largest tensor's bytes over this many times the ops count as
#: taking nothing: host scalars, step counts.
TINY = 16


def file_positions(arrays: GraphArrays) -> Int64[ndarray, " n"]:
    """Return positions in the file's topological order: what eager execution does."""
    return inverse_permutation(arrays.topological)


def blended_positions(
    one: Int64[ndarray, " n"], other: Int64[ndarray, " n"], weight: float
) -> Int64[ndarray, " n"]:
    """Return the topological order between two: `one` at weight 0, `other` at weight 1.

    Args:
        one: Positions in an order.
        other: Positions in another order.
        weight: Of the other.
    """
    order = np.lexsort((other, one * (1 - weight) + other * weight))
    return inverse_permutation(order)


def eager_free_positions(arrays: GraphArrays) -> Int64[ndarray, " n"]:
    """Return positions in the file's order, with ops moved forward that free their inputs.

    So are chains of up to `CHAIN` ops that free, in the end, what they take, as in an optimizer
    whose update makes a tensor of its own before it reads the gradient. An update then runs as soon
    as its gradient exists, and frees it. If this needs more memory on one device than moving single
    ops, only those are moved. O((ops + edges) log ops).
    """
    base, largest = file_positions(arrays), int(arrays.tensor_bytes.max(initial=0))
    tiny = max(8, largest // (TINY * max(arrays.num_ops, 1)))
    best, least = base, -1
    for takes, length in ((0, 0), (tiny, CHAIN)):
        position = np.empty(arrays.num_ops, dtype=np.int64)
        _eager_free_kernel(arrays, base, takes, np.empty(length, dtype=np.int64), position)
        plan = free_plan(arrays, 1, np.zeros(arrays.num_ops, dtype=np.int64), position)
        peak = int(peaks(arrays, plan).max(initial=0))
        if least < 0 or peak < least:
            best, least = position, peak
    return best


def frugal_alone(arrays: GraphArrays, plan: PlanArrays) -> PlanArrays:
    """Return the plan, in the file's order if it uses one device and needs less memory so.

    On one device all orders take the same time; one made for speed may hold what
    `torch.utils.checkpoint` should free, 4.1 GiB instead of 1.5 for a GPT-2 of 24 layers.

    Args:
        arrays: The graph.
        plan: A plan; returned as it is if several devices run ops.
    """
    place = plan.place
    if len(place) == 0 or (place != place[0]).any():
        return plan
    eager = free_plan(arrays, len(plan.order_ptr) - 1, place, file_positions(arrays))
    return eager if peaks(arrays, eager).max() < peaks(arrays, plan).max() else plan


@helper
def _net_bytes(a: GraphArrays, op: int, reads_left: Int64[ndarray, " t"]) -> int:
    """Bytes that the op allocates for good, less those that it is the last to read."""
    net = 0
    for t in range(a.output_ptr[op], a.output_ptr[op + 1]):
        if a.tensor_alias[t] < 0 and a.memory[op] != RESIDUAL:
            net += a.tensor_bytes[t]
    for edge in range(a.input_ptr[op], a.input_ptr[op + 1]):
        owner = a.tensor_owner[a.input_tensor[edge]]
        if reads_left[owner] == 1 and a.memory[a.tensor_op[owner]] != RESIDUAL:
            net -= a.tensor_bytes[owner]
    return net


@helper
def _pass(
    a: GraphArrays,
    op: int,
    missing: Int64[ndarray, " n"],
    reads_left: Int64[ndarray, " t"],
    sign: int,
) -> None:
    """Count the op as run (-1), or take that back (1)."""
    for edge in range(a.input_ptr[op], a.input_ptr[op + 1]):
        reads_left[a.tensor_owner[a.input_tensor[edge]]] += sign
    for successor in _successors(a, op):
        missing[successor] += sign


@helper
def _gives_back(
    a: GraphArrays,
    op: int,
    missing: Int64[ndarray, " n"],
    reads_left: Int64[ndarray, " t"],
    tiny: int,
    chain: Int64[ndarray, " c"],
) -> bool:
    """Whether the op, or a chain of ops that it makes ready, frees what it takes."""
    net, length = _net_bytes(a, op, reads_left), 0
    while net > tiny and length < len(chain) and op >= 0:
        chain[length] = op
        length += 1
        _pass(a, op, missing, reads_left, np.int64(-1))
        following, least = -1, 0
        for successor in _successors(a, op):
            if missing[successor] == 0:
                takes = _net_bytes(a, successor, reads_left)
                if following < 0 or takes < least:
                    following, least = successor, takes
        net += least
        op = following
    for i in range(length - 1, -1, -1):
        _pass(a, chain[i], missing, reads_left, np.int64(1))
    return net <= tiny


@kernel
def _eager_free_kernel(
    a: GraphArrays,
    base: Int64[ndarray, " n"],
    tiny: int,
    chain: Int64[ndarray, " c"],
    position: Int64[ndarray, " n"],
) -> None:
    n = len(base)
    missing = np.empty(n, dtype=np.int64)
    reads_left = np.zeros(len(a.tensor_op), dtype=np.int64)  # of a storage, aliases included
    done = np.zeros(n, dtype=np.bool_)
    for op in range(n):
        missing[op] = a.input_ptr[op + 1] - a.input_ptr[op] + a.after_ptr[op + 1] - a.after_ptr[op]
        for edge in range(a.input_ptr[op], a.input_ptr[op + 1]):
            reads_left[a.tensor_owner[a.input_tensor[edge]]] += 1
    # Two heaps: all ready ops by file order, and those seen to free what they take.
    size = n + len(a.input_tensor)
    key, item = np.empty(n), np.empty(n, dtype=np.int64)
    free_key, free_item = np.empty(size), np.empty(size, dtype=np.int64)
    ready, frees = np.int64(0), np.int64(0)  # literals would compile the heap twice
    for op in range(n):
        if missing[op] == 0:
            ready = heap_push(key, item, ready, float(base[op]), op)
    count = 0
    while count < n:
        if frees > 0:
            op = free_item[0]
            frees = heap_pop(free_key, free_item, frees)
        else:
            op = item[0]
            ready = heap_pop(key, item, ready)
        if done[op]:
            continue
        done[op] = True
        position[op] = count
        count += 1
        for edge in range(a.input_ptr[op], a.input_ptr[op + 1]):
            owner = a.tensor_owner[a.input_tensor[edge]]
            reads_left[owner] -= 1
            if reads_left[owner] == 1:
                # Its last consumer, if ready by now, may free more than it takes.
                for successor in _consumers_of(a, a.input_tensor[edge]):
                    ready_now = not done[successor] and missing[successor] == 0
                    if ready_now and _gives_back(a, successor, missing, reads_left, tiny, chain):
                        frees = heap_push(
                            free_key, free_item, frees, float(base[successor]), successor
                        )
        for successor in _successors(a, op):
            missing[successor] -= 1
            if missing[successor] == 0:
                ready = heap_push(key, item, ready, float(base[successor]), successor)
                if _gives_back(a, successor, missing, reads_left, tiny, chain):
                    frees = heap_push(free_key, free_item, frees, float(base[successor]), successor)


@helper
def _consumers_of(a: GraphArrays, t: int) -> Int64[ndarray, " x"]:
    return a.consumer_op[a.consumer_ptr[t] : a.consumer_ptr[t + 1]]


@helper
def _successors(a: GraphArrays, op: int) -> Int64[ndarray, " x"]:
    """Ops that wait for this one, once for each tensor or order edge."""
    begin, end = a.output_ptr[op], a.output_ptr[op + 1]
    data = a.consumer_op[a.consumer_ptr[begin] : a.consumer_ptr[end]]
    order = a.before_op[a.before_ptr[op] : a.before_ptr[op + 1]]
    return np.concatenate((data, order))
