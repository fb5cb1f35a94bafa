"""Bytes held along one global order of the ops, per device, and where storages are alive.

Messages take their latest slot (see `squeeze`), so a move changes the curves only where its own
tensors live, and they are kept exact in one segment tree per device. Above `MOST_LEAVES` ops,
neighbours in the order share a leaf and are counted as if they ran at once: never too little, and
little too much.
"""

# Kernels: an element of an array is a number, which pyright cannot see.
# pyright: reportArgumentType=false, reportReturnType=false

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int64
from numpy import ndarray

from pardnn.graph.csr import RESIDUAL, GraphArrays
from pardnn.kernels.jit import helper
from pardnn.kernels.segment_tree import RangeMax, add_range
from pardnn.sim.transfers import Transfers, transfers_of_edges

#: Leaves of a tree: the trees of 16 devices then take 16 MiB.
MOST_LEAVES = 1 << 15


class Curves(NamedTuple):
    """Bytes held on each device along a global order, and what they come from.

    Attributes:
        rank: Position of each op in the order.
        place: Device of each op.
        most: Usable bytes of each device.
        top: One segment tree per device, see `rangemax`.
        add: Of the same trees.
        shift: Leaf of an op is its rank without so many low bits.
        bits: Two to this power is the number of leaves.
        owner: Tensor that owns the storage of each tensor.
        alias_ptr: Tensors that share the storage that tensor t owns, itself included, are
            `alias[alias_ptr[t]:alias_ptr[t + 1]]`.
        alias: The tensors.
        consumer_ptr: As in the graph.
        consumer_op: The same.
        maker: Op of each tensor.
        size: Bytes of each tensor.
        residual: Whether an op's outputs stay.
        workspace: Bytes of each op.
        read: First and last rank at which each device reads a tensor: scratch.
    """

    rank: Int64[ndarray, " n"]
    place: Int64[ndarray, " n"]
    most: Int64[ndarray, " k"]
    top: Int64[ndarray, "k 2s"]
    add: Int64[ndarray, "k 2s"]
    shift: int
    bits: int
    owner: Int64[ndarray, " t"]
    alias_ptr: Int64[ndarray, " t+1"]
    alias: Int64[ndarray, " t"]
    consumer_ptr: Int64[ndarray, " t+1"]
    consumer_op: Int64[ndarray, " e"]
    maker: Int64[ndarray, " t"]
    size: Int64[ndarray, " t"]
    residual: Bool[ndarray, " n"]
    workspace: Int64[ndarray, " n"]
    read: Int64[ndarray, "k 2"]


def curves_of(
    arrays: GraphArrays,
    place: Int64[ndarray, " n"],
    rank: Int64[ndarray, " n"],
    most: Int64[ndarray, " k"],
) -> Curves:
    """Return the curves of a placement; arguments as in `held_along`."""
    return held_along(arrays, place, rank, most).curves


class Held(NamedTuple):
    """What a placement holds along an order.

    Attributes:
        curves: Its curves.
        lives: What they come from.
        least: Bytes that each device holds at some leaf, in any order of the leaf's ops: what
            begins or ends there is left out.
    """

    curves: Curves
    lives: Lives
    least: Int64[ndarray, " k"]


def held_along(
    arrays: GraphArrays,
    place: Int64[ndarray, " n"],
    rank: Int64[ndarray, " n"],
    most: Int64[ndarray, " k"],
) -> Held:
    """Return what a placement holds along an order. O(ops + edges + leaves devices).

    Args:
        arrays: The graph.
        place: Device of each op; groups are together.
        rank: Position of each op in a topological order of all ops.
        most: Usable bytes per device.
    """
    a, k = arrays, len(most)
    bits = max(1, int(a.num_ops - 1).bit_length())
    shift = max(0, bits - (MOST_LEAVES.bit_length() - 1))
    owner = a.tensor_owner
    counts = np.bincount(owner, minlength=a.num_tensors)
    own = np.arange(a.num_tensors) == owner
    alias = np.arange(a.num_tensors) if own.all() else np.argsort(owner, kind="stable")
    curves = Curves(
        rank=np.ascontiguousarray(rank, dtype=np.int64),
        place=np.array(place, dtype=np.int64),
        most=most,
        top=np.empty((k, 2 << (bits - shift)), dtype=np.int64),
        add=np.zeros((k, 2 << (bits - shift)), dtype=np.int64),
        shift=shift,
        bits=bits - shift,
        owner=owner,
        alias_ptr=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        alias=alias.astype(np.int64),
        consumer_ptr=a.consumer_ptr,
        consumer_op=a.consumer_op,
        maker=a.tensor_op,
        size=a.tensor_bytes,
        residual=a.memory == RESIDUAL,
        workspace=a.workspace,
        read=np.empty((k, 2), dtype=np.int64),
    )
    lives = lives_of(curves)
    return Held(curves, lives, _fill(curves, lives))


