"""Tensors that a step replaces while its user still holds them: `history.append(model.h)`.

Problem: `self.h = h.detach()` leaves the tensor that was there as it is, and whoever kept it still
has the old content. The executor writes the new content into the memory of the old tensor.
Idea: before a step that replaces a tensor, each rank looks whether anybody else holds that. If so,
the tensor is left to them, and its place and the executor go on with a copy. Python counts the
references to the tensor and to tuples around it, torch those to its memory, by views and NumPy
arrays too. The counts are compared with those of a copy that nobody else could hold yet, so a
tensor that the user has made is copied before the first step that replaces it. If the step writes
into the tensor before it replaces it, the graph keeps what it wrote, and the old tensor gets that
after the step. Where `p.data = x` replaces only the memory, the tensor moves to other memory if
anybody else holds its own; if the step has written there, too, that is refused.

Complexity: O(replaced tensors) per call, 2 us each.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from pardnn.backends.torch.devices import memory_uses
from pardnn.backends.torch.ops.partition_ops import box_view
from pardnn.backends.torch.runtime.binding import Binding
from pardnn.backends.torch.runtime.executor import Executor
from pardnn.backends.torch.session.live_state import LiveState
from pardnn.backends.torch.session.rebound import KeptData
from pardnn.backends.torch.user_step.guards.guards import Guards
from pardnn.backends.torch.user_step.shards import shard_held
from pardnn.backends.torch.user_step.sources import Source
from pardnn.errors import MismatchError, shown
from pardnn.graph.ir import Op
from pardnn.plan.state_layout import shard_of


class Replaced:
    """The tensors that one graph replaces and this rank keeps.

    Args:
        state: What the ranks hold.
        executor: The executor of the graph; it has its residents.
        binding: The binding of its sources.
        data: Where the data of the graph's tensors is.
    """

    def __init__(
        self, state: LiveState, executor: Executor, binding: Binding, data: KeptData
    ) -> None:
        self._state, self._executor = state, executor
        self._binding, self._data = binding, data
        program, self._ops = executor.program, dict[str, list[Op]]()
        notes = program.whole.step_notes
        self._moved, self._written = frozenset(notes.get("moved", ())), notes.get("written", {})
        self._left: dict[str, torch.Tensor] = {}
        names = self._moved.union(notes.get("replaced", ()))
        for op in program.residents(executor.rank) if names else ():
            of, _ = shard_of(op, program.sources)
            if of in names:
                self._ops.setdefault(of, []).append(op)
        found = [binding.sources[of] for of in self._ops]
        self._sources = [source for source in found if self._is_plain(source)]
        self._known: list[Any] = [None] * len(self._sources)

    def _is_plain(self, source: Source) -> bool:
        tensor = source.get()
        kind = type(tensor) if shard_held(tensor) is None else tensor.present_class
        is_moved = kind is torch.nn.Parameter and source.name in self._moved
        is_plain = (kind is torch.Tensor or is_moved) and tensor.layout == torch.strided
        return is_plain and not self._state.shares_storage(tensor)

    def spare(self, guards: Iterable[Guards | None]) -> bool:
        """Leave tensors to others who hold them; return whether there were any.

        Args:
            guards: The guards of all graphs of the step, which are to expect the copies.

        Raises:
            MismatchError: E530, if others hold the memory of a tensor that the step first writes
                and then moves to other memory.
        """
        if self._sources and self._binding.guards is not None:
            self._binding.guards.release()
        pairs = list(zip(self._sources, self._known, strict=True))
        found = [source for source, known in pairs if self._counts(source) != known]
        if found:
            self._exchange(found, guards)
            # Here, as variables of the method above count, too.
            self._known = [self._counts(source) for source in self._sources]
        return bool(found)

    def _exchange(self, found: Sequence[Source], guards: Iterable[Guards | None]) -> None:
        slots = [slot._replace(path=()) for source in found for slot in source.slots]
        before = [slot.get() for slot in slots]
        old = {source.name: source.get().detach() for source in found}
        copies = {source.name: self._copied(source) for source in found}
        ops = ((op.name, copy) for of, copy in copies.items() for op in self._ops[of])
        self._data.exchange(dict(ops))
        exchanged = list(zip(before, (slot.get() for slot in slots), strict=True))
        for each in guards:
            if each is not None:
                each.accept(exchanged)
        for other in self._state.executors:
            if other is not self._executor:
                other.detach()
        self._data.renew()
        self._left = {name: tensor for name, tensor in old.items() if name not in self._moved}
        for name in sorted(self._written.keys() & old.keys()):
            if memory_uses(old[name]) > memory_uses(torch.empty(0)):
                raise _moved_under_others(name, self._written[name])

    def finish(self, effects: Iterable[Mapping[str, Any]]) -> None:
        """Give the tensors that were left to others what the step wrote into them.

        Args:
            effects: The effects of the step.
        """
        left, self._left = self._left, {}
        for name, value in (each["left"] for each in effects if "left" in each) if left else ():
            if name in left:
                (op,) = self._ops[name]
                _, box = shard_of(op, self._executor.program.sources)
                left[name].copy_(value if box is None else box_view(value, box))

    def _counts(self, source: Source) -> tuple[int, ...]:
        """Return how many hold a tensor, its memory and the tuples that it is in."""
        tensor = source.get()
        if not isinstance(tensor, torch.Tensor):
            return ()
        if source.name in self._moved:
            return (memory_uses(tensor),)
        return sys.getrefcount(tensor), memory_uses(tensor), *map(sys.getrefcount, _tuples(source))

    def _copied(self, source: Source) -> torch.Tensor:
        """Put a copy of a tensor into its places; return it."""
        old: torch.Tensor = source.get()
        new = torch.empty_strided(
            old.shape, old.stride(), dtype=old.dtype, device=old.device, pin_memory=old.is_pinned()
        )
        with torch.no_grad():
            new.copy_(old)
        if source.name in self._moved:
            old.data = new
            return old
        new.requires_grad_(old.requires_grad)
        vars(new).update(vars(old))
        for slot in source.slots:
            slot.set(new)
        self._state.exchange(old, new)
        return new


def _moved_under_others(name: str, line: str | None) -> MismatchError:
    where = f" ({line})" if line else ""
    return MismatchError(
        f"the step writes into {shown(name)} and then gives it other memory{where}, while\n"
        "something else holds its memory: a state dict, a view, an array. In eager calls that\n"
        "would get what was written, and not what replaces it.\n"
        "Keep a copy, {name: x.clone() for name, x in model.state_dict().items()}, or let the\n"
        "step write in place: p.data.clamp_(-c, c) instead of p.data = p.data.clamp(-c, c).",
        code="E530",
        details={"name": name, "source": line},
    )


def _tuples(source: Source) -> Iterator[tuple[Any, ...]]:
    for slot in source.slots:
        for depth in range(len(slot.path)):
            yield slot._replace(path=slot.path[:depth]).get()
