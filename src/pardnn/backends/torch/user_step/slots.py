"""The places that hold a step's tensors and numbers, and where others can be put.

A place is an item of a container, an attribute, a closure cell, a global, or a part of a tuple in
one of these.
"""

from __future__ import annotations

import gc
import types
import weakref
from collections import defaultdict, deque
from collections.abc import Collection, Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

#: Functions that run in a step without being named by it.
HOOK_TABLES = frozenset({
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks",
    "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks", "_post_accumulate_grad_hooks",
})  # fmt: skip
#: Views of a dictionary, which hold nothing themselves.
VIEWS = (types.MappingProxyType, *(type(view) for view in ({}.keys(), {}.values(), {}.items())))


@dataclass(frozen=True, slots=True)
class GlobalName:
    """One name of a module's globals, or of a class, as a holder in `ObjectGraph.contents`."""

    namespace: dict[str, Any] | type
    name: str


class Slot(NamedTuple):
    """One place that holds a value: an item, an attribute, a closure cell, or a part of a tuple.

    Attributes:
        holder: A dict, list, closure cell, or an object or class whose attribute it is.
        key: The key, index or attribute; None for a cell.
        path: Indices through tuples inside what the holder holds.
    """

    holder: Any
    key: Any
    path: tuple[int, ...] = ()

    def get(self) -> Any:
        """Return the current value."""
        value = _held(self.holder, self.key)
        for index in self.path:
            value = value[index]
        return value

    def set(self, value: Any) -> None:
        """Set the value; tuples on the way are rebuilt."""
        if self.path:
            value = _rebuilt(_held(self.holder, self.key), self.path, value)
        if isinstance(self.holder, types.CellType):
            self.holder.cell_contents = value
        else:
            items_of(self.holder)[self.key] = value


class Entry(NamedTuple):
    """A value in the object graph and the place that holds it.

    Attributes:
        name: Dotted path from the step's parameters.
        value: Any object.
        slot: Where it is held; None if it cannot be replaced.
        owner: The innermost module or optimizer on the way; None if there is none.
        argument: Index of the argument that leads to it; -1 for closures and globals.
        numeric: Whether a number here may differ from step to step.
    """

    name: str
    value: Any
    slot: Slot | None = None
    owner: Any = None
    argument: int = -1
    numeric: bool = False

    def child(
        self, key: Any, value: Any, holder: Any = None, *, numeric: bool | None = None
    ) -> Entry:
        """Return the entry of what this value holds under `key`, in `holder` if it is replaceable.

        Args:
            key: Key, index or attribute.
            value: What is held there.
            holder: The container that `key` indexes; None if nothing can be set there.
            numeric: The entry's `numeric`; this one's by default.
        """
        name = dotted(self.name, key)
        slot = None if holder is None else Slot(holder, key)
        numeric = self.numeric if numeric is None else numeric
        return Entry(name, value, slot, self.owner, self.argument, numeric)


class RootName(str):
    """The empty path, of the object whose method the step is.

    Attributes:
        taken: Names of arguments: attributes of such names are called `self.name`.
    """

    __slots__ = ("taken",)

    def __new__(cls, taken: Collection[str]) -> RootName:
        """Return an empty text."""
        root = super().__new__(cls)
        root.taken = taken
        return root


def dotted(prefix: str, key: Any) -> str:
    """Return "prefix.key", or just "key" if there is no prefix."""
    if isinstance(key, weakref.ref):
        key = type(key()).__name__
    if prefix:
        return f"{prefix}.{key}"
    is_taken = isinstance(prefix, RootName) and key in prefix.taken
    return f"self.{key}" if is_taken else str(key)


def slot_of(holder: Any, key: Any) -> Slot:
    """Return the place of an item of a holder in `ObjectGraph.contents`.

    Args:
        holder: A container or object, a closure cell, or the name of a global.
        key: The key of the item; any for a cell and a global.
    """
    if isinstance(holder, GlobalName):
        return Slot(holder.namespace, holder.name)
    return Slot(holder, None if isinstance(holder, types.CellType) else key)


def items_of(holder: Any) -> Any:
    """Return the holder of an object's values: itself, or the dictionary of its attributes."""
    if isinstance(holder, dict | list | deque):
        return holder
    if isinstance(holder, type):
        return ClassAttributes(holder)
    # Through __dict__ or slots, so that neither properties nor frozen dataclasses interfere.
    return Attributes(holder) if slots_of_class(type(holder)) else holder.__dict__


def tuple_items(entry: Entry) -> Iterator[Entry]:
    """Yield the items of a tuple, which can only be replaced together with it."""
    names = getattr(entry.value, "_fields", range(len(entry.value)))
    for i, (key, item) in enumerate(zip(names, entry.value, strict=False)):
        slot = entry.slot and Slot(entry.slot.holder, entry.slot.key, (*entry.slot.path, i))
        yield entry._replace(name=dotted(entry.name, key), value=item, slot=slot)


