"""Lists and dictionaries that a step fills: each rank fills its own after each step.

See `capture.numbers.containers`, which notes what is put where.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from pardnn.backends.torch.runtime.effects import value_of
from pardnn.backends.torch.user_step.object_graph import ObjectGraph
from pardnn.errors import FileError, shown
from pardnn.graph.ir import Graph

#: By the type of a container, what a step may do to it.
_METHODS: dict[type, frozenset[str]] = {
    list: frozenset({"append", "extend"}),
    deque: frozenset({"append", "appendleft", "extend"}),
    dict: frozenset({"__setitem__"}),
}
CONTAINERS = tuple(_METHODS)


def filled_names(graph: Graph) -> list[str]:
    """Return the names of the containers that a graph's step fills."""
    effects = graph.step_notes.get("effects", [])
    return list(dict.fromkeys(each["call"][0] for each in effects if "call" in each))


def fill(effects: Iterable[Mapping[str, Any]], containers: Mapping[str, Any]) -> None:
    """Put into containers what the last step told.

    Args:
        effects: Of the step.
        containers: Those of this rank, by name.

    Raises:
        FileError: E402, if an effect is none that a capture notes.
    """
    for name, keys, method, args in (each["call"] for each in effects if "call" in each):
        container = containers[name]
        for key in map(value_of, keys):
            container = container.setdefault(key, [])
        kind = next((kind for kind in CONTAINERS if isinstance(container, kind)), None)
        if kind is None or method not in _METHODS[kind]:
            raise FileError(f"a step does not call {method!r:.80} of {shown(name)}")
        getattr(container, method)(*map(value_of, args))


def rebind(effects: Iterable[Mapping[str, Any]], batch: Iterable[ObjectGraph]) -> None:
    """Put the tensors into containers of the batch that the step has put there.

    Args:
        effects: Of the step.
        batch: What the arguments hold.
    """
    rebound = dict(effect["rebind"] for effect in effects if "rebind" in effect)
    for entry in (entry for objects in batch for entry in objects.tensors):
        if entry.name in rebound and entry.slot is not None:
            entry.slot.set(rebound[entry.name])