class Lives(NamedTuple):
    """From which rank to which one, both included, storages and sent copies are held.

    Attributes:
        begin: Of each tensor's storage where it is made.
        end: The same; tensors that own no storage extend the life of their owner's.
        sent: The messages.
        first: First rank at which a message is read.
        last: Last one.
    """

    begin: Int64[ndarray, " t"]
    end: Int64[ndarray, " t"]
    sent: Transfers
    first: Int64[ndarray, " m"]
    last: Int64[ndarray, " m"]


def lives_of(c: Curves) -> Lives:
    """Return where storages are held, for the placement as it is now. O(ops + edges)."""
    rank, home = c.rank, c.place[c.maker]
    sent = transfers_of_edges(c.consumer_ptr, c.consumer_op, c.maker, c.place, len(c.most))
    local = c.place[c.consumer_op] == np.repeat(home, np.diff(c.consumer_ptr))
    read = rank[sent.reader]
    end = rows(np.maximum, np.where(local, rank[c.consumer_op], -1), c.consumer_ptr, rank[c.maker])
    nothing = np.full(len(sent.tensor), len(rank))
    first = rows(np.minimum, read, sent.reader_ptr, nothing)
    last = rows(np.maximum, read, sent.reader_ptr, -nothing)
    end = rows(np.maximum, first - 1, sent.of_tensor, end)
    if has_views(c):
        np.maximum.at(end, c.owner, end.copy())
    stays = c.residual[c.maker]
    begin = np.where(stays, 0, rank[c.maker])
    return Lives(begin, np.where(stays, len(rank) - 1, end), sent, first, last)


def has_views(c: Curves) -> bool:
    """Whether some tensor shares the storage of another."""
    return bool((c.owner != np.arange(len(c.owner))).any())


def _fill(c: Curves, lives: Lives) -> Int64[ndarray, " k"]:
    """Make the trees, all storages at once: the sum of what `count_storage` adds for each.

    Returns `least`, see `Held`.
    """
    own = np.flatnonzero(c.owner == np.arange(len(c.owner)))
    works = np.flatnonzero(c.workspace > 0)
    at, sent = c.rank[works], lives.sent
    device = np.concatenate([c.place[c.maker[own]], sent.target, c.place[works]])
    begin = np.concatenate([lives.begin[own], lives.first, at]) >> c.shift
    end = np.concatenate([lives.end[own], lives.last, at]) >> c.shift
    size = np.concatenate([c.size[own], c.size[sent.tensor], c.workspace[works]])
    leaves = c.top.shape[1] >> 1
    begins = np.zeros((len(c.most), leaves), dtype=np.int64)
    ends = np.zeros((len(c.most), leaves), dtype=np.int64)
    np.add.at(begins.reshape(-1), device * leaves + begin, size)
    np.add.at(ends.reshape(-1), device * leaves + end, size)
    held = c.top[:, leaves:]
    np.cumsum(begins, axis=1, out=held)
    held[:, 1:] -= np.cumsum(ends[:, :-1], axis=1)
    least = (held - begins - ends).max(axis=1)
    while leaves > 1:
        pairs = c.top[:, leaves : 2 * leaves].reshape(len(c.most), -1, 2)
        leaves //= 2
        pairs.max(axis=2, out=c.top[:, leaves : 2 * leaves])
    return least


def rows(ufunc: np.ufunc, values: ndarray, ptr: ndarray, start: ndarray) -> ndarray:
    """Return the values of each row and its start, joined by a function of two numbers."""
    result, some = start.copy(), np.flatnonzero(ptr[:-1] < ptr[1:])
    if len(some) > 0:
        result[some] = ufunc(result[some], ufunc.reduceat(values, ptr[some]))
    return result


@helper
def count_storage(c: Curves, owner: int, sign: int) -> None:
    """Add (sign 1) or take away (-1) what a storage and its sent copies hold."""
    home, begin = c.place[c.maker[owner]], c.rank[c.maker[owner]]
    end = begin
    for i in range(c.alias_ptr[owner], c.alias_ptr[owner + 1]):
        t = c.alias[i]
        end = max(end, c.rank[c.maker[t]])
        if c.consumer_ptr[t] == c.consumer_ptr[t + 1]:
            continue
        c.read[:, 0], c.read[:, 1] = len(c.rank), -1
        for e in range(c.consumer_ptr[t], c.consumer_ptr[t + 1]):
            q, at = c.place[c.consumer_op[e]], c.rank[c.consumer_op[e]]
            c.read[q, 0], c.read[q, 1] = min(c.read[q, 0], at), max(c.read[q, 1], at)
        for q in range(len(c.most)):
            first, last = c.read[q, 0], c.read[q, 1]
            if q == home or last < 0:
                end = max(end, last)
                continue
            end = max(end, first - 1)
            tree = RangeMax(c.top[q], c.add[q])
            add_range(tree, first >> c.shift, (last >> c.shift) + 1, sign * c.size[t])
    if c.residual[c.maker[owner]]:
        begin, end = 0, len(c.rank) - 1
    tree = RangeMax(c.top[home], c.add[home])
    add_range(tree, begin >> c.shift, (end >> c.shift) + 1, sign * c.size[owner])
