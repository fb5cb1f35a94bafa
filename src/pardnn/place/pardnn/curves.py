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

import numba
import numpy as np
from jaxtyping import Bool, Int64
from numpy import ndarray

from pardnn.graph.csr import RESIDUAL, GraphArrays
from pardnn.place.rangemax import RangeMax, add_range

#: Leaves of a tree: the trees of 16 devices then take 16 MiB.
MOST_LEAVES = 1 << 15
#: Blocks of the order in the index of what is alive.
BLOCKS = 1 << 10


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
        near: Bits of the devices that may hold each storage or a copy of it; device d has bit
            d modulo 64. A device that no longer does keeps its bit.
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
    near: Int64[ndarray, " t"]
    read: Int64[ndarray, "k 2"]


def curves_of(
    arrays: GraphArrays,
    place: Int64[ndarray, " n"],
    rank: Int64[ndarray, " n"],
    most: Int64[ndarray, " k"],
) -> Curves:
    """Return the curves of a placement.

    Args:
        arrays: The graph.
        place: Device of each op; groups are together.
        rank: Position of each op in a topological order of all ops.
        most: Usable bytes per device.
    """
    a, k = arrays, len(most)
    bits = max(1, int(a.num_ops - 1).bit_length())
    shift = max(0, bits - (MOST_LEAVES.bit_length() - 1))
    owner = storage_owner(a)
    counts = np.bincount(owner, minlength=a.num_tensors)
    own = np.arange(a.num_tensors) == owner
    alias = np.arange(a.num_tensors) if own.all() else np.argsort(owner, kind="stable")
    curves = Curves(
        rank=np.ascontiguousarray(rank, dtype=np.int64),
        place=np.array(place, dtype=np.int64),
        most=most,
        top=np.zeros((k, 2 << (bits - shift)), dtype=np.int64),
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
        near=np.zeros(a.num_tensors, dtype=np.int64),
        read=np.empty((k, 2), dtype=np.int64),
    )
    _fill_kernel(curves)
    return curves


def storage_owner(arrays: GraphArrays) -> Int64[ndarray, " t"]:
    """Return the tensor that owns the storage of each tensor. O(tensors log longest chain)."""
    owner = np.where(arrays.tensor_alias < 0, np.arange(arrays.num_tensors), arrays.tensor_alias)
    while True:
        further = owner[owner]
        if np.array_equal(further, owner):
            return owner
        owner = further


def alive_index(curves: Curves) -> tuple[Int64[ndarray, " m"], Int64[ndarray, " i"]]:
    """Index the storages by the blocks of the order that they may be alive in.

    A segment tree over `BLOCKS` blocks: a storage, from its maker to its last reader on any
    device, is listed in the few nodes that cover it, so that the lists from a leaf to the root hold
    what may be alive in that block. Returns compressed sparse rows over the nodes.
    """
    c = curves
    readers = np.repeat(np.arange(len(c.maker)), np.diff(c.consumer_ptr))
    last = c.rank[c.maker]
    np.maximum.at(last, readers, c.rank[c.consumer_op])
    end = c.rank[c.maker]
    np.maximum.at(end, c.owner, last)
    held = np.flatnonzero((c.owner == np.arange(len(c.owner))) & (c.size > 0))
    begin, end = c.rank[c.maker[held]], end[held]
    stays = c.residual[c.maker[held]]
    begin[stays], end[stays] = 0, len(c.rank) - 1
    left, right = (((rank >> c.shift) * BLOCKS >> c.bits) + BLOCKS for rank in (begin, end))
    right += 1
    nodes, items = [], []
    while len(held) > 0:
        for odd, node in ((left & 1 == 1, left), (right & 1 == 1, right - 1)):
            nodes.append(node[odd])
            items.append(held[odd])
        left, right = (left + 1) >> 1, right >> 1
        open_ = left < right
        held, left, right = held[open_], left[open_], right[open_]
    node = np.concatenate([np.empty(0, dtype=np.int64), *nodes])
    item = np.concatenate([np.empty(0, dtype=np.int64), *items])
    counts = np.bincount(node, minlength=2 * BLOCKS)
    ptr = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    return ptr, item[np.argsort(node.astype(np.int16), kind="stable")]


@numba.njit(cache=True)
def _fill_kernel(c: Curves) -> None:
    for op in range(len(c.rank)):
        if c.workspace[op] > 0:
            at, d = c.rank[op] >> c.shift, c.place[op]
            add_range(RangeMax(c.top[d], c.add[d]), at, at + 1, c.workspace[op])
    for t in range(len(c.owner)):
        c.near[c.owner[t]] |= 1 << (c.place[c.maker[t]] & 63)
        for e in range(c.consumer_ptr[t], c.consumer_ptr[t + 1]):
            c.near[c.owner[t]] |= 1 << (c.place[c.consumer_op[e]] & 63)
        if c.owner[t] == t:
            count_storage(c, t, 1)


@numba.njit(cache=True)
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
