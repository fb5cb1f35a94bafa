"""The order of keys and attributes that a step leaves, restored after each step.

Problem: numbers, texts and tensors that a step puts under new keys are written in different ways,
in any order, and `d["a"] = d.pop("a")` moves a key without changing a value.
Idea: if the first step leaves keys in another order than before, all later ones put them in that
order. Attributes have an order, too. An optimizer's new state of a parameter gets tensors before
numbers: what holds both is put in order, once.

Complexity: O(keys of the dictionaries that the step reaches).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from pardnn.backends.torch.capture.refusals.changed_state import changed_state
from pardnn.backends.torch.user_step.held_numbers import objects_by_name, with_tensor_names
from pardnn.backends.torch.user_step.object_graph import ObjectGraph
from pardnn.backends.torch.user_step.slots import ordered_keys

Orders = Mapping[str, list[Any]]
#: The order of their attributes does not matter, and a scheduler adds some to an optimizer only at
#: its first step, so graphs of a new run and of a resumed one would differ.
_NO_ORDER = (
    torch.optim.Optimizer,
    torch.optim.lr_scheduler.LRScheduler,
    torch.optim.lr_scheduler.ReduceLROnPlateau,
)


def key_orders(
    objects: ObjectGraph, names: Mapping[int, str], *, is_first: bool
) -> dict[str, list[Any]]:
    """Return the keys of each dictionary or object whose keys or their order have changed.

    Args:
        objects: The object graph before the step.
        names: The names of tensors by id.
        is_first: Whether it is the first one; later ones begin with attributes that capture sets.
    """
    named = objects_by_name(objects.contents)
    return dict(_of_new_states(objects, names) if is_first else ()) | {
        name: [*keys]
        for name, holder, content in objects.contents
        if (isinstance(holder, dict) or (is_first and not isinstance(holder, _NO_ORDER)))
        and (keys := ordered_keys(holder)) is not None and named.get(name) is holder
        and "<" not in name and all(isinstance(key, str | int) for key in keys)
        and [*keys] != [key for key in content if key in keys or isinstance(holder, dict)]
    }  # fmt: skip


def _of_new_states(
    objects: ObjectGraph, names: Mapping[int, str]
) -> Iterator[tuple[str, list[Any]]]:
    """Yield the name and keys of each new parameter state that holds tensors and other values."""
    for entry in objects.stateful:
        is_one = isinstance(entry.value, torch.optim.Optimizer)
        for parameter, state in entry.value.state.items() if is_one else ():
            is_new = isinstance(state, dict) and id(state) not in objects.seen
            if is_new and id(parameter) in names and all(isinstance(key, str) for key in state):
                tensors = {isinstance(each, torch.Tensor) for each in state.values()}
                if len(tensors) > 1:
                    name = with_tensor_names(entry.name, names)
                    yield f"{name}.state.{names[id(parameter)]}", [*state]


def note_orders(noted: list[dict[str, Any]], first: Orders, later: Orders) -> None:
    """Note the orders among a step's effects.

    Args:
        noted: The effects.
        first: Orders that the first step leaves.
        later: Those that the repeating step leaves.

    Raises:
        UnsupportedError: E804, if a later step moves a key of a dictionary.
    """
    for name, keys in first.items():
        again = [key for key in later.get(name, keys) if key in keys]
        kept = [key for key in keys if key in again]
        if again != kept and name in later:
            raise changed_state([name])
        if len(keys) > 1:
            noted.append({"order": [name, keys]})
