"""The order that needs the least memory on one device, by annealing.

Problem: run all ops of a graph on one device, in a topological order whose peak is the smallest.

Idea: move one op at a time to another position between the last op that it waits for and the first
that waits for it. Only positions between the old and the new one change what they hold, so a move
costs its distance, plus the readers of what the op reads. The objective is the bytes above a
target, a little below the smallest peak so far, summed over positions; moves that increase it are
accepted with a probability that falls to zero. Then lifetimes are shortened within that peak:
random moves below the target leave much in memory that could be freed, which a search for second
calls would have to undo.

A graph in the order of eager execution is near its least peak (GPT-2: no gain, an unrolled RNN: 3.5
%); a graph whose file states no order is not (networks of 250 and 1,000 random ops: 17 and 6 %
below the orders of `low_memory_orders`). O(min(`WORK`, `WORK_OF_PAIR` n²)), at most a second.
"""

# Kernels: an element of an array is a number, which pyright cannot see.
# pyright: reportReturnType=false

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64
from numpy import ndarray

from pardnn.graph.csr import RESIDUAL, GraphArrays, op_edges, transposed
from pardnn.kernels.jit import helper, kernel
from pardnn.kernels.random import random_number
from pardnn.kernels.sorting import inverse_permutation
from pardnn.place.by_content import ByContent
from pardnn.place.ordering.low_memory_orders import eager_free_positions

#: Places looked at in all, at most, and for each pair of ops: of 14 ops 2e8 would find no more.
WORK, WORK_OF_PAIR = 2e8, 2e3
#: What a move costs beside places; the part of the work for lifetimes.
EACH, SHORTENING = 20, 0.25
#: The target, as a part of the smallest peak; the first temperature, likewise.
TARGET, HOT = 0.99, 0.02


class Step(NamedTuple):
    """Dependences, and the storages (by the tensor that owns them) that ops make and read.

    Attributes:
        before_ptr: Rows of `before`, by op.
        before: Ops that an op waits for.
        after_ptr: Rows of `after`, by op.
        after: Ops that wait for an op.
        read_ptr: Rows of `read`, by op.
        read: Storages that an op reads or makes views of.
        reader_ptr: Rows of `reader`, by storage.
        reader: Ops that read a storage.
        maker: Of each storage.
        size: Bytes of each storage; 0 for residual ones, and for tensors that own none.
        takes: Bytes of the storages that an op makes.
        workspace: Bytes that an op holds while it runs.
    """

    before_ptr: Int64[ndarray, " n+1"]
    before: Int64[ndarray, " b"]
    after_ptr: Int64[ndarray, " n+1"]
    after: Int64[ndarray, " b"]
    read_ptr: Int64[ndarray, " n+1"]
    read: Int64[ndarray, " r"]
    reader_ptr: Int64[ndarray, " t+1"]
    reader: Int64[ndarray, " r"]
    maker: Int64[ndarray, " t"]
    size: Int64[ndarray, " t"]
    takes: Int64[ndarray, " n"]
    workspace: Int64[ndarray, " n"]


class Order(NamedTuple):
    """An order, and the bytes held along it.

    Attributes:
        op: By place.
        place: By op.
        last: The op that uses each storage last.
        gives: Bytes of the storages that each op uses last.
        live: Bytes held before each place.
        held: Bytes held while the op of each place runs.
    """

    op: Int64[ndarray, " n"]
    place: Int64[ndarray, " n"]
    last: Int64[ndarray, " t"]
    gives: Int64[ndarray, " n"]
    live: Int64[ndarray, " n+1"]
    held: Int64[ndarray, " n"]


def least_peak_positions(arrays: GraphArrays) -> Int64[ndarray, " n"]:
    """Return positions in an order with a small peak on one device, at most that of eager frees.

    Args:
        arrays: The graph.
    """
    return _known_positions(ByContent(arrays))


@functools.lru_cache(maxsize=8)
def _known_positions(key: ByContent[GraphArrays]) -> Int64[ndarray, " n"]:
    position = eager_free_positions(key.arrays)
    if len(position) < 2:
        return position
    step, best = _step_of(key.arrays), np.argsort(position).astype(np.int64)
    work = min(WORK, WORK_OF_PAIR * len(best) ** 2)
    _search_kernel(step, _room_for_order(step), work, SHORTENING, best)
    position = inverse_permutation(best)
    position.setflags(write=False)
    return position


def _step_of(arrays: GraphArrays) -> Step:
    n, pairs = arrays.num_ops, op_edges(arrays)
    owns = (arrays.tensor_alias < 0) & (arrays.memory[arrays.tensor_op] != RESIDUAL)
    size = np.where(owns, arrays.tensor_bytes, 0)
    reader = np.repeat(np.arange(n), np.diff(arrays.input_ptr))
    views = np.flatnonzero(arrays.tensor_alias >= 0)
    tensor = np.concatenate([arrays.input_tensor, views])
    op, storage = np.concatenate([reader, arrays.tensor_op[views]]), arrays.tensor_owner[tensor]
    counts = size[storage] > 0
    rows = np.unique(np.stack([op[counts], storage[counts]]), axis=1)
    ptr = np.concatenate([[0], np.cumsum(np.bincount(rows[0], minlength=n))])
    after_ptr = np.concatenate([[0], np.cumsum(np.bincount(pairs[:, 0], minlength=n))])
    before_ptr, before = transposed(after_ptr, pairs[:, 1], n)
    reader_ptr, reader = transposed(ptr, rows[1], arrays.num_tensors)
    takes = np.bincount(arrays.tensor_op, weights=size, minlength=n)
    found = (before_ptr, before, after_ptr, pairs[:, 1], ptr, rows[1], reader_ptr, reader,
             arrays.tensor_op, size, takes, arrays.workspace)  # fmt: skip
    return Step(*(np.ascontiguousarray(each, dtype=np.int64) for each in found))


