"""Memory potential, M_pot(n, t) (ParDNN; thesis, Table 4.2 and section 4.1.2).

M_pot is the memory that leaves a device at time t if n leaves it: the outputs of predecessors whose
last consumer there is n, and n's own output while n runs. It is the weight of an op in the knapsack
(`overflow_knapsack`).

Deviations: the potential is that of a *unit*, a co-location group, and its own outputs count for as
long as they would leave with it, not only while it runs. With messages in their latest slots an
input that is made on the device leaves it only just before the op runs elsewhere.

Each unit's potential is a sum of terms: a storage or a received copy that the unit alone keeps on a
device, from one leaf of the order to another (`memory_tracking`), except for a hole in which a copy
would stay because ops of other units read it there. All terms of a placement are listed once,
instead of computing the potential of every unit at every overflow. When units move, the terms of
their neighbours become approximate: they only select candidates, and the segment trees of
`memory_tracking` decide.

The terms of a device are sorted by where they begin, so a sequential scan that skips blocks which
have ended finds those alive at a leaf. Following each storage to its consumers took 0.34 of the
0.55 s of repair at 200,000 ops. O(ops + edges + terms log terms).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int64
from numpy import ndarray

from pardnn.kernels.sorting import stable_order
from pardnn.place.pardnn.memory_tracking import (
    LiveRanges,
    MemoryProfile,
    has_views,
    live_ranges_of,
    reduce_rows,
)

#: Terms of which the last end is known.
BLOCK = 64


class MemoryPotential(NamedTuple):
    """The terms of the potentials of all units, on the devices that exceed their capacity.

    Attributes:
        ptr: Terms `ptr[d]` to `ptr[d + 1]` are those on device d; none if it does not overflow.
        term: First and last leaf, first and last leaf of the hole, unit, bytes.
        until: Last leaf of each `BLOCK` terms.
    """

    ptr: Int64[ndarray, " k+1"]
    term: Int64[ndarray, "x 6"]
    until: Int64[ndarray, " b"]


def memory_potential_of(
    profile: MemoryProfile, unit: Int64[ndarray, " n"], live_ranges: LiveRanges | None = None
) -> MemoryPotential:
    """Return the terms of the potentials for a placement as it is now.

    Args:
        profile: The placement, and what is held.
        unit: Of each op.
        live_ranges: From `live_ranges_of`, if they are known.
    """
    over = profile.top[:, 1] > profile.capacity
    ranges = live_ranges or live_ranges_of(profile)
    made, made_on = _made_storages(profile, unit, ranges, over)
    read, read_on = _received_copies(profile, unit, ranges, over)
    kept, kept_on = _local_inputs(profile, unit, ranges, over)
    term = np.concatenate([made, read, kept])
    device = np.concatenate([made_on, read_on, kept_on])
    leaves = profile.top.shape[1] >> 1
    order = stable_order((device * leaves + term[:, 0]).astype(np.float64))
    counts = np.bincount(device, minlength=len(profile.capacity))
    ptr = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    term = term[order]
    last = term[:, 1]
    if len(term) > 0:
        last = np.maximum.reduceat(last, np.arange(0, len(term), BLOCK))
    return MemoryPotential(ptr, term, last.copy())


def _made_storages(
    p: MemoryProfile, unit: Int64[ndarray, " n"], ranges: LiveRanges, over: Bool[ndarray, " k"]
) -> tuple[Int64[ndarray, "x 6"], Int64[ndarray, " x"]]:
    """Return the terms of units that produce a storage, and their devices."""
    home = p.place[p.producer]
    producer = np.repeat(p.producer[p.owner], np.diff(p.consumer_ptr))
    others = p.place[p.consumer_op] == p.place[producer]
    others &= unit[p.consumer_op] != unit[producer]
    n, at = len(p.position), p.position[p.consumer_op]
    never = np.full(len(p.producer), n)
    first = reduce_rows(np.minimum, np.where(others, at, n), p.consumer_ptr, never)
    last = reduce_rows(np.maximum, np.where(others, at, -1), p.consumer_ptr, -never)
    if has_views(p):
        np.minimum.at(first, p.owner, first.copy())
        np.maximum.at(last, p.owner, last.copy())
    owns = p.owner == np.arange(len(p.owner))
    t = np.flatnonzero(owns & (p.size > 0) & over[home])
    if p.eager:  # the others would hold a copy from the start
        first = np.minimum(first, np.where(first < n, ranges.begin + 1, n))
    positions = (ranges.begin[t], ranges.end[t], first[t], last[t])
    leaf = [position >> p.shift for position in positions]
    return np.stack([*leaf, unit[p.producer[t]], p.size[t]], axis=1), home[t]


def _local_inputs(
    p: MemoryProfile, unit: Int64[ndarray, " n"], ranges: LiveRanges, over: Bool[ndarray, " k"]
) -> tuple[Int64[ndarray, "x 6"], Int64[ndarray, " x"]]:
    """Return the terms of units that are the last on a device to read what another makes there."""
    producer = p.producer[p.owner]
    made_by = np.repeat(producer, np.diff(p.consumer_ptr))
    t = np.repeat(p.owner, np.diff(p.consumer_ptr))
    here = p.place[p.consumer_op] == p.place[made_by]
    t, consumer = t[here], p.consumer_op[here]
    at, last = p.position[consumer], np.full(len(p.owner), -1)
    np.maximum.at(last, t, at)
    reader = np.full(len(p.owner), -1)
    reader[t[at == last[t]]] = unit[consumer[at == last[t]]]
    # Until when others keep it: those that read it here, make views of it, or wait for a message.
    other = p.position[producer]
    np.maximum.at(other, t, np.where(unit[consumer] != reader[t], at, -1))
    np.maximum.at(other, p.owner, p.position[p.producer])
    if not p.eager:
        slots = np.full(len(p.owner), len(p.position))
        np.minimum.at(slots, t, np.where(unit[consumer] == reader[t], at - 1, len(p.position)))
        other = np.where(reader >= 0, np.maximum(other, slots), other)
        np.maximum.at(other, p.owner[ranges.sent.tensor], ranges.first - 1)
    begin, end = (other >> p.shift) + 1, ranges.end >> p.shift
    s = (p.owner == np.arange(len(p.owner))) & (reader >= 0) & (reader != unit[producer])
    s &= (begin <= end) & (p.size > 0) & over[p.place[producer]] & ~p.residual[producer]
    found = np.flatnonzero(s)
    hole = np.full(len(found), p.top.shape[1])
    term = [begin[found], end[found], hole, hole - 1, reader[found], p.size[found]]
    return np.stack(term, axis=1), p.place[producer[found]]


def _received_copies(
    p: MemoryProfile, unit: Int64[ndarray, " n"], ranges: LiveRanges, over: Bool[ndarray, " k"]
) -> tuple[Int64[ndarray, "x 6"], Int64[ndarray, " x"]]:
    """Return the terms of units that alone consume a received copy, and their devices."""
    sent = ranges.sent
    message = np.repeat(np.arange(len(sent.tensor)), np.diff(sent.consumer_ptr))
    at, consumer = p.position[sent.consumer], unit[sent.consumer]
    is_last = at == ranges.last[message]
    alone = np.zeros(len(sent.tensor), dtype=np.int64)
    alone[message[is_last]] = consumer[is_last]
    others = np.where(consumer != alone[message], at, -1)
    never = np.full(len(alone), -1)
    other = reduce_rows(np.maximum, others, sent.consumer_ptr, never)
    begin = np.where(other < 0, ranges.first >> p.shift, (other >> p.shift) + 1)
    end = ranges.last >> p.shift
    m = np.flatnonzero((begin <= end) & over[sent.target] & (p.size[sent.tensor] > 0))
    hole = np.full(len(m), p.top.shape[1])
    term = [begin[m], end[m], hole, hole - 1, alone[m], p.size[sent.tensor[m]]]
    return np.stack(term, axis=1), sent.target[m]
