"""What a step puts into its user's objects: each rank puts it into its own after each step.

Lists and dictionaries are filled with what `capture.numbers.containers` notes, and plain values
assigned as `capture.numbers.assigned` notes them. An assigned value is as `effects.value_of` has
it, or a `torch.Size`, a member of an enumeration, or an object: `{"size": [value, ...]}`,
`{"member": [place, name]}` with a place that holds the enumeration or a member of it,
`{"place": name}`.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from pardnn.backends.torch.runtime.effects import value_of
from pardnn.backends.torch.user_step.held_numbers import missing_slots, slot_of_name
from pardnn.backends.torch.user_step.object_graph import ObjectGraph, walk_objects
from pardnn.backends.torch.user_step.slots import Slot
from pardnn.backends.torch.user_step.sources import Source
from pardnn.errors import FileError, MismatchError, shown
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


def assigned_places(step: Callable[..., Any], args: Sequence[Any], graph: Graph) -> dict[str, Slot]:
    """Return the places that a graph's step assigns, or takes objects from, by name.

    Args:
        step: The user's step.
        args: Its arguments.
        graph: Of that step.

    Raises:
        MismatchError: E505, if the step's objects have not all of them.
    """
    effects = graph.step_notes.get("effects", [])
    noted = [each["assign"] for each in effects if "assign" in each]
    if not noted:
        return {}
    objects = walk_objects(step, list(args))
    found: dict[str, Slot] = {}
    for name in dict.fromkeys(n for target, content in noted for n in (target, *_named(content))):
        slot = _place(objects, name)
        if slot is None:
            raise MismatchError(
                f"the graph was captured from another step: the value {shown(name)} is not among "
                "what this step's objects hold.\nCapture and plan this step again.",
                code="E505",
                details={"missing": [name]},
            )
        found[name] = slot
    return found


def assign(
    effects: Iterable[Mapping[str, Any]],
    places: Mapping[str, Slot],
    sources: Mapping[str, Source],
    batch: Iterable[ObjectGraph],
) -> None:
    """Give the user's objects what the last step has assigned.

    Args:
        effects: Of the step.
        places: Of `assigned_places`.
        sources: Of the step, by name.
        batch: What the batch's arguments hold.
    """
    given = {name: slot for each in batch for name in places if (slot := _place(each, name))}
    places = {**places, **given}
    noted = [each["assign"] for each in effects if "assign" in each]
    values = [(places[name], _value(content, places)) for name, content in noted]
    for slot, value in values:
        slot.set(value)
    for name, flag in (each["trainable"] for each in effects if "trainable" in each):
        sources[name].get().requires_grad_(bool(flag))


def _place(objects: ObjectGraph, name: str) -> Slot | None:
    """Return the place of a name, also where a step creates it; None if there is none."""
    return slot_of_name(objects, name) or missing_slots([name], objects, {}).get(name)


def _named(content: Mapping[str, Any]) -> list[str]:
    """Return the places that a content refers to."""
    ((kind, parts),) = content.items()
    if kind in ("tuple", "size"):
        return [name for part in parts for name in _named(part)]
    return [parts] if kind == "place" else [parts[0]] if kind == "member" else []


def _value(content: Mapping[str, Any], places: Mapping[str, Slot]) -> Any:
    ((kind, parts),) = content.items()
    if kind in ("tuple", "size"):
        items = tuple(_value(part, places) for part in parts)
        return items if kind == "tuple" else torch.Size(items)
    if kind == "place":
        return places[parts].get()
    if kind == "member":
        held = places[parts[0]].get()
        known = held if isinstance(held, type) else type(held)
        if not issubclass(known, enum.Enum):
            raise FileError(f"{shown(parts[0])} holds no enumeration and no member of one")
        return known[parts[1]]
    return value_of(content)
