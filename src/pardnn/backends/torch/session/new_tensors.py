"""Tensors that the user replaces between two calls: `trainer.h = torch.zeros(4, 8)`, `total = 0.0`.

Problem: guards compare tensors by identity, since a graph reads the tensor that was there. A hidden
state that each epoch begins with zeros would have each epoch captured.
Idea: where the new tensor could have been there at capture, the graph holds for it. It is a plain
one, of the same shape, type and strides, in all places of the old one, and shares its memory with
nobody. The ranks take it as they take any tensor that they do not know. So do they take a number,
if the graph was captured while that was in the place: to `self.total += loss.detach()`, a tensor
full of it is the same.

Complexity: O(state) where nothing but tensors has changed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch

from pardnn.backends.torch.comm.wire_format import has_strides
from pardnn.backends.torch.devices import empty_tensor, memory_uses, strides_of
from pardnn.backends.torch.runtime.binding import Binding
from pardnn.backends.torch.runtime.input_checks import Batch, kind_of
from pardnn.backends.torch.runtime.program import Program
from pardnn.backends.torch.session.constants import Constants
from pardnn.backends.torch.session.live_state import LiveState
from pardnn.backends.torch.user_step.guards.item import Change, differ
from pardnn.backends.torch.user_step.held_numbers import place
from pardnn.backends.torch.user_step.object_graph import attributes_of, walk_objects
from pardnn.backends.torch.user_step.shards import has_shards, made_of_a_shard, shard_held
from pardnn.backends.torch.user_step.sources import (
    Source,
    batch_indices,
    held_gradients,
    sources_of,
)
from pardnn.graph.ir import Tensor


class NewTensors:
    """Tells whether a graph holds for tensors that the user has put in the places of its state.

    Args:
        state: What the ranks hold.
        program: The program of the graph.
        binding: The binding of its sources.
        constants: The tensors whose content the graph contains.
    """

    def __init__(
        self, state: LiveState, program: Program, binding: Binding, constants: Constants
    ) -> None:
        self._state, self._sources, self._constants = state, binding.sources, constants
        self._program = program
        noted = program.whole.step_notes.get("numbers", ())
        numbers = [binding.sources[name] for name in noted if name in program.state]
        self._numbers = {place(source.slots[0]): source.name for source in numbers}
        self._initial = {x.name: (x.arguments or {}).get("initial") for x in program.whole.ops}

    def accepted(self, changes: Sequence[Change], batch: Batch) -> dict[str, Any] | None:
        """Return the new tensors, and first numbers, by name; None if more has changed.

        Args:
            changes: What differs from the values for which the graph holds.
            batch: The batch of this call.
        """
        found, others = dict[str, Any](), list[tuple[Any, Any]]()
        for change in changes:
            if (name := self._begun_again(change)) is not None:
                found[name] = change.now
                continue
            pairs = [*_pairs(change.then, change.now)]
            # Without any, something else than a value has changed, such as whether there is one.
            if not pairs or not all(isinstance(each, torch.Tensor) for each in chain(*pairs)):
                return None
            others += pairs
        if not others:
            return found
        given = set(map(id, batch.tensors.values()))
        live = [(name, self._sources[name].get()) for name in self._program.state]
        names, counts = {id(x): name for name, x in live}, Counter(id(x) for _, x in live)
        for old, new in others:
            name = names.get(id(new)) if counts[id(new)] == 1 and id(new) not in given else None
            if name is None or not self._is_alike(name, old, new):
                return None
            found[name] = new
        return found

    def exchanged(self, changes: Sequence[Change]) -> list[tuple[Any, Any]]:
        """Return what guards held, and what they find once the graph has taken its state.

        Args:
            changes: Those that were accepted.
        """
        return [(each.then, self._now(each)) for each in changes]

    def _begun_again(self, change: Change) -> str | None:
        """Return the name of a state in whose place the number is again with which it began."""
        name, now = self._numbers.get(change.place), change.now
        is_number = name is not None and type(now) in (int, float)
        return name if is_number and repr(float(now)) == repr(self._initial[name]) else None

    def _now(self, change: Change) -> Any:
        name = self._begun_again(change)
        return change.now if name is None else self._sources[name].get()

    def _is_alike(self, name: str, old: torch.Tensor, new: torch.Tensor) -> bool:
        """Whether a graph that reads `old` holds for `new`, which is in the place of a source."""
        source, held = self._sources[name], self._state.held(new)
        output = next(x.outputs[0] for x in self._program.sources.values() if x.name == name)
        if attributes_of(old) or attributes_of(new) or self._constants.has(old):
            return False
        if self._state.held(old) is None or self._state.shares_storage(old):
            return False
        if held is not None:  # put there for another step, or exchanged with another one
            is_own = not self._state.shares_storage(new)
            return is_own and _geometry(held.tensor) == _geometry(output)
        is_here = old.device == new.device and _is_everywhere(source, new)
        return is_here and _could_be(new, output)


def check_shards(state: LiveState, step: Callable[..., Any], args: Sequence[Any]) -> None:
    """Check that no tensor made from a shard takes the place of a whole one.

    Args:
        state: What the ranks hold.
        step: The user's step.
        args: Its arguments.

    Raises:
        MismatchError: E529, naming the first one.
    """
    if not has_shards():
        return
    found = sources_of(walk_objects(step, list(args)), batch_indices(args))
    for source in (*found, *held_gradients(found)):
        tensor = source.get()
        if (of := shard_held(tensor)) is not None and state.held(tensor) is None:
            raise made_of_a_shard(source.name, of)


def _pairs(then: Any, now: Any) -> Iterator[tuple[Any, Any]]:
    """Yield what differs in two values, item by item in tuples."""
    if isinstance(then, tuple) and type(then) is type(now) and len(then) == len(now):
        for pair in zip(then, now, strict=True):
            yield from _pairs(*pair)
    elif differ(now, then):
        yield then, now


def _is_everywhere(source: Source, tensor: torch.Tensor) -> bool:
    try:
        return source.parameter is None and all(slot.get() is tensor for slot in source.slots)
    except (LookupError, AttributeError, TypeError):
        return False


def _could_be(tensor: torch.Tensor, output: Tensor) -> bool:
    """Whether a tensor is like one of the graph, and shares its memory with nobody."""
    if kind_of(tensor) != kind_of(empty_tensor(output, torch.device("meta"))):
        return False
    strides = strides_of(output)
    if tensor.layout != torch.strided or not has_strides(tensor, strides):
        return False
    return memory_uses(tensor) == _OF_ONE


def _geometry(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, strides_of(tensor)


#: How often memory is used while one tensor holds it, and a question is asked.
_OF_ONE = memory_uses(torch.empty(1))
