"""Contents: what a step leaves in a place, as data from which every rank makes it.

A content has the form that `runtime.filled_containers` reads, with a `Leaf` for each tensor and
number that only a run knows. An object that some place held before the step (a batch tensor, a
parameter, a module, a user's object) is given by the name of that place. Everything else is made
anew: containers, data classes, and plain objects, for which a place is named that holds their class
or another instance.
"""

from __future__ import annotations

import enum
import sys
import types
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from pardnn.backends.torch.capture.tracer import Tracer
from pardnn.backends.torch.ops.codec import encode
from pardnn.backends.torch.ops.host_scalars import node_of
from pardnn.backends.torch.user_step.held_numbers import named_places
from pardnn.backends.torch.user_step.object_graph import OPAQUE_PACKAGES, PLAIN, ObjectGraph
from pardnn.backends.torch.user_step.places import MAPPINGS, SEQUENCES, PlaceIndex, Reference
from pardnn.backends.torch.user_step.slots import Slot, has_attributes, items_of

#: Objects within objects deeper than this are not followed.
_MAX_DEPTH = 6
_SEQUENCES = {kind: name for name, kind in SEQUENCES.items()}
_MAPPINGS = {kind: name for name, kind in MAPPINGS.items()}

Content = dict[str, Any]


class Leaf(NamedTuple):
    """A tensor in a content, or a number that only a run knows."""

    value: Any


