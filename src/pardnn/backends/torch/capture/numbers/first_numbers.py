"""The numbers that objects hold before and after the first trace, and how they are restored."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from pardnn.backends.torch.capture.restore import changes, is_arithmetic, is_filled
from pardnn.backends.torch.ops.host_program import same_number
from pardnn.backends.torch.ops.host_scalars import node_of
from pardnn.backends.torch.user_step.held_numbers import (
    NUMBERS,
    texts_of_states,
    values_by_name,
)
from pardnn.backends.torch.user_step.object_graph import ObjectGraph

#: Why ranks cannot make a state: they know its name, and not what holds it.
IN_A_CONTAINER = "is in a container that the first step makes"


@dataclass(frozen=True)
class Numbers:
    """The numbers that objects hold, by name.

    Attributes:
        before: Before the first step.
        after: After it.
        defaults: Those that a `defaultdict` or `Counter` gave.
        within: Names of those in containers that the first step makes in optimizer state.
        texts: Other values without items that the first step creates in optimizer state.
    """

    before: Mapping[str, Any]
    after: Mapping[str, Any]
    defaults: Mapping[str, Any]
    within: frozenset[str]
    texts: Mapping[str, Any]

    def unchanged(self, names: frozenset[str]) -> frozenset[str]:
        """Return which of some names have numbers that the first step leaves unchanged."""
        known = names & self.before.keys() & self.after.keys()
        return frozenset(n for n in known if same_number(self.before[n], self.after[n]))

    def replaced(self, without: Collection[str] = ()) -> dict[str, Any]:
        """Return the values before the first step of numbers that it changes, by name.

        Args:
            without: Names to leave out.
        """
        known = sorted((self.before.keys() & self.after.keys()) - {*without})
        before, after = self.before, self.after
        return {n: before[n] for n in known if not same_number(before[n], after[n])}


def numbers_around(
    before: tuple[ObjectGraph, Mapping[int, str]], after: tuple[ObjectGraph, Mapping[int, str]],
    defaults: Mapping[str, Any],
) -> Numbers:  # fmt: skip
    """Return the numbers that objects hold around the first step.

    Args:
        before: The objects before it, and the names of tensors by id.
        after: The same after the step.
        defaults: The result of `put_back`.
    """
    then, now = texts_of_states(*before), texts_of_states(*after)
    numbers = values_by_name(before[0].contents, before[1]) | dict(defaults)
    inner = containers_in_states(after[0])
    within = [each for each in after[0].contents if id(each[1]) in inner]
    return Numbers(
        numbers,
        values_by_name(after[0].contents, after[1]),
        defaults,
        frozenset(values_by_name(within, after[1]).keys() - numbers.keys()),
        {name: text for name, text in now.items() if name not in then},
    )


def guesses_of(left: Any, then: Any) -> list[Any]:
    """Return values from which one step may make `left`, and the next one `then`."""
    guesses = [left - (then - left), type(left)(0), type(left)(1), 0, 1, left]
    return guesses if not isinstance(left, float) or not then else [*guesses, left * left / then]


def containers_in_states(objects: ObjectGraph) -> set[int]:
    """Return the ids of lists and dictionaries that optimizers hold in their state.

    Args:
        objects: The object graph of the step.
    """
    states = [e.value.state for e in objects.stateful if isinstance(e.value, torch.optim.Optimizer)]
    held = [
        item
        for state in states
        for key, value in state.items()
        for item in (_items(value) if isinstance(key, torch.Tensor) else [value])
    ]
    for each in held:  # grows
        held += _items(each)
    return {id(each) for each in held if isinstance(each, dict | list)}


def _items(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [*value.values()]
    return [*value] if isinstance(value, list | tuple) else []


def put_back(contents: list[tuple[str, Any, Any]]) -> dict[str, Any]:
    """Restore numbers that the first step replaced by ones that only a run knows.

    Args:
        contents: `ObjectGraph.contents` of the walk before the step.

    Returns:
        The first values, by name, of numbers that it created in a `defaultdict` or `Counter`.
    """
    for change in changes(contents).values():
        node = node_of(change.now)
        is_data = node is not None and node.hint is None and is_arithmetic(change)
        if change.slot is not None and (is_data or is_filled(change)):
            change.slot.set(change.then)
    return _put_defaults(contents)


def _put_defaults(contents: list[tuple[str, Any, Any]]) -> dict[str, Any]:
    """Restore the first values of numbers created in a `defaultdict` or `Counter`."""
    found: dict[str, Any] = {}
    for name, change in changes(contents).items():
        holder = None if change.slot is None else change.slot.holder
        is_number = isinstance(change.now, NUMBERS) or node_of(change.now) is not None
        default = int if isinstance(holder, Counter) else None
        if isinstance(holder, defaultdict):
            default = holder.default_factory
        if change.slot is not None and change.then is None and is_number and default in NUMBERS:
            found[name] = default()
            change.slot.set(found[name])
    return found
