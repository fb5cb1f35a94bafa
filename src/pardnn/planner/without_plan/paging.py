"""Paging of whole storages between one device and the host: the bytes that a step moves.

Two policies of eviction. `lru`: the least recently used storage, which is always copied to the
host; a model of unified memory. `belady`: the one whose next use is farthest in the future (Belady,
1966), which is copied only if the host's copy is out of date. It knows the whole step, as no policy
of a running system does.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from pardnn.graph.csr import RESIDUAL
from pardnn.graph.ir import Graph, writes

Policy = Literal["lru", "belady"]


class Uses(NamedTuple):
    """What each op of a step touches, in the order in which the step was written.

    Attributes:
        touched: Storages that are read or written, by their owner's number.
        written: Those of them that are written.
        ends: Those of them that are used here for the last time.
        bytes: Of each tensor.
    """

    touched: list[list[int]]
    written: list[set[int]]
    ends: list[list[int]]
    bytes: list[int]


def uses_of(graph: Graph, order: Sequence[int] | None = None) -> Uses:
    """Return what the ops of a graph touch, in an order or as written. O(ops + inputs)."""
    a, number = graph.arrays, graph.tensor_numbers
    touched, written, last = [], [], np.full(a.num_tensors, -1, dtype=np.int64)
    for op in a.topological.tolist() if order is None else order:
        if a.memory[op] == RESIDUAL:  # there before the step; its consumers touch it
            continue
        inputs = a.input_tensor[a.input_ptr[op] : a.input_ptr[op + 1]]
        outputs = np.arange(a.output_ptr[op], a.output_ptr[op + 1])
        storages = np.unique(a.tensor_owner[np.concatenate([inputs, outputs])])
        last[storages] = len(touched)
        touched.append(storages.tolist())
        made = outputs[a.tensor_alias[outputs] < 0].tolist()
        changed = (int(a.tensor_owner[number[name]]) for name in writes(graph.ops[op]))
        written.append({*made, *changed})
    last[a.memory[a.tensor_op] == RESIDUAL] = -1
    ends = [[s for s in row if last[s] == i] for i, row in enumerate(touched)]
    return Uses(touched, written, ends, a.tensor_bytes.tolist())


def page_bytes(
    graph: Graph, memory: int, policy: Policy = "lru", order: Sequence[int] | None = None
) -> int:
    """Return the bytes that a step moves between a device and the host: the second of two in a row.

    A storage larger than the memory takes all of it and more: the answer is then too small.

    Args:
        graph: Of the step.
        memory: Of the device, bytes.
        policy: Which storage is evicted.
        order: Of the ops; as written if None.
    """
    uses = uses_of(graph, order)
    pages = _Lru(memory, uses) if policy == "lru" else _Belady(memory, uses)
    before = 0
    for step in range(2):
        before = pages.moved
        for number, storages in enumerate(uses.touched):
            pages.now = step * len(uses.touched) + number
            for storage in storages:
                pages.touch(storage)
            pages.written(uses.written[number])
            for storage in uses.ends[number]:
                pages.free(storage)
    return pages.moved - before


class _Lru:
    """Storages on the device, the least recently used first, and those on the host."""

    def __init__(self, memory: int, uses: Uses) -> None:
        self.free_bytes, self.sizes, self.moved, self.now = memory, uses.bytes, 0, 0
        self.here: OrderedDict[int, None] = OrderedDict()
        self.away: set[int] = set()

    def touch(self, storage: int) -> None:
        if storage in self.here:
            self.here.move_to_end(storage)
            return
        size = self.sizes[storage]
        if storage in self.away:
            self.away.remove(storage)
            self.moved += size
        while self.free_bytes < size and self.here:
            self.evict()
        self.here[storage] = None
        self.free_bytes -= size

    def evict(self) -> None:
        """Send one storage to the host."""
        other, _ = self.here.popitem(last=False)
        self.away.add(other)
        self.moved += self.sizes[other]
        self.free_bytes += self.sizes[other]

    def written(self, storages: set[int]) -> None:
        """Note what the host's copies no longer hold."""

    def free(self, storage: int) -> None:
        if storage in self.here:
            del self.here[storage]
            self.free_bytes += self.sizes[storage]
        self.away.discard(storage)


class _Belady(_Lru):
    """Evicts the storage whose next use is farthest, copies it if the host's copy is old."""

    def __init__(self, memory: int, uses: Uses) -> None:
        super().__init__(memory, uses)
        self.period = len(uses.touched)
        self.times: dict[int, list[int]] = {}
        for number, row in enumerate(uses.touched):
            for storage in row:
                self.times.setdefault(storage, []).append(number)
        self.copied: set[int] = set()

    def _next(self, storage: int) -> int:
        times, now = self.times[storage], self.now % self.period
        at = bisect_left(times, now)
        return times[at] if at < len(times) else times[0] + self.period

    def evict(self) -> None:
        """Drop one storage, not one of the running op, or copy it to the host."""
        other = max(self.here, key=self._next)
        del self.here[other]
        self.away.add(other)
        if other not in self.copied:
            self.moved += self.sizes[other]
            self.copied.add(other)
        self.free_bytes += self.sizes[other]

    def written(self, storages: set[int]) -> None:
        self.copied -= storages

    def free(self, storage: int) -> None:
        super().free(storage)
        self.copied.discard(storage)