class Places:
    """The places of a step's objects, by what they held before the step.

    Args:
        objects: The object graph before the step.
        tracer: The tracer of the step.
    """

    def __init__(self, objects: ObjectGraph, tracer: Tracer) -> None:
        self._tracer = tracer
        self._held: dict[int, tuple[Reference, Any]] = {}
        self._kinds: dict[type, Reference] = {}
        self._of_kinds: dict[type, Reference] = {}
        self._replaced: dict[int, torch.Tensor] = {}
        self.index = index = PlaceIndex(objects)
        for name, value in index.arguments():
            self._add(name, value)
        for name, slot, value in named_places(objects):
            if "<" in name or isinstance(value, PLAIN) or id(value) in self._held:
                continue
            if isinstance(value, torch.Tensor) and not holds(slot, value):
                self._replaced[id(value)] = value
                continue
            reference = index.reference(slot)
            # A buffer's tensor may be a shard, which another place must not show.
            if reference is not None and not index.is_table(slot.holder):
                self._add(reference, value)

    def _add(self, reference: Reference, value: Any) -> None:
        self._held.setdefault(id(value), (reference, value))
        if isinstance(value, type):
            self._kinds.setdefault(value, reference)
        self._of_kinds.setdefault(type(value), reference)

    def of(self, value: Any) -> Reference | None:
        """Return a place that held an object before the step; None if there is none."""
        return self._held.get(id(value), (None, None))[0]

    def of_kind(self, kind: type) -> Reference | None:
        """Return a place that held a class, its module or an instance; None if none did."""
        of = self._kinds.get(kind) or self._of_kinds.get(kind)
        module = sys.modules.get(kind.__module__)
        if of is None and getattr(module, kind.__name__, None) is kind:
            of = self.of(module)
        return of

    def is_copied(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor may be left as a copy because no later step changes its content."""
        if isinstance(tensor, torch.nn.Parameter) or not self._tracer.aliases.knows(tensor):
            return False
        if id(tensor) in self._replaced:
            return True
        storage = self._tracer.aliases.fresh_value(tensor).storage
        return storage is not None and (
            not storage.source or storage.owner.call.kind in ("input", "constant")
        )


def content_of(value: Any, places: Places, depth: int = 0) -> Content | Leaf | None:
    """Return a value as data; None if no rank could make it.

    Args:
        value: What a place holds after the step.
        places: The places of the step's objects.
        depth: How many containers are around it.
    """
    if value is None or type(value) in (bool, int, float, str):
        return {"value": encode(value, str)}
    if node_of(value) is not None:
        return Leaf(value)
    if isinstance(value, enum.Enum):
        of = places.of_kind(type(value))
        return None if of is None else {"member": [of, value.name]}
    held = places.of(value)
    if held is not None and type(value) not in (tuple, torch.Size):
        return {"place": held}
    if isinstance(value, torch.Tensor):
        return Leaf(value) if places.is_copied(value) else None
    if isinstance(value, torch.dtype | torch.device | torch.layout | torch.memory_format):
        return {"value": encode(value, str)}
    return None if depth >= _MAX_DEPTH else _made(value, places, depth + 1)


def _made(value: Any, places: Places, depth: int) -> Content | None:
    """Return a container or an object as data."""
    kind = type(value)
    if kind in _MAPPINGS:
        pairs = [[content_of(each, places, depth) for each in item] for item in value.items()]
        return None if any(None in pair for pair in pairs) else {_MAPPINGS[kind]: pairs}
    if kind in _SEQUENCES or kind is deque:
        items = [content_of(each, places, depth) for each in value]
        if None in items:
            return None
        return {"deque": [value.maxlen, items]} if kind is deque else {_SEQUENCES[kind]: items}
    if kind is types.SimpleNamespace:
        pairs = [[key, content_of(each, places, depth)] for key, each in vars(value).items()]
        return None if any(None in pair for pair in pairs) else {"namespace": pairs}
    fields = _fields(value)
    of = None if fields is None else places.of_kind(kind)
    if fields is None or of is None:
        return None
    pairs = [[key, content_of(each, places, depth)] for key, each in fields.items()]
    return None if any(None in pair for pair in pairs) else {"object": [of, kind.__name__, pairs]}


def _fields(value: Any) -> dict[str, Any] | None:
    """Return the attributes of an object if it has no other content; otherwise None."""
    kind = type(value)
    if isinstance(value, tuple):
        names = getattr(value, "_fields", None)
        return None if names is None else dict(zip(names, value, strict=True))
    is_shared = isinstance(value, torch.nn.Module | torch.optim.Optimizer | type)
    if is_shared or kind.__module__.partition(".")[0] in OPAQUE_PACKAGES:
        return None
    if kind.__new__ is not object.__new__:
        return None  # made by C code, or by its own function
    return dict(items_of(value)) if has_attributes(value) else None


def holds(slot: Slot, value: Any) -> bool:
    """Whether a place holds an object now."""
    try:
        return slot.get() is value
    except (KeyError, IndexError):
        return False


def leaves_of(content: Content | Leaf | None) -> Iterator[Leaf]:
    """Yield the tensors and numbers of a content that only a run knows."""
    if isinstance(content, Leaf):
        yield content
    elif isinstance(content, list | dict):
        for each in content if isinstance(content, list) else content.values():
            yield from leaves_of(each)


def agree(one: Any, other: Any) -> bool:
    """Whether two traces of a step left equal contents; a number may be a symbol in one of them.

    Args:
        one: A content.
        other: The one of another trace.
    """
    if isinstance(one, Leaf) or isinstance(other, Leaf):
        return _kind(one) == _kind(other)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(agree, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(agree(one[key], other[key]) for key in one)
    return bool(one == other)


def _kind(content: Any) -> str:
    value = content.value if isinstance(content, Leaf) else None
    if isinstance(content, dict) and "value" in content:
        value = content["value"]
    is_number = node_of(value) is not None or isinstance(value, int | float | dict)
    return "number" if is_number else type(value).__name__


def recorded(content: Any, record: Any) -> Any:
    """Return a content with `record` of each leaf's value in its place."""
    if isinstance(content, Leaf):
        return record(content.value)
    if isinstance(content, list):
        return [recorded(each, record) for each in content]
    if isinstance(content, dict):
        return {key: recorded(each, record) for key, each in content.items()}
    return content
