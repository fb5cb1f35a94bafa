"""Tracking memory consumption, M_cons(pe, t) (ParDNN, Eq. 4.3; thesis, section 4.1.2).

Eq. 4.3 counts on each device, at each time: residual storages; what is being computed; and what was
computed or received and still has a consumer there to come. Here time is the position in one global
order of all ops, and the *memory profile* is the bytes held at each position. A storage is held
from the op that makes it to its last use on its device, a received copy from its first to its last
consumer, and a sent tensor until just before the copy's first consumer.

The profile is kept exact while ops move, in one segment tree of range maxima per device: a move
changes it only within the live ranges of the storages that the op makes or reads.
O(ops + edges + leaves devices) to build, O(consumers log leaves) per storage that changes.

Deviations: the thesis counts over emulated time, which depends on the clock; an order does not, and
the peak of a plan that keeps to it is exact. Messages take their latest slot (see
`ordering.memory_bounded`), or leave at once, as in Eq. 4.3 (`eager`). Workspaces are counted while
their op runs; a view counts nothing and extends the live range of what it views. Above `MAX_LEAVES`
ops, neighbours in the order share a leaf and are counted as if they ran at once: an upper bound,
and a close one.
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
MAX_LEAVES = 1 << 15


class MemoryProfile(NamedTuple):
    """Bytes held on each device along a global order, and the data they are computed from.

    Attributes:
        position: Of each op in the order.
        place: Device of each op.
        capacity: Usable bytes of each device.
        top: One segment tree per device, see `kernels.segment_tree`.
        add: Of the same trees.
        shift: Leaf of an op is its position shifted right by this many bits.
        owner: Tensor that owns the storage of each tensor.
        alias_ptr: Tensors that share the storage that tensor t owns, itself included, are
            `alias[alias_ptr[t]:alias_ptr[t + 1]]`.
        alias: The tensors.
        consumer_ptr: As in `GraphArrays`.
        consumer_op: As in `GraphArrays`.
        producer: Op of each tensor.
        size: Bytes of each tensor.
        residual: Whether an op's outputs stay from step to step.
        workspace: Bytes of each op.
        read: First and last position at which each device reads a tensor: scratch.
        eager: 1: a message is sent as soon as its tensor is made; 0: in its latest slot.
    """

    position: Int64[ndarray, " n"]
    place: Int64[ndarray, " n"]
    capacity: Int64[ndarray, " k"]
    top: Int64[ndarray, "k 2s"]
    add: Int64[ndarray, "k 2s"]
    shift: int
    owner: Int64[ndarray, " t"]
    alias_ptr: Int64[ndarray, " t+1"]
    alias: Int64[ndarray, " t"]
    consumer_ptr: Int64[ndarray, " t+1"]
    consumer_op: Int64[ndarray, " e"]
    producer: Int64[ndarray, " t"]
    size: Int64[ndarray, " t"]
    residual: Bool[ndarray, " n"]
    workspace: Int64[ndarray, " n"]
    read: Int64[ndarray, "k 2"]
    eager: int = 0


class LiveRanges(NamedTuple):
    """First and last position, inclusive, at which storages and sent copies are live.

    Attributes:
        begin: Of each tensor's storage where it is made.
        end: Its last position; tensors that own no storage extend the range of their owner's.
        sent: The messages.
        first: First position at which a message's copy is held.
        last: Last position at which it is read.
    """

    begin: Int64[ndarray, " t"]
    end: Int64[ndarray, " t"]
    sent: Transfers
    first: Int64[ndarray, " m"]
    last: Int64[ndarray, " m"]


class TrackedMemory(NamedTuple):
    """What a placement holds along an order.

    Attributes:
        profile: Its memory profile.
        live_ranges: What the profile comes from.
        least: Bytes that each device holds at some leaf at least, in any order of the leaf's ops:
            storages that begin or end there are left out.
    """

    profile: MemoryProfile
    live_ranges: LiveRanges
    least: Int64[ndarray, " k"]


def memory_profile_of(
    arrays: GraphArrays,
    place: Int64[ndarray, " n"],
    position: Int64[ndarray, " n"],
    capacity: Int64[ndarray, " k"],
) -> MemoryProfile:
    """Return the memory profile of a placement; `track_memory` returns more.

    Args:
        arrays: The graph.
        place: Device of each op; groups are together.
        position: Of each op in a topological order of all ops.
        capacity: Usable bytes per device.
    """
    return track_memory(arrays, place, position, capacity).profile


def track_memory(
    arrays: GraphArrays,
    place: Int64[ndarray, " n"],
    position: Int64[ndarray, " n"],
    capacity: Int64[ndarray, " k"],
    *,
    eager: bool = False,
) -> TrackedMemory:
    """Return what a placement holds along an order. O(ops + edges + leaves devices).

    Args:
        arrays: The graph.
        place: Device of each op; groups are together.
        position: Of each op in a topological order of all ops.
        capacity: Usable bytes per device.
        eager: Messages leave as soon as their tensors are made, as Eq. 4.3 has it: a device holds
            what has been made, anywhere, and is yet to be read there.
    """
    a, k = arrays, len(capacity)
    bits = max(1, int(a.num_ops - 1).bit_length())
    shift = max(0, bits - (MAX_LEAVES.bit_length() - 1))
    owner = a.tensor_owner
    counts = np.bincount(owner, minlength=a.num_tensors)
    own = np.arange(a.num_tensors) == owner
    alias = np.arange(a.num_tensors) if own.all() else np.argsort(owner, kind="stable")
    profile = MemoryProfile(
        position=np.ascontiguousarray(position, dtype=np.int64),
        place=np.array(place, dtype=np.int64),
        capacity=capacity,
        top=np.empty((k, 2 << (bits - shift)), dtype=np.int64),
        add=np.zeros((k, 2 << (bits - shift)), dtype=np.int64),
        shift=shift,
        owner=owner,
        alias_ptr=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        alias=alias.astype(np.int64),
        consumer_ptr=a.consumer_ptr,
        consumer_op=a.consumer_op,
        producer=a.tensor_op,
        size=a.tensor_bytes,
        residual=a.memory == RESIDUAL,
        workspace=a.workspace,
        read=np.empty((k, 2), dtype=np.int64),
        eager=int(eager),
    )
    live_ranges = live_ranges_of(profile)
    return TrackedMemory(profile, live_ranges, _fill(profile, live_ranges))


def live_ranges_of(p: MemoryProfile) -> LiveRanges:
    """Return the live ranges of storages, for the placement as it is now. O(ops + edges)."""
    position, home = p.position, p.place[p.producer]
    sent = transfers_of_edges(p.consumer_ptr, p.consumer_op, p.producer, p.place, len(p.capacity))
    local = p.place[p.consumer_op] == np.repeat(home, np.diff(p.consumer_ptr))
    read = position[sent.consumer]
    used = np.where(local, position[p.consumer_op], -1)
    end = reduce_rows(np.maximum, used, p.consumer_ptr, position[p.producer])
    nothing = np.full(len(sent.tensor), len(position))
    first = reduce_rows(np.minimum, read, sent.consumer_ptr, nothing)
    last = reduce_rows(np.maximum, read, sent.consumer_ptr, -nothing)
    if p.eager:
        first = position[p.producer[sent.tensor]] + 1
    else:
        end = reduce_rows(np.maximum, first - 1, sent.of_tensor, end)
    if has_views(p):
        np.maximum.at(end, p.owner, end.copy())
    stays = p.residual[p.producer]
    begin = np.where(stays, 0, position[p.producer])
    return LiveRanges(begin, np.where(stays, len(position) - 1, end), sent, first, last)


def has_views(p: MemoryProfile) -> bool:
    """Whether some tensor shares the storage of another."""
    return bool((p.owner != np.arange(len(p.owner))).any())


def _fill(p: MemoryProfile, ranges: LiveRanges) -> Int64[ndarray, " k"]:
    """Make the trees, all storages at once: the sum of what `count_storage` adds for each.

    Returns:
        `TrackedMemory.least`.
    """
    own = np.flatnonzero(p.owner == np.arange(len(p.owner)))
    works = np.flatnonzero(p.workspace > 0)
    at, sent = p.position[works], ranges.sent
    device = np.concatenate([p.place[p.producer[own]], sent.target, p.place[works]])
    begin = np.concatenate([ranges.begin[own], ranges.first, at]) >> p.shift
    end = np.concatenate([ranges.end[own], ranges.last, at]) >> p.shift
    size = np.concatenate([p.size[own], p.size[sent.tensor], p.workspace[works]])
    leaves = p.top.shape[1] >> 1
    begins = np.zeros((len(p.capacity), leaves), dtype=np.int64)
    ends = np.zeros((len(p.capacity), leaves), dtype=np.int64)
    np.add.at(begins.reshape(-1), device * leaves + begin, size)
    np.add.at(ends.reshape(-1), device * leaves + end, size)
    live = p.top[:, leaves:]
    np.cumsum(begins, axis=1, out=live)
    live[:, 1:] -= np.cumsum(ends[:, :-1], axis=1)
    least = (live - begins - ends).max(axis=1)
    while leaves > 1:
        below = p.top[:, leaves : 2 * leaves]
        leaves //= 2
        np.maximum(below[:, ::2], below[:, 1::2], out=p.top[:, leaves : 2 * leaves])
    return least


def reduce_rows(
    ufunc: np.ufunc,
    values: Int64[ndarray, " x"],
    ptr: Int64[ndarray, " p"],
    start: Int64[ndarray, " r"],
) -> Int64[ndarray, " r"]:
    """Return each row's values and its start, reduced by a function of two numbers.

    Args:
        ufunc: The function.
        values: Of all rows.
        ptr: Where the rows begin.
        start: One number per row.
    """
    result, some = start.copy(), np.flatnonzero(ptr[:-1] < ptr[1:])
    if len(some) > 0:
        result[some] = ufunc(result[some], ufunc.reduceat(values, ptr[some]))
    return result


@helper
def count_storage(p: MemoryProfile, owner: int, sign: int) -> None:
    """Add (sign 1) or take away (-1) what a storage and its sent copies hold.

    Args:
        p: The profile; changed.
        owner: Tensor that owns the storage.
        sign: 1 or -1.
    """
    home, begin = p.place[p.producer[owner]], p.position[p.producer[owner]]
    end = begin
    for i in range(p.alias_ptr[owner], p.alias_ptr[owner + 1]):
        t = p.alias[i]
        end = max(end, p.position[p.producer[t]])
        if p.consumer_ptr[t] == p.consumer_ptr[t + 1]:
            continue
        p.read[:, 0], p.read[:, 1] = len(p.position), -1
        for e in range(p.consumer_ptr[t], p.consumer_ptr[t + 1]):
            q, at = p.place[p.consumer_op[e]], p.position[p.consumer_op[e]]
            p.read[q, 0], p.read[q, 1] = min(p.read[q, 0], at), max(p.read[q, 1], at)
        for q in range(len(p.capacity)):
            first, last = p.read[q, 0], p.read[q, 1]
            if q == home or last < 0:
                end = max(end, last)
                continue
            if p.eager:
                first = p.position[p.producer[t]] + 1
            else:
                end = max(end, first - 1)
            tree = RangeMax(p.top[q], p.add[q])
            add_range(tree, first >> p.shift, (last >> p.shift) + 1, sign * p.size[t])
    if p.residual[p.producer[owner]]:
        begin, end = 0, len(p.position) - 1
    tree = RangeMax(p.top[home], p.add[home])
    add_range(tree, begin >> p.shift, (end >> p.shift) + 1, sign * p.size[owner])
