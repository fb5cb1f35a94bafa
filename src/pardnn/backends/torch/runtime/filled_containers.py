"""What a step puts into the user's objects: each rank puts it into its own objects afterwards.

Lists and dictionaries are filled with what `capture.numbers.containers` records, and values
assigned as `capture.assigned` records them: [place, content, whether later steps read the place];
the last is "same" if they read the value but do the same with it. A content has the form of
`effects.value_of`, or

    {"place": place}                           what a place held before the step
    {"same": place}                            what the step assigns to another place, too
    {"gone": true}                             nothing any more
    {"member": [place, name]}                  of the enumeration that a place holds
    {"object": [place, class, [[attribute, content], ...]]}    a plain object of a class
    {"namespace": [[attribute, content], ...]} a SimpleNamespace
    {"deque": [maxlen, [content, ...]]}        and "list", "tuple", "size", "set", "frozenset"
    {"dict": [[content, content], ...]}        and "ordered", "counter"

A place is a reference as in `user_step.places`; one that stands for a class holds the class, an
object of it, or the user's module that has it.
"""

from __future__ import annotations

import enum
import json
import types
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from pardnn.backends.torch.runtime.effects import value_of
from pardnn.backends.torch.user_step.code_names import is_library_module
from pardnn.backends.torch.user_step.held_numbers import place
from pardnn.backends.torch.user_step.object_graph import ObjectGraph, walk_objects
from pardnn.backends.torch.user_step.places import MAPPINGS, SEQUENCES, PlaceIndex, Reference
from pardnn.backends.torch.user_step.slots import Slot, dotted, items_of
from pardnn.backends.torch.user_step.sources import Source
from pardnn.errors import FileError, MismatchError, shown
from pardnn.graph.ir import Graph

#: What a step may do to a container, by its type.
_METHODS: dict[type, frozenset[str]] = {
    list: frozenset({"append", "clear", "extend"}),
    deque: frozenset({"append", "appendleft", "clear", "extend"}),
    dict: frozenset({"__setitem__", "clear", "update"}),
}
CONTAINERS = tuple(_METHODS)
_GONE = object()


class Assigned(NamedTuple):
    """The places that a step assigns.

    Attributes:
        slots: The slots by reference as JSON, including those from which it takes objects.
        unread: References to the places that no later step reads.
        left: References and values of places that later steps read without changing what they do.
    """

    slots: Mapping[str, Slot]
    unread: Sequence[Reference]
    left: Sequence[tuple[Reference, Any]] = ()

    def unread_slots(self) -> list[Slot]:
        """Return the places that no later step reads."""
        return [self.slots[_key(each)] for each in self.unread]

    def left_values(self) -> dict[tuple[int, Any], Any]:
        """Return left values for which the graph also holds, by `held_numbers.place`."""
        return {place(self.slots[_key(each)]): value for each, value in self.left}

    def absent(self) -> list[tuple[str, Slot]]:
        """Return the name and place of each empty place that a step reads."""
        unread = set(map(_key, self.unread))
        return [
            (_shown(json.loads(key)), slot)
            for key, slot in self.slots.items()
            if key not in unread and not holds(slot)
        ]


def holds(slot: Slot) -> bool:
    """Whether a place holds anything."""
    try:
        slot.get()
    except (LookupError, ValueError):
        return False
    return True


def held_in(slot: Slot) -> Any:
    """Return what a place holds; None if nothing."""
    return slot.get() if holds(slot) else None


def filled_names(graph: Graph) -> list[str]:
    """Return the names of the containers that a graph's step fills."""
    effects = graph.step_notes.get("effects", [])
    return list(dict.fromkeys(each["call"][0] for each in effects if "call" in each))


def assigned_names(graph: Graph) -> set[str]:
    """Return the names of the places that a graph's step assigns."""
    effects = graph.step_notes.get("effects", [])
    return {_shown(each["assign"][0]) for each in effects if "assign" in each}


def fill(effects: Iterable[Mapping[str, Any]], containers: Mapping[str, Any]) -> None:
    """Put the output of the last step into containers.

    Args:
        effects: The effects of the step.
        containers: This rank's containers by name.

    Raises:
        FileError: E402, if no capture records such an effect.
    """
    for name, keys, method, args in (each["call"] for each in effects if "call" in each):
        container = containers[name]
        for key in map(value_of, keys):
            container = container.setdefault(key, [])
        kind = next((kind for kind in CONTAINERS if isinstance(container, kind)), None)
        if kind is None or method not in _METHODS[kind]:
            raise FileError(f"a step does not call {method!r:.80} of {shown(name)}")
        getattr(container, method)(*map(value_of, args))


def rebind(effects: Iterable[Mapping[str, Any]], batch: Iterable[ObjectGraph]) -> dict[str, Any]:
    """Put the tensors of the step into containers of the batch.

    Args:
        effects: The effects of the step.
        batch: What the arguments hold.

    Returns:
        Tensors for other places, by name.
    """
    rebound = dict(effect["rebind"] for effect in effects if "rebind" in effect)
    found: set[str] = set()
    for entry in (entry for objects in batch for entry in objects.tensors):
        if entry.name in rebound and entry.slot is not None:
            entry.slot.set(rebound[entry.name])
            found.add(entry.name)
    return {name: tensor for name, tensor in rebound.items() if name not in found}


