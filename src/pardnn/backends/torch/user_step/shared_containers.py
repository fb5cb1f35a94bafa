"""Lists and dictionaries that the user's classes and modules hold: `Meter.history`, `settings.log`.

The walk of a step's objects enters neither classes nor modules: tensors in them are constants of a
graph. A step may fill their containers all the same, and ranks find these by their full names.

Complexity: O(items of the containers whose names code mentions).
"""

from __future__ import annotations

import types
from collections import defaultdict, deque
from typing import Any

from pardnn.backends.torch.user_step.class_numbers import space_name
from pardnn.backends.torch.user_step.code_names import is_library_function, names_in
from pardnn.backends.torch.user_step.object_graph import ObjectGraph
from pardnn.backends.torch.user_step.slots import GlobalName, dotted

_KINDS = frozenset({list, dict, deque, defaultdict})
#: How many containers around another one are looked into.
_MAX_DEPTH = 4
#: Longer dictionaries of containers are data, and so are lists of them: with a set of 300,000,
#: capture would take 10 s more.
_MAX_ITEMS = 10_000


def shared_containers(objects: ObjectGraph) -> list[tuple[str, Any, Any]]:
    """Return what names of classes and modules hold, and each container there that no walk meets.

    Args:
        objects: The object graph of a step.

    Returns:
        Entries like those of `ObjectGraph.contents`.
    """
    functions = [x for x in objects.seen.values() if isinstance(x, types.FunctionType)]
    codes = (x.__code__ for x in functions if not is_library_function(x))
    named = frozenset[str]().union(*map(names_in, codes))
    found: list[tuple[str, Any, Any]] = []
    seen = {*objects.seen}
    for space in objects.spaces:
        namespace = space if isinstance(space, type) else vars(space)
        for key, value in list(vars(space).items()):
            if key in named and type(value) in _KINDS:
                name = f"{space_name(space)}.{key}"
                found.append((name, GlobalName(namespace, key), value))
                found += _within(name, value, seen)
    return found


def _within(name: str, start: Any, seen: set[int]) -> list[tuple[str, Any, Any]]:
    """Return a container and those in its dictionaries, outer ones first.

    Args:
        name: Its name.
        start: The container.
        seen: Ids of those that are known; these become some.
    """
    found: list[tuple[str, Any, Any]] = []
    level = [(name, start)]
    for _ in range(_MAX_DEPTH + 1):
        new = [(path, held) for path, held in level if id(held) not in seen]
        seen.update(id(held) for _, held in new)
        copies = [dict(x) if isinstance(x, dict) else list(x) for _, x in new]
        found += [(*each, copy) for each, copy in zip(new, copies, strict=True)]
        level = [
            (dotted(path, key), item)
            for path, held in new
            if isinstance(held, dict) and len(held) <= _MAX_ITEMS
            for key, item in held.items()
            if type(item) in _KINDS and type(key) in (str, int)
        ]
    return found
