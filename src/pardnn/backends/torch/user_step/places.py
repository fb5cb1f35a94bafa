"""References to the places of a step's objects: the same on every rank, and unique for each slot.

The dotted names of `object_graph` may stand for two places: an argument `x`, and an attribute `x`
of the object whose method the step is. A reference is the name of an argument, or the path to a
holder and a key in it, which is None for a closure variable or a global.
"""

from __future__ import annotations

import types
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from pardnn.backends.torch.user_step.object_graph import ARGUMENTS, ObjectGraph
from pardnn.backends.torch.user_step.slots import GlobalName, Slot, slot_of

#: An argument's name, or [path, key].
Reference = str | Sequence[Any]
#: Ends the path to the table of a module's buffers, which walks give the name of the module.
BUFFERS = "_buffers"
#: Containers that a step may leave in a place, by the names that data has for them.
SEQUENCES: dict[str, Callable[[Iterable[Any]], Any]] = {
    "list": list, "tuple": tuple, "size": torch.Size, "set": set, "frozenset": frozenset,
}  # fmt: skip
MAPPINGS: dict[str, Callable[[Any], Any]] = {
    "dict": dict, "ordered": OrderedDict, "counter": Counter,
}  # fmt: skip


class PlaceIndex:
    """The places of some objects by reference.

    Args:
        objects: The object graph of a step, or of one argument.
    """

    def __init__(self, objects: ObjectGraph) -> None:
        self._args: list[Any] = next((h for n, h, _ in objects.contents if n == ARGUMENTS), [])
        self._arguments = dict(objects.arguments)
        self._holders: dict[tuple[str, bool], Any] = {}
        self._paths: dict[Any, str] = {}
        for name, holder, _ in objects.contents:
            path, is_variable = name, isinstance(holder, types.CellType | GlobalName)
            module = self._holders.get((path, False))
            if isinstance(module, torch.nn.Module) and module._buffers is holder:
                path = f"{name}.{BUFFERS}"
            is_first = self._holders.setdefault((path, is_variable), holder) is holder
            if path != ARGUMENTS and is_first:
                self._paths[_key_of(holder)] = path

    def slot(self, reference: Reference) -> Slot | None:
        """Return the place of a reference; None if it leads nowhere here."""
        if isinstance(reference, str):
            index = self._arguments.get(reference)
            return None if index is None else Slot(self._args, index)
        path, key = reference
        holder = self._holders.get((path, key is None))
        return None if holder is None else slot_of(holder, key)

    def reference(self, slot: Slot) -> Reference | None:
        """Return the reference to a place; None if no other rank could follow it."""
        if slot.path or not isinstance(slot.key, str | int | None):
            return None
        if isinstance(slot.holder, types.CellType):
            path = self._paths.get(_key_of(slot.holder))
            return None if path is None else [path, None]
        variable = self._paths.get((id(slot.holder), slot.key))  # a global
        if variable is not None:
            return [variable, None]
        path = self._paths.get(_key_of(slot.holder))
        return None if path is None else [path, slot.key]

    def is_table(self, holder: Any) -> bool:
        """Whether a holder is the table of a module's buffers."""
        return self._paths.get(_key_of(holder), "").endswith(f".{BUFFERS}")

    def arguments(self) -> Iterator[tuple[str, Any]]:
        """Yield the name and value of each argument."""
        for name, index in self._arguments.items():
            yield name, self._args[index]


def _key_of(holder: Any) -> Any:
    is_global = isinstance(holder, GlobalName)
    return (id(holder.namespace), holder.name) if is_global else id(holder)
