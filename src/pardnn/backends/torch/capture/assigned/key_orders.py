"""The order of keys that a step leaves in its dictionaries, told after each step.

Problem: numbers, texts and tensors that a step puts under new keys arrive by different ways, and
`d["a"] = d.pop("a")` moves a key without any value. Idea: where the first step leaves keys in
another order than before, all later ones put them in that order.

Complexity: O(keys of the dictionaries that the step reaches).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pardnn.backends.torch.capture.refusals.changed_state import changed_state
from pardnn.backends.torch.user_step.held_numbers import objects_by_name
from pardnn.backends.torch.user_step.object_graph import ObjectGraph

Orders = Mapping[str, list[Any]]


def key_orders(objects: ObjectGraph) -> dict[str, list[Any]]:
    """Return the keys of each dictionary whose keys, or their order, have changed, by name.

    Args:
        objects: The object graph before the step.
    """
    named = objects_by_name(objects)
    return {
        name: [*holder]
        for name, holder, content in objects.contents
        if isinstance(holder, dict) and named.get(name) is holder and "<" not in name
        and all(isinstance(key, str | int) for key in holder) and [*holder] != [*content]
    }  # fmt: skip


def note_orders(noted: list[dict[str, Any]], first: Orders, later: Orders) -> None:
    """Note the orders among a step's effects.

    Args:
        noted: The effects.
        first: Orders that the first step leaves.
        later: Those that the step leaves which repeats.

    Raises:
        UnsupportedError: E804, if a later step moves a key to elsewhere.
    """
    for name, keys in first.items():
        again = [key for key in later.get(name, keys) if key in keys]
        kept = [key for key in keys if key in again]
        if again != kept and name in later:
            raise changed_state([name])
        if len(keys) > 1:
            noted.append({"order": [name, keys]})
