"""Values other than tensors that steps have left in the user's objects, in a checkpoint.

Problem: a call leaves `self.phase = "warm"` or `counts["a"] = {"n": 0}`, and later ones read it. A
resumed run has made no such call.
Idea: for each place that a graph so far assigns, the plain value there is saved, under the
reference by which ranks find it, and restored on loading. Values in objects and containers that do
not exist yet are left to the call that creates those. For an object, which a file cannot hold, the
class is saved, and loading reports it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from pardnn.backends.torch.checkpoint.python_values import TAG, decode, encode
from pardnn.backends.torch.runtime.binding import Binding
from pardnn.backends.torch.runtime.filled_containers import holds
from pardnn.backends.torch.user_step.object_graph import PLAIN
from pardnn.backends.torch.user_step.places import PlaceIndex, Reference
from pardnn.backends.torch.user_step.slots import dotted
from pardnn.errors import shown
from pardnn.graph.ir import Graph

_LOGGER = logging.getLogger("pardnn")
#: What stands for an object, next to its class.
_OBJECT = "object"


class LeftValues:
    """The plain values in places that the graphs of a step assign.

    Args:
        graphs: Returns all graphs of the step, each with its binding.
        is_silent: Do not report objects: on all ranks but one.
    """

    def __init__(
        self, graphs: Callable[[], Iterable[tuple[Graph, Binding]]], *, is_silent: bool = False
    ) -> None:
        self._graphs, self._is_silent = graphs, is_silent
        self._loaded: dict[str, None] = {}

    def values(self, binding: Binding) -> dict[str, Any]:
        """Return them as JSON types, by place as JSON.

        Args:
            binding: The binding of the user's objects.
        """
        if not (places := self._places()):
            return {}
        index = PlaceIndex(binding.objects())
        slots = {place: index.slot(json.loads(place)) for place in places}
        held = {place: slot.get() for place, slot in slots.items() if slot and holds(slot)}
        return {
            place: encode(value, place) if _is_plain(value) else _class_of(value)
            for place, value in held.items()
            if not isinstance(value, torch.Tensor)  # a tensor is state or a result
        }

    def set(self, values: Mapping[str, Any], binding: Binding) -> None:
        """Put the values of a checkpoint into their places, outer containers first.

        Args:
            values: The result of `values`.
            binding: The binding of the user's objects.
        """
        self._loaded |= dict.fromkeys(values)
        for place in sorted(values, key=len):
            slot = PlaceIndex(binding.objects()).slot(json.loads(place))
            if _is_object(value := values[place]):
                if not self._is_silent:
                    now = slot.get() if slot is not None and holds(slot) else None
                    _tell(_name(json.loads(place)), value["class"], type(now).__qualname__)
            elif slot is not None:
                slot.set(decode(value))

    def _places(self) -> dict[str, None]:
        effects = (each for g, _ in self._graphs() for each in g.step_notes.get("effects", []))
        return self._loaded | {json.dumps(e["assign"][0]): None for e in effects if "assign" in e}


def makes(values: Mapping[str, Any], name: str) -> bool:
    """Whether a number is in one of the containers that a checkpoint puts into the objects.

    Args:
        values: The result of `LeftValues.values`.
        name: The name of the number.
    """
    places = (place for place, value in values.items() if not _is_object(value))
    return any(name.startswith(f"{_name(json.loads(place))}.") for place in places)


def _class_of(value: Any) -> dict[str, str]:
    return {TAG: _OBJECT, "class": type(value).__qualname__}


def _is_object(value: Any) -> bool:
    return isinstance(value, dict) and value.get(TAG) == _OBJECT


def _tell(name: str, then: str, now: str) -> None:
    if now != then:
        _LOGGER.warning(
            "pardnn: the run that was saved had left %s in %s, which a checkpoint cannot hold; it "
            "is %s here. If the step reads it, make one before `load`, or give it to `extra`.",
            shown(then), name, shown(now),
        )  # fmt: skip


def _name(place: Reference) -> str:
    return place if isinstance(place, str) or place[1] is None else dotted(place[0], place[1])


def _is_plain(value: Any) -> bool:
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    if type(value) is dict:
        return all(type(key) in (str, int) for key in value) and all(map(_is_plain, value.values()))
    return type(value) in PLAIN