def assigned_places(step: Callable[..., Any], args: Sequence[Any], graph: Graph) -> Assigned:
    """Return the places that a graph's step assigns, or takes objects from.

    Args:
        step: The user's step.
        args: Its arguments.
        graph: The graph of that step.

    Raises:
        MismatchError: E505, if the step's objects do not have all of them.
    """
    effects = graph.step_notes.get("effects", [])
    noted = [each["assign"] for each in effects if "assign" in each]
    if not noted:
        return Assigned({}, ())
    index = PlaceIndex(walk_objects(step, list(args)))
    found: dict[str, Slot] = {}
    for reference in (r for target, content, _ in noted for r in (target, *_named(content))):
        slot = index.slot(reference)
        if slot is None:
            name = _shown(reference)
            raise MismatchError(
                f"the graph was captured from another step: the value {shown(name)} is not in "
                "this step's objects.\nCapture and plan this step again.",
                code="E505",
                details={"missing": [name]},
            )
        found[_key(reference)] = slot
    left = tuple((each, value_of(data)) for each, data, read in noted if read == "same")
    return Assigned(found, tuple(each for each, _, read in noted if not read), left)


def assign(
    effects: Iterable[Mapping[str, Any]],
    assigned: Assigned,
    sources: Mapping[str, Source],
    batch: Iterable[ObjectGraph],
) -> None:
    """Make the assignments of the last step in the user's objects.

    Args:
        effects: The effects of the step.
        assigned: The result of `assigned_places`.
        sources: The sources of the step, by name.
        batch: What the batch's arguments hold.
    """
    noted = [each["assign"][:2] for each in effects if "assign" in each]
    if noted:
        given = [PlaceIndex(each) for each in batch]
        places = dict(assigned.slots)
        for reference in (r for target, content in noted for r in (target, *_named(content))):
            found = (index.slot(reference) for index in given)
            slot = next((slot for slot in found if slot is not None), None)
            if slot is not None:
                places[_key(reference)] = slot
        made: dict[str, Any] = {}
        for target, content in noted:
            is_same = isinstance(content, dict) and "same" in content
            made[_key(target)] = made[_key(content["same"])] if is_same else _value(content, places)
        for key, value in made.items():
            slot = places[key]
            if value is _GONE:
                items_of(slot.holder).pop(slot.key, None)
            else:
                slot.set(value)
    for name, flag in (each["trainable"] for each in effects if "trainable" in each):
        sources[name].get().requires_grad_(bool(flag))


def put_in_order(container: dict[Any, Any], keys: Sequence[Any]) -> None:
    """Move the keys of a dictionary so that the given ones have the given order."""
    known = {*keys} & container.keys()
    wanted = iter([key for key in keys if key in known])
    found = [next(wanted) if key in known else key for key in container]
    if found != [*container]:
        for key in found:
            container[key] = container.pop(key)


def _key(reference: Reference) -> str:
    return json.dumps(reference)


def _shown(reference: Reference) -> str:
    """Return the name of a place for error messages."""
    is_path = not isinstance(reference, str)
    path, key = (reference[0], reference[1]) if is_path else (reference, None)
    return str(path) if key is None else dotted(path, key)


def _named(content: Any) -> list[Reference]:
    """Return the places that a content refers to."""
    if isinstance(content, list):
        return [reference for part in content for reference in _named(part)]
    if not isinstance(content, dict) or len(content) != 1:
        return []
    ((kind, parts),) = content.items()
    if kind in ("place", "member"):
        return [parts] if kind == "place" else [parts[0]]
    if kind == "object":
        return [parts[0], *(name for _, part in parts[2] for name in _named(part))]
    return [] if kind in ("value", "text", "kept", "same") else _named(parts)


def _value(content: Any, places: Mapping[str, Slot]) -> Any:
    """Return what a content stands for."""
    if not isinstance(content, dict):
        return content  # a tensor or number of the step
    ((kind, parts),) = content.items()
    if kind == "gone":
        return _GONE
    if kind == "place":
        return places[_key(parts)].get()
    if kind == "member":
        known = _class_at(parts[0], places)
        if not issubclass(known, enum.Enum):
            raise FileError(f"{shown(_shown(parts[0]))} holds no enumeration and no member of one")
        return known[parts[1]]
    if kind == "namespace":
        return types.SimpleNamespace(**{key: _value(part, places) for key, part in parts})
    if kind == "object":
        fields = {key: _value(part, places) for key, part in parts[2]}
        return _object(_class_at(parts[0], places, parts[1]), *parts[:2], fields)
    if kind == "deque":
        return deque((_value(part, places) for part in parts[1]), maxlen=parts[0])
    if kind in SEQUENCES:
        return SEQUENCES[kind](_value(part, places) for part in parts)
    if kind in MAPPINGS:
        pairs = ((_value(key, places), _value(part, places)) for key, part in parts)
        return MAPPINGS[kind](dict(pairs))
    return value_of(content)


def _class_at(reference: Reference, places: Mapping[str, Slot], name: str = "") -> type:
    held = places[_key(reference)].get()
    if isinstance(held, types.ModuleType) and not is_library_module(held):
        held = vars(held).get(name)
    return held if isinstance(held, type) else type(held)


def _object(kind: type, place: Reference, name: str, fields: Mapping[str, Any]) -> Any:
    """Return an object with some attributes, without running its constructor.

    Raises:
        FileError: E402, if there is no such class at the place.
    """
    is_plain = kind.__new__ is object.__new__
    if kind.__name__ != name or not (is_plain or hasattr(kind, "_fields")):
        raise FileError(f"{shown(_shown(place))} holds no {name!r:.80} and no object of it")
    if not is_plain:
        return kind(*fields.values())  # a named tuple
    made = kind.__new__(kind)
    for key, value in fields.items():
        # Works for frozen classes, too.
        object.__setattr__(made, key, value)
    return made
