"""Adjacency of ops, data and order edges alike: what longest paths and list scheduling walk.

`GraphArrays` leads from an op over its tensors to their consumers. A kernel that only follows edges
reads one row per edge here: neighbouring rows are neighbours in memory, and a kernel takes two
arrays instead of nine, which it is compiled for and called with.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Int64
from numpy import ndarray

from pardnn.graph.csr import GraphArrays

#: Columns of an edge's row.
OTHER, TENSOR, BYTES = 0, 1, 2


class Edges(NamedTuple):
    """Edges of each op in one direction, as compressed sparse rows.

    Attributes:
        ptr: `edge[ptr[i]:ptr[i + 1]]` are those of op i, data first, then order.
        edge: The op at the other end; the tensor, -1 for order alone; its bytes, -1 for order.
    """

    ptr: Int64[ndarray, " n+1"]
    edge: Int64[ndarray, "x 3"]


class Adjacency(NamedTuple):
    """Both directions, and the orders in which longest paths are found.

    Attributes:
        order: Ops, each after all its predecessors.
        reverse: Ops, each after all its successors.
        successors: Edges to the ops that wait for an op, once per tensor.
        predecessors: Edges to the ops that it waits for.
    """

    order: Int64[ndarray, " n"]
    reverse: Int64[ndarray, " n"]
    successors: Edges
    predecessors: Edges


def adjacency_of(arrays: GraphArrays) -> Adjacency:
    """Return the edges of a graph. O(ops + edges)."""
    return Adjacency(
        order=arrays.topological.copy(),
        reverse=arrays.topological[::-1].copy(),
        successors=successor_edges(arrays),
        predecessors=predecessor_edges(arrays),
    )


def successor_edges(arrays: GraphArrays) -> Edges:
    """Return for each op its consumers, then those that only order puts after it."""
    tensor = np.repeat(np.arange(arrays.num_tensors), np.diff(arrays.consumer_ptr))
    data_ptr = arrays.consumer_ptr[arrays.output_ptr]
    return _joined(
        arrays, data_ptr, arrays.consumer_op, tensor, arrays.before_ptr, arrays.before_op
    )


def predecessor_edges(arrays: GraphArrays) -> Edges:
    """Return for each op its producers, then those that only order puts before it."""
    tensor = arrays.input_tensor
    producer = arrays.tensor_op[tensor]
    return _joined(arrays, arrays.input_ptr, producer, tensor, arrays.after_ptr, arrays.after_op)


def _joined(
    arrays: GraphArrays,
    data_ptr: Int64[ndarray, " p"],
    other: Int64[ndarray, " e"],
    tensor: Int64[ndarray, " e"],
    order_ptr: Int64[ndarray, " p"],
    order_op: Int64[ndarray, " a"],
) -> Edges:
    edge = np.empty((len(other) + len(order_op), 3), dtype=np.int64)
    data: slice | ndarray = slice(None)
    if len(order_op) > 0:
        data = np.arange(len(other)) + np.repeat(order_ptr[:-1], np.diff(data_ptr))
        order = np.arange(len(order_op)) + np.repeat(data_ptr[1:], np.diff(order_ptr))
        edge[order, OTHER] = order_op
        edge[order, TENSOR:] = -1
    edge[data, OTHER] = other
    edge[data, TENSOR] = tensor
    edge[data, BYTES] = arrays.tensor_bytes[tensor]
    return Edges(data_ptr + order_ptr, edge)