def _room_for_order(step: Step) -> Order:
    n, t = len(step.takes), len(step.size)
    return Order(*(np.zeros(size, dtype=np.int64) for size in (n, n, t, n, n + 1, n)))


@helper
def _last_user(step: Step, place: Int64[ndarray, " n"], storage: int) -> int:
    last = step.maker[storage]
    for r in range(step.reader_ptr[storage], step.reader_ptr[storage + 1]):
        if place[step.reader[r]] > place[last]:
            last = step.reader[r]
    return last


@helper
def _hold(step: Step, o: Order, first: int, end: int) -> int:
    """Find what is held at some places, and return the most."""
    live, most = o.live[first], 0
    for place in range(first, end):
        op = o.op[place]
        live += step.takes[op]
        o.held[place] = live + step.workspace[op]
        most = max(most, o.held[place])
        live -= o.gives[op]
        o.live[place + 1] = live
    return most


@helper
def _over(o: Order, first: int, end: int, target: float) -> float:
    """Return the bytes held above a target, summed over places."""
    over = 0.0
    for place in range(first, end):
        over += max(0, o.held[place] - target)
    return over


@helper
def _move(step: Step, o: Order, op: int, to: int) -> int:
    """Move an op to a place, and return the most that is held at a place that changes."""
    at = o.place[op]
    way = 1 if to > at else -1
    for place in range(at, to, way):
        other = o.op[place + way]
        o.op[place] = other
        o.place[other] = place
    o.op[to] = op
    o.place[op] = to
    for r in range(step.read_ptr[op], step.read_ptr[op + 1]):
        storage = step.read[r]
        last = _last_user(step, o.place, storage)
        if last != o.last[storage]:
            o.gives[o.last[storage]] -= step.size[storage]
            o.gives[last] += step.size[storage]
            o.last[storage] = last
    return _hold(step, o, min(at, to), max(at, to) + 1)


@helper
def _another_place(step: Step, o: Order, op: int, state: Int64[ndarray, " 1"]) -> int:
    """Return a place that an op may move to: the first, the last, or one between; its own: none."""
    low, high = 0, len(o.op) - 1
    for b in range(step.before_ptr[op], step.before_ptr[op + 1]):
        low = max(low, o.place[step.before[b]] + 1)
    for a in range(step.after_ptr[op], step.after_ptr[op + 1]):
        high = min(high, o.place[step.after[a]] - 1)
    draw = random_number(state)
    if draw < 0.3:
        return low
    if draw < 0.6:
        return high
    return low + int(random_number(state) * (high - low + 1))


@helper
def _begin(step: Step, o: Order, op: Int64[ndarray, " n"]) -> int:
    """Take over an order, and return its peak."""
    o.op[:] = op
    o.gives[:] = 0
    for place in range(len(op)):
        o.place[op[place]] = place
    for storage in range(len(step.size)):
        o.last[storage] = _last_user(step, o.place, storage)
        o.gives[o.last[storage]] += step.size[storage]
    return _hold(step, o, np.int64(0), len(op))


@helper
def _anneal(
    step: Step, o: Order, work: float, state: Int64[ndarray, " 1"], best: Int64[ndarray, " n"]
) -> None:
    """Lower the peak of the order in `best`."""
    n, peak = len(o.op), _begin(step, o, best)
    target = TARGET * peak
    total, done = _over(o, np.int64(0), n, target), 0.0
    least = total
    while done < work:
        op = int(random_number(state) * n)
        at, to = o.place[op], _another_place(step, o, op, state)
        first, end = min(at, to), max(at, to) + 1
        done += EACH + 3 * (end - first)
        if at == to:
            continue
        over = _over(o, first, end, target)
        _move(step, o, op, to)
        more = _over(o, first, end, target) - over
        heat = HOT * peak * (1 - done / work)
        if more > 0 and more >= -math.log(1 - random_number(state)) * heat:
            _move(step, o, op, at)
            continue
        total += more
        if total < least:
            least, top = total, o.held.max()
            if top < peak:
                peak, target = top, TARGET * top
                total = _over(o, np.int64(0), n, target)
                least = total
                best[:] = o.op


@helper
def _shorten(
    step: Step, o: Order, work: float, state: Int64[ndarray, " 1"], best: Int64[ndarray, " n"]
) -> None:
    """Hold less at other places than the fullest, too: `best` is changed within its peak."""
    n, peak, done = len(o.op), _begin(step, o, best), 0.0
    while done < work:
        op = int(random_number(state) * n)
        at, to = o.place[op], _another_place(step, o, op, state)
        first, end = min(at, to), max(at, to) + 1
        done += EACH + 3 * (end - first)
        if at != to:
            before = _over(o, first, end, 0.0)
            most = _move(step, o, op, to)
            if most > peak or _over(o, first, end, 0.0) > before:
                _move(step, o, op, at)
    best[:] = o.op


@kernel
def _search_kernel(
    step: Step, o: Order, work: float, shortening: float, best: Int64[ndarray, " n"]
) -> None:
    """Change the order in `best`; `shortening` is the part of the work for lifetimes."""
    state = np.ones(1, dtype=np.int64)
    _anneal(step, o, (1 - shortening) * work, state, best)
    _shorten(step, o, shortening * work, state, best)
