"""Orders that need little memory, as references for planners.

Two topological orders can be blended: any weighted mean of the ranks of two topological orders
grows along every edge, so sorting by it gives a topological order again, as near to one or the
other as the weight says.
"""

from __future__ import annotations

import numba
import numpy as np
from jaxtyping import Int64
from numpy import ndarray

from pardnn.graph.csr import RESIDUAL, GraphArrays
from pardnn.sim.heap import heap_pop, heap_push


def file_rank(arrays: GraphArrays) -> Int64[ndarray, " n"]:
    """Return ranks in the file's topological order: what eager execution does."""
    rank = np.empty(arrays.num_ops, dtype=np.int64)
    rank[arrays.topological] = np.arange(arrays.num_ops)
    return rank


def blended_rank(
    one: Int64[ndarray, " n"], other: Int64[ndarray, " n"], weight: float
) -> Int64[ndarray, " n"]:
    """Return the topological order between two: `one` at weight 0, `other` at weight 1."""
    order = np.lexsort((other, one * (1 - weight) + other * weight))
    rank = np.empty(len(order), dtype=np.int64)
    rank[order] = np.arange(len(order))
    return rank


def eager_free_rank(arrays: GraphArrays) -> Int64[ndarray, " n"]:
    """Return ranks in the file's order, but with ops that free as much as they take drawn forward.

    An optimizer's update then runs as soon as its gradient exists, and frees it.
    O((ops + edges) log ops).
    """
    rank = np.empty(arrays.num_ops, dtype=np.int64)
    _eager_free_kernel(arrays, file_rank(arrays), rank)
    return rank


@numba.njit(cache=True)
def _owner(a: GraphArrays, t: int) -> int:
    while a.tensor_alias[t] >= 0:
        t = a.tensor_alias[t]
    return t


@numba.njit(cache=True)
def _net_bytes(a: GraphArrays, op: int, reads_left: ndarray) -> int:
    """Bytes that the op allocates for good, less those that it is the last to read."""
    net = 0
    for t in range(a.output_ptr[op], a.output_ptr[op + 1]):
        if a.tensor_alias[t] < 0 and a.memory[op] != RESIDUAL:
            net += a.tensor_bytes[t]
    for edge in range(a.input_ptr[op], a.input_ptr[op + 1]):
        owner = _owner(a, a.input_tensor[edge])
        if reads_left[owner] == 1 and a.memory[a.tensor_op[owner]] != RESIDUAL:
            net -= a.tensor_bytes[owner]
    return net


@numba.njit(cache=True)
def _eager_free_kernel(a: GraphArrays, base: ndarray, rank: ndarray) -> None:
    n = len(base)
    missing = np.empty(n, dtype=np.int64)
    reads_left = np.zeros(len(a.tensor_op), dtype=np.int64)  # of a storage, aliases included
    done = np.zeros(n, dtype=np.bool_)
    for op in range(n):
        missing[op] = a.input_ptr[op + 1] - a.input_ptr[op] + a.after_ptr[op + 1] - a.after_ptr[op]
        for edge in range(a.input_ptr[op], a.input_ptr[op + 1]):
            reads_left[_owner(a, a.input_tensor[edge])] += 1
    # Two heaps: all ready ops by file order, and those seen to free what they take.
    size = n + len(a.input_tensor)
    key, item = np.empty(n), np.empty(n, dtype=np.int64)
    free_key, free_item = np.empty(size), np.empty(size, dtype=np.int64)
    ready, frees = 0, 0
    for op in range(n):
        if missing[op] == 0:
            ready = heap_push(key, item, ready, base[op], op)
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
        rank[op] = count
        count += 1
        for edge in range(a.input_ptr[op], a.input_ptr[op + 1]):
            owner = _owner(a, a.input_tensor[edge])
            reads_left[owner] -= 1
            if reads_left[owner] == 1:
                # Its last reader, if ready by now, may free more than it takes.
                for later in _readers_of(a, a.input_tensor[edge]):
                    ready_now = not done[later] and missing[later] == 0
                    if ready_now and _net_bytes(a, later, reads_left) <= 0:
                        frees = heap_push(free_key, free_item, frees, base[later], later)
        for later in _later_ops(a, op):
            missing[later] -= 1
            if missing[later] == 0:
                ready = heap_push(key, item, ready, base[later], later)
                if _net_bytes(a, later, reads_left) <= 0 and not _is_source(a, later):
                    frees = heap_push(free_key, free_item, frees, base[later], later)


@numba.njit(cache=True)
def _is_source(a: GraphArrays, op: int) -> bool:
    return a.input_ptr[op] == a.input_ptr[op + 1]


@numba.njit(cache=True)
def _readers_of(a: GraphArrays, t: int) -> ndarray:
    return a.consumer_op[a.consumer_ptr[t] : a.consumer_ptr[t + 1]]


@numba.njit(cache=True)
def _later_ops(a: GraphArrays, op: int) -> ndarray:
    """Ops that wait for this one, once for each tensor or order edge."""
    begin, end = a.output_ptr[op], a.output_ptr[op + 1]
    data = a.consumer_op[a.consumer_ptr[begin] : a.consumer_ptr[end]]
    order = a.before_op[a.before_ptr[op] : a.before_ptr[op + 1]]
    return np.concatenate((data, order))
