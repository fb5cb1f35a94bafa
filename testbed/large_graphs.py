"""Graphs of up to millions of ops as arrays: no file is read and no name is looked at."""

from __future__ import annotations

import numpy as np
from numpy import ndarray

from pardnn.graph.csr import GraphArrays, transposed
from pardnn.sim.machine import Machine

BANDWIDTH, LATENCY, MEAN_SECONDS = 140e9, 25e-6, 1e-3
DEVICES = 16
#: Number of ops, and per edge its consumer and its producer.
Shape = tuple[int, ndarray, ndarray]


def layered(num_ops: int, num_edges: int, rng: np.random.Generator) -> Shape:
    """Layers of sqrt(n) ops; each reads one of the layer before, some more of the three before."""
    width = max(2, round(num_ops**0.5))
    reader = np.concatenate(
        [np.arange(width, num_ops), rng.integers(width, num_ops, max(0, num_edges - num_ops))]
    )
    back = np.where(np.arange(len(reader)) < num_ops - width, 1, rng.integers(1, 4, len(reader)))
    first = np.maximum(reader - reader % width - back * width, 0)
    return num_ops, reader, first + rng.integers(0, width, len(reader))


def chain(num_ops: int, num_edges: int, rng: np.random.Generator) -> Shape:
    """Every op reads the one before."""
    del num_edges, rng
    return num_ops, np.arange(1, num_ops), np.arange(num_ops - 1)


def fan_out(num_ops: int, num_edges: int, rng: np.random.Generator) -> Shape:
    """All ops read the first."""
    del num_edges, rng
    return num_ops, np.arange(1, num_ops), np.zeros(num_ops - 1, dtype=np.int64)


def fan_in(num_ops: int, num_edges: int, rng: np.random.Generator) -> Shape:
    """The last op reads all."""
    del num_edges, rng
    return num_ops, np.full(num_ops - 1, num_ops - 1), np.arange(num_ops - 1)


def isolated(num_ops: int, num_edges: int, rng: np.random.Generator) -> Shape:
    """No edges."""
    del num_edges, rng
    return num_ops, np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)


def _frozen(values: ndarray) -> ndarray:
    array = np.ascontiguousarray(values, dtype=np.int64)
    array.setflags(write=False)
    return array


def arrays_of(shape: Shape, tensor_bytes: ndarray) -> GraphArrays:
    """Return the arrays of a graph in which op i makes tensor i."""
    n = shape[0]
    key = np.unique(shape[1] * n + shape[2])
    reader, maker = key // n, _frozen(key % n)
    ptr = _frozen(np.concatenate([[0], np.cumsum(np.bincount(reader, minlength=n))]))
    consumer_ptr, consumer_op = transposed(ptr, maker, n)
    ones, none, rows = _frozen(np.arange(n)), _frozen(np.empty(0)), _frozen(np.zeros(n + 1))
    return GraphArrays(
        output_ptr=_frozen(np.arange(n + 1)),
        input_ptr=ptr,
        input_tensor=maker,
        after_ptr=rows,
        after_op=none,
        before_ptr=rows,
        before_op=none,
        consumer_ptr=consumer_ptr,
        consumer_op=consumer_op,
        tensor_op=ones,
        tensor_bytes=_frozen(tensor_bytes),
        tensor_alias=_frozen(np.full(n, -1)),
        tensor_owner=ones,
        workspace=_frozen(np.zeros(n)),
        memory=_frozen(np.zeros(n)),
        group=ones,
        topological=ones,
    )


def problem(shape: Shape, rng: np.random.Generator) -> tuple[GraphArrays, Machine]:
    """Return a graph with a CCR of 1 at most, and equal devices."""
    n = shape[0]
    seconds = rng.gamma(2.0, MEAN_SECONDS / 2, n)
    readers = np.bincount(shape[2], minlength=n)
    room = max(0.0, seconds.sum() - LATENCY * readers.sum())
    size = rng.uniform(0.2, 1.8, n) * room * BANDWIDTH / max(int(readers.sum()), 1)
    apart = ~np.eye(DEVICES, dtype=bool)
    machine = Machine(
        seconds=np.ascontiguousarray(seconds[None, :]),
        device_class=np.zeros(DEVICES, dtype=np.int64),
        latency=np.where(apart, LATENCY, 0.0),
        bandwidth=np.where(apart, BANDWIDTH, np.inf),
        serial=0,
    )
    return arrays_of(shape, size), machine
