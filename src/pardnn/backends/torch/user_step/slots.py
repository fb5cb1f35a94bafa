"""The places that hold a step's tensors and numbers, where others can be put.

An item of a container, an attribute, a closure cell, a global, or a part of a tuple in one of them.
"""

from __future__ import annotations

import types
from collections import deque
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class GlobalName:
    """One name of a module's globals, as a holder in `ObjectGraph.contents`."""

    namespace: dict[str, Any]
    name: str


@dataclass(frozen=True, slots=True)
class Slot:
    """One place that holds a value: an item, an attribute, a closure cell, or a part of a tuple.

    Attributes:
        holder: A dict, list, closure cell, or an object whose attribute it is.
        key: The key, index or attribute; None for a cell.
        path: Indices through tuples inside of what the holder holds.
    """

    holder: Any
    key: Any
    path: tuple[int, ...] = ()

    def get(self) -> Any:
        """Return what is held there now."""
        value = _held(self.holder, self.key)
        for index in self.path:
            value = value[index]
        return value

    def set(self, value: Any) -> None:
        """Hold `value` there; tuples on the way are rebuilt."""
        if self.path:
            value = _rebuilt(_held(self.holder, self.key), self.path, value)
        if isinstance(self.holder, types.CellType):
            self.holder.cell_contents = value
        else:
            items_of(self.holder)[self.key] = value


def slot_of(holder: Any, key: Any) -> Slot:
    """Return the place of an item of a holder in `ObjectGraph.contents`.

    Args:
        holder: A container or object, a closure cell, or the name of a global.
        key: Of the item; any for a cell and a global.
    """
    if isinstance(holder, GlobalName):
        return Slot(holder.namespace, holder.name)
    return Slot(holder, None if isinstance(holder, types.CellType) else key)


def items_of(holder: Any) -> Any:
    """Return what holds an object's values: itself, or the dictionary of its attributes."""
    # Through __dict__, so that neither properties nor frozen dataclasses interfere.
    return holder if isinstance(holder, dict | list | deque) else holder.__dict__


def _held(holder: Any, key: Any) -> Any:
    return holder.cell_contents if isinstance(holder, types.CellType) else items_of(holder)[key]


def _rebuilt(container: Any, path: tuple[int, ...], value: Any) -> Any:
    items = list(container)
    head, *rest = path
    items[head] = _rebuilt(items[head], tuple(rest), value) if rest else value
    # A namedtuple takes its items as arguments, a tuple as one iterable.
    return type(container)(*items) if hasattr(container, "_fields") else type(container)(items)
