"""Which values of an in-context run are dropped, and replaced by synthetic ones, within a budget.

Problem: calls are timed at their positions in the step, but a step that is planned for several
devices seldom fits one.
Idea: if values exceed the budget, the storage whose next use is farthest away is dropped (Belady's
rule), and later calls that read it get synthetic values: times depend on shapes and strides, and
hardly on values.

Complexity: O(n log n) for n uses of tensors.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from pardnn.graph.ir import Op


class Visit(NamedTuple):
    """What happens around one op of the run.

    Attributes:
        is_run: Whether its inputs and outputs fit the budget at all.
        evicted: Names of the values that are dropped before it.
        made: Names of the inputs that get synthetic values before it.
        ended: Names of the values that are dropped after it.
    """

    is_run: bool
    evicted: tuple[str, ...]
    made: tuple[str, ...]
    ended: tuple[str, ...]


def visits(ops: Sequence[Op], budget: int) -> list[Visit]:
    """Return what to keep of a run of ops, so that no more than `budget` bytes are held.

    Args:
        ops: The ops in the order of the run. Sources take no memory: their values are synthetic.
        budget: Bytes of storages.
    """
    held = _Held(ops, budget)
    return [held.visit(at, op) for at, op in enumerate(ops)]


class _Held:
    """The storages that are held while the run is laid out.

    A storage goes by the name of its first value; a value that was dropped and made up again starts
    its own storage.
    """

    def __init__(self, ops: Sequence[Op], budget: int) -> None:
        self._budget = budget
        self._bytes = {tensor.name: tensor.bytes for op in ops for tensor in op.outputs}
        self._uses: dict[str, list[int]] = defaultdict(list)  # ascending after the reversal below
        for at in range(len(ops) - 1, -1, -1):
            for name in ops[at].inputs:
                self._uses[name].append(at)
        self._storage: dict[str, str] = {}
        self._names: dict[str, list[str]] = defaultdict(list)
        self._live = 0
        self._farthest: list[tuple[int, str]] = []

    def visit(self, at: int, op: Op) -> Visit:
        if op.is_source:
            return Visit(False, (), (), ())
        made = [name for name in dict.fromkeys(op.inputs) if name not in self._storage]
        fresh = [tensor for tensor in op.outputs if tensor.alias_of is None]
        new = sum(self._bytes[name] for name in made) + sum(t.bytes for t in fresh) + op.workspace
        used = {self._storage[name] for name in op.inputs if name in self._storage}
        is_run = new + sum(self._bytes[each] for each in used) <= self._budget
        if not is_run:
            return Visit(False, (), (), self._after(op, op.inputs))
        evicted = tuple(self._evicted(self._budget - new, used))
        for name in made:
            self._begin(name)
        for tensor in op.outputs:
            base = self._storage.get(tensor.alias_of or "")
            if base is None and tensor.alias_of is not None and op.inputs:
                base = self._storage[op.inputs[0]]
            self._begin(tensor.name, base)
        outputs = [tensor.name for tensor in op.outputs]
        return Visit(True, evicted, tuple(made), self._after(op, [*op.inputs, *outputs]))

    def _after(self, op: Op, touched: Sequence[str]) -> tuple[str, ...]:
        """Count an op's uses as past; return what is dropped because nothing reads it later."""
        for name in op.inputs:
            self._uses[name].pop()
        ended = tuple(self._ended(touched))
        for name in touched:
            if name in self._storage:
                self._note(self._storage[name])
        return ended

    def _begin(self, name: str, storage: str | None = None) -> None:
        if storage is None:
            storage, self._live = name, self._live + self._bytes[name]
        self._storage[name] = storage
        self._names[storage].append(name)

    def _next_use(self, storage: str) -> int | None:
        uses = [self._uses[name][-1] for name in self._names[storage] if self._uses[name]]
        return min(uses, default=None)

    def _note(self, storage: str) -> None:
        following = self._next_use(storage)
        if following is not None:
            heapq.heappush(self._farthest, (-following, storage))

    def _evicted(self, room: int, used: set[str]) -> list[str]:
        """Drop storages, the one with the farthest next use first, until the rest fits."""
        dropped: list[str] = []
        while self._live > room and self._farthest:
            negative, storage = heapq.heappop(self._farthest)
            following = -negative
            is_stale = storage not in self._names or self._next_use(storage) != following
            if not is_stale and storage not in used:  # what this op uses is noted again after it
                dropped += self._drop(storage)
        return dropped

    def _ended(self, names: Sequence[str]) -> list[str]:
        """Drop the storages that nothing reads any longer."""
        storages = dict.fromkeys(self._storage[name] for name in names if name in self._storage)
        ending = [each for each in storages if self._next_use(each) is None]
        return [name for storage in ending for name in self._drop(storage)]

    def _drop(self, storage: str) -> list[str]:
        names = self._names.pop(storage)
        for name in names:
            del self._storage[name]
        self._live -= self._bytes[storage]
        return names
