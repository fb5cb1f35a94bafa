"""Numbers that classes and modules of the user's hold: `Model.tau`, `settings.weight`.

No walk of a step's objects enters them, as a step may not change them. What changes between two
calls is found here, by names of its own.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from typing import Any

from pardnn.backends.torch.user_step.code_names import is_users_code
from pardnn.backends.torch.user_step.held_numbers import NUMBERS, numbers_by_name
from pardnn.backends.torch.user_step.object_graph import ObjectGraph
from pardnn.backends.torch.user_step.slots import Slot, items_of


def users_classes(objects: ObjectGraph) -> list[type]:
    """Return the user's classes among those of all objects that a step reaches, bases included.

    Args:
        objects: The object graph of the step.
    """
    kinds = [each if isinstance(each, type) else type(each) for each in objects.seen.values()]
    return [*filter(is_users_code, dict.fromkeys(base for kind in kinds for base in kind.__mro__))]


def all_numbers(objects: ObjectGraph, names: Mapping[int, str]) -> dict[str, tuple[Slot, Any]]:
    """Return place and value of `numbers_by_name`, and of numbers in classes and modules.

    Args:
        objects: The object graph of the step.
        names: Of tensors by id.
    """
    shared = {name: (slot, slot.get()) for name, slot in _shared(objects)}
    return shared | numbers_by_name(objects.contents, names)


def _shared(objects: ObjectGraph) -> Iterator[tuple[str, Slot]]:
    """Yield name and place of each number in a class or module."""
    classes = [(f"{each.__module__}.{each.__qualname__}", each) for each in users_classes(objects)]
    seen = [each for each in objects.seen.values() if isinstance(each, types.ModuleType)]
    modules = [(each.__name__, vars(each)) for each in filter(is_users_code, seen)]
    for name, holder in [*classes, *modules]:
        for key, value in items_of(holder).items():
            # Not an enumeration's: it is more than a number.
            if type(value) in NUMBERS and not key.startswith("__"):
                yield f"{name}.{key}", Slot(holder, key)
