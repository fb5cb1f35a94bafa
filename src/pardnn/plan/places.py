"""Fixed places for tensors that a device makes and frees in a step.

Problem: freed memory that goes back to the system comes back as fresh pages, which the system fills
with zeros. A plan says when each tensor is made and freed, so one block of memory, kept from step
to step, can hold all those whose op can write into memory that it is given.

Idea: the largest first, each at the lowest place that is free while it lives (a dynamic storage
allocation). Of a GPT-2's training step that takes no more than the most bytes that are live at
once. If the block and all other memory exceed the room, the block is made smaller by the excess,
and tensors that find no place in it stay outside.

Complexity: O(n log n) per placed tensor, with n tensors that may have a place, in NumPy.

Reference: "largest first" of offline dynamic storage allocation, as in TensorFlow Lite's planner
(Pisarchyk and Lee, Efficient Memory Management for Deep Neural Net Inference, MLSys 2020, "greedy
by size"). Deviation: the height of the block is bounded.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64
from numpy import ndarray

from pardnn.graph.ir import Graph
from pardnn.plan.memory import Storages, all_storages
from pardnn.plan.plan import PlanArrays

#: Places begin at multiples of this, as pages do: no kernel's result depends on where.
PAGE_BYTES = 4096
#: Times that the block is made smaller; then nothing has a place.
MAX_TRIES = 16


class Places(NamedTuple):
    """Where tensors of one device lie.

    Attributes:
        offsets: Of the storage of each tensor that has a place, by the tensor's number.
        bytes: Of the block.
        small_peak: Most bytes of small blocks that are live at once outside it.
        large_peak: Likewise of all others.
        made_peak: Likewise of what the step makes.
    """

    offsets: dict[int, int]
    bytes: int
    small_peak: int
    large_peak: int
    made_peak: int

    def needed(self, growth: float, spare_bytes: int) -> int:
        """Return the bytes of the block and all else, as `choose_places` counts them."""
        waste = max(0, int((growth - 1) * self.small_peak) - spare_bytes)
        return self.bytes + self.large_peak + self.small_peak + waste


def choose_places(
    graph: Graph,
    plan: PlanArrays,
    device: int,
    movable: Collection[int],
    *,
    small_bytes: int,
    growth: float = 1.0,
    spare_bytes: int = 0,
    room: int | None = None,
) -> Places:
    """Return the places of a device's tensors.

    Args:
        graph: The graph that the plan places.
        plan: A plan.
        device: Its number.
        movable: Tensors that may have a place where they are made or arrive, by number.
        small_bytes: Blocks of fewer are small.
        growth: Bytes that small blocks take for each that is live.
        spare_bytes: Room beside `room` for what they take in excess of their own size. The block
            has no part in it: it takes all its bytes in every step.
        room: Bytes for all blocks; None: as many as there are.
    """
    everywhere = all_storages(graph, plan)
    found = Storages(*(column[everywhere.device == device] for column in everywhere))
    begin, end = plan.order_ptr[device], plan.order_ptr[device + 1]
    workspace = graph.arrays.workspace[plan.order_op[begin:end]]
    can = np.isin(found.tensor, np.fromiter(movable, np.int64, len(movable)))
    can &= (found.bytes > 0) & (found.allocated >= 0) & (found.released >= 0)
    which = np.flatnonzero(can)
    most: int | None = None
    for _ in range(MAX_TRIES):
        offsets = lowest_places(
            found.allocated[which], found.released[which], _in_pages(found.bytes[which]), most
        )
        is_placed = offsets >= 0
        ends = (offsets + _in_pages(found.bytes[which]))[is_placed]
        outside = np.ones(len(can), dtype=bool)
        outside[which[is_placed]] = False
        places = Places(
            dict(zip(found.tensor[which[is_placed]].tolist(), offsets[is_placed].tolist(),
                     strict=True)),
            int(ends.max(initial=0)),
            *_peaks(found, outside, workspace, small_bytes),
        )  # fmt: skip
        excess = 0 if room is None else places.needed(growth, spare_bytes) - room
        if excess <= 0 or not places.bytes:
            return places
        most = places.bytes - max(excess, PAGE_BYTES)
    outside = np.ones(len(can), dtype=bool)
    return Places({}, 0, *_peaks(found, outside, workspace, small_bytes))


def lowest_places(
    first: Int64[ndarray, " n"],
    last: Int64[ndarray, " n"],
    sizes: Int64[ndarray, " n"],
    most: int | None,
) -> Int64[ndarray, " n"]:
    """Return an offset per block, the largest first; blocks that live at one time do not overlap.

    Args:
        first: First position at which it lives.
        last: Last one.
        sizes: Bytes.
        most: Where the last one may end; None: anywhere. A block that finds no place has -1.
    """
    offsets = np.full(len(sizes), -1, dtype=np.int64)
    placed = np.empty(0, dtype=np.int64)
    for block in np.lexsort((first, -sizes)).tolist():
        beside = placed[(first[placed] <= last[block]) & (first[block] <= last[placed])]
        beside = beside[np.argsort(offsets[beside], kind="stable")]
        # The lowest gap that is wide enough: each begins where all before it have ended.
        ends = np.maximum.accumulate(np.append(0, offsets[beside] + sizes[beside]))
        is_wide = np.append(offsets[beside] - ends[:-1] >= sizes[block], True)
        at = int(ends[np.argmax(is_wide)])
        if most is None or at + sizes[block] <= most:
            offsets[block] = at
            placed = np.append(placed, block)
    return offsets


def _in_pages(sizes: Int64[ndarray, " n"]) -> Int64[ndarray, " n"]:
    return -(-sizes // PAGE_BYTES) * PAGE_BYTES


def _peaks(
    found: Storages, outside: ndarray, workspace: Int64[ndarray, " p"], small_bytes: int
) -> tuple[int, int, int]:
    """Return the peaks of small blocks, of large ones and of what the step makes."""

    def peak(counts: ndarray, scratch: Int64[ndarray, " p"]) -> int:
        change = np.zeros(len(workspace) + 1, dtype=np.int64)
        np.add.at(change, np.maximum(found.allocated, 0)[counts], found.bytes[counts])
        ends = counts & (found.released >= 0) & (found.allocated >= 0)
        np.subtract.at(change, found.released[ends] + 1, found.bytes[ends])
        return int((np.cumsum(change)[:-1] + scratch).max(initial=0))

    is_small, is_small_scratch = found.bytes < small_bytes, workspace < small_bytes
    return (
        peak(outside & is_small, np.where(is_small_scratch, workspace, 0)),
        peak(outside & ~is_small, np.where(is_small_scratch, 0, workspace)),
        peak(outside & (found.allocated >= 0), workspace),
    )