def ordered_keys(holder: Any) -> dict[Any, Any] | None:
    """Return a dictionary itself, or that of an object's attributes; None for anything else."""
    found = holder if isinstance(holder, dict) else getattr(holder, "__dict__", None)
    is_namespace = isinstance(holder, type | types.ModuleType)
    return found if isinstance(found, dict) and not is_namespace else None


def has_attributes(value: Any) -> bool:
    """Whether a value has attributes of its own, in a dictionary or in slots."""
    return hasattr(value, "__dict__") or bool(slots_of_class(type(value)))


def slots_of_class(kind: type) -> dict[str, types.MemberDescriptorType]:
    """Return the descriptor of each attribute that a class declares in `__slots__`.

    They are named as in bytecode, where `__x` of a class `A` is `_A__x`.
    """
    declaring = [base for base in reversed(kind.__mro__) if "__slots__" in vars(base)]
    return {
        name: member
        for base in declaring
        for name, member in vars(base).items()
        if isinstance(member, types.MemberDescriptorType)
    }


class Attributes(MutableMapping[str, Any]):
    """The attributes of an object whose class has `__slots__`, like the `__dict__` of others.

    Args:
        holder: The object; attributes without a slot are in its `__dict__`, if it has one.
    """

    def __init__(self, holder: Any) -> None:
        self._holder, self._slots = holder, slots_of_class(type(holder))
        self._rest: dict[str, Any] = getattr(holder, "__dict__", {})

    def __getitem__(self, key: str) -> Any:
        """Return an attribute; KeyError where it is not set."""
        if key not in self._slots:
            return self._rest[key]
        try:
            return self._slots[key].__get__(self._holder)
        except AttributeError:
            raise KeyError(key) from None

    def __setitem__(self, key: str, value: Any) -> None:
        """Set an attribute."""
        if key in self._slots:
            self._slots[key].__set__(self._holder, value)
        else:
            self._rest[key] = value

    def __delitem__(self, key: str) -> None:
        """Delete an attribute; KeyError where it is not set."""
        if key not in self._slots:
            del self._rest[key]
            return
        try:
            self._slots[key].__delete__(self._holder)
        except AttributeError:
            raise KeyError(key) from None

    def __iter__(self) -> Iterator[str]:
        """Yield the names of the set attributes, slots first."""
        unset = object()
        yield from [key for key in self._slots if self.get(key, unset) is not unset]
        yield from self._rest

    def __len__(self) -> int:
        """Return how many attributes are set."""
        return sum(1 for _ in self)

    def held_by(self, key: str) -> Any:
        """Return the object itself for a slot, and its `__dict__` for any other attribute."""
        return self._holder if key in self._slots else self._rest


class ClassAttributes(Attributes):
    """The attributes of a class itself, whose `__dict__` is read-only.

    Args:
        holder: The class.
    """

    def __init__(self, holder: type) -> None:
        self._holder, self._slots, self._rest = holder, {}, vars(holder)  # pyright: ignore

    def __setitem__(self, key: str, value: Any) -> None:
        """Set an attribute, bypassing the metaclass."""
        type.__setattr__(self._holder, key, value)

    def __delitem__(self, key: str) -> None:
        """Delete an attribute."""
        type.__delattr__(self._holder, key)

    def held_by(self, key: str) -> Any:
        """Return the dictionary behind `__dict__`."""
        return behind_view(self._rest)


def behind_view(holder: Any) -> Any:
    """Return the dictionary behind a view, such as that of a class or `keys()`; else the holder."""
    return gc.get_referents(holder)[0] if isinstance(holder, VIEWS) else holder


def _held(holder: Any, key: Any) -> Any:
    if isinstance(holder, types.CellType):
        return holder.cell_contents
    items = items_of(holder)
    if isinstance(items, defaultdict) and key not in items:
        raise KeyError(key)  # looking must not create an item
    return items[key]


def _rebuilt(container: Any, path: tuple[int, ...], value: Any) -> Any:
    items = list(container)
    head, *rest = path
    items[head] = _rebuilt(items[head], tuple(rest), value) if rest else value
    # A namedtuple takes its items as arguments, a tuple as one iterable.
    return type(container)(*items) if hasattr(container, "_fields") else type(container)(items)


def set_gradient(parameter: torch.Tensor, value: Any) -> None:
    """Set a gradient, even of another shape, which torch refuses to assign but allows to change."""
    if not isinstance(value, torch.Tensor) or value.shape == parameter.shape:
        parameter.grad = value
        return
    shard = value.data
    value.data = shard.new_empty(()).expand(parameter.shape)
    parameter.grad = value
    value.data = shard
