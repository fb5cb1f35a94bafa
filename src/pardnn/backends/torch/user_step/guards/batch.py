"""Guards on what a batch holds besides tensors: flags, counts, texts, functions, classes."""

from __future__ import annotations

import collections
import dataclasses
import dis
import functools
import types
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from pardnn.backends.torch.user_step.code_names import object_question
from pardnn.backends.torch.user_step.guards.held_content import content_of, has_content
from pardnn.backends.torch.user_step.guards.item import (
    ABSENT,
    VALUES,
    Change,
    Held,
    differ,
    holding,
)
from pardnn.backends.torch.user_step.object_graph import attributes_of
from pardnn.backends.torch.user_step.slots import (
    VIEWS,
    behind_view,
    dotted,
    has_attributes,
    slots_of_class,
)
from pardnn.backends.torch.user_step.used_names import UsedNames

_CLOSED_PACKAGES = frozenset({
    "builtins", "collections", "logging", "numpy", "pardnn", "random", "threading", "torch",
    "typing",
    "weakref",
})  # fmt: skip


#: Types whose items are held by an attribute.
HOLDERS = collections.ChainMap | collections.UserDict | collections.UserList


class _Keys(list[Any]):
    """The keys of a dictionary in order; new keys do not count as such, only their values."""

    def agree_with(self, others: _Keys) -> bool:
        """Return whether the keys of both are in the same order."""
        mine, theirs = set(self), set(others)
        return [key for key in others if key in mine] == [key for key in self if key in theirs]


class _Equal:
    """A value that shows no parts, such as a date: compared as its class does, or by content."""

    def __init__(self, value: Any) -> None:
        self._kind = type(value)
        self._value = content_of(value) if has_content(value) else value

    def __repr__(self) -> str:
        return repr(self._value)

    def agree_with(self, other: _Equal) -> bool:
        """Return whether both are of one class, and equal."""
        return self._kind is other._kind and bool(self._value == other._value)


class BatchGuards:
    """Guards on what the batch held at capture.

    Args:
        step: The user's step.
        names: The names of its arguments.
        used: Names in its code.
        written: Places of numbers that the step itself changes, `held_numbers.place`.
        live: Names of numbers that are read at every call.
        filled: Containers that the step only fills, by name.

    Attributes:
        compares_objects: Whether the user's code may ask which object a tensor is.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        names: Sequence[str],
        used: UsedNames,
        written: Collection[tuple[int, Any]],
        live: Collection[str],
        filled: Mapping[str, Any],
    ) -> None:
        self._names, self._used = names, used
        self._written, self._live, self._filled = written, live, filled
        self._ignored = _unread_arguments(step, names)
        self.compares_objects = any(object_question(each.__code__) for each in used.functions)
        self._then: dict[int, dict[str, Any]] = {}

    def hold(self, batch: Mapping[int, Any]) -> None:
        """Guard a batch as it is now, given by argument index."""
        self._then = {i: self._values(self._names[i], value) for i, value in batch.items()}

    def ignores(self, name: str) -> bool:
        """Whether an item of the batch is in a part that the step's code never reads."""
        unread = [*self._ignored, *self._filled]
        return any(name == each or name.startswith(f"{each}.") for each in unread)

    def changes(self, batch: Mapping[int, Any]) -> list[Change]:
        """Return what differs in another batch, by index of the argument."""
        return [
            change
            for i, value in batch.items()
            if not (isinstance(value, torch.Tensor) and not value.__dict__ and not self._then[i])
            and self._names[i] not in self._ignored
            for change in self._changes(i, value)
        ]

    def _changes(self, index: int, value: Any) -> Iterator[Change]:
        then, now = self._then[index], self._values(self._names[index], value)
        others: list[str] = []
        for name in dict.fromkeys([*then, *now]):
            if name not in now and isinstance(then[name], Held):
                # Nothing of a new object has been written yet, so its numbers need no mention.
                others.append(f"{name}.")
                yield Change(name, "that of capture", "another object")
            elif name not in then and name.startswith(tuple(others)):
                continue
            elif isinstance(then.get(name), _Equal) and isinstance(now.get(name), _Equal):
                if not then[name].agree_with(now[name]):
                    yield Change(name, then[name], now[name])
            elif isinstance(then.get(name), _Keys) and isinstance(now.get(name), _Keys):
                if not then[name].agree_with(now[name]):
                    yield Change(name, "that of capture", "another")
            elif name.startswith("the order of "):
                continue  # its holder is missing in one of them
            elif differ(now.get(name, ABSENT), then.get(name, ABSENT)):
                yield Change(name, then.get(name), now.get(name))

    def _values(self, name: str, value: Any) -> dict[str, Any]:
        """Return the plain values of a batch by path, without the numbers that stay live."""
        found: dict[str, Any] = {}
        seen: dict[int, Any] = {}
        stack = [(name, value, True)]
        while stack:
            path, at, is_live = stack.pop()
            is_read = isinstance(at, float) or path in self._live
            if path in self._filled:
                continue
            if is_live and is_read:
                found[path] = type(at)  # code may test its type, and whether it exists
                continue
            if isinstance(at, torch.Tensor):
                own = attributes_of(at).items()
                stack += [(dotted(path, k), item, False) for k, item in own if k in self._used]
                continue
            if isinstance(at, VALUES):
                found[path] = at
            elif id(at) not in seen:
                seen[id(at)] = at  # kept alive so that no id is reused
                stack += self._within(path, at, is_live, found)
        return found

    def _within(
        self, path: str, at: Any, is_live: bool, found: dict[str, Any]
    ) -> list[tuple[str, Any, bool]]:
        """Return path and value of what one value holds.

        Args:
            path: The path to it.
            at: The value.
            is_live: Whether numbers in it are read at every call.
            found: Receives what is compared of it as a whole.
        """
        if isinstance(at, dict | tuple | list | deque):
            items = list(at.items() if isinstance(at, dict) else enumerate(at))
            found[dotted(path, "__class__")] = type(at)  # so that an empty one is noticed, too
            if isinstance(at, dict) and len(at) > 1:
                found[f"the order of {path}"] = _Keys(at)
            parts = self._unwritten(path, at, items, is_live, found)
            own = vars(at) if is_users_object(at) and hasattr(at, "__dict__") else at
            if own is not at:
                items = [(k, item) for k, item in own.items() if k in self._used]
                parts += self._unwritten(dotted(path, "__dict__"), own, items, False, found)
            return parts
        if isinstance(at, VIEWS):
            found[f"the view {path}"] = type(at)
            return [(path, behind_view(at), is_live)]
        if isinstance(at, HOLDERS):
            found[dotted(path, "__class__")] = type(at)
            return [(dotted(path, key), each, False) for key, each in vars(at).items()]
        if isinstance(at, set):
            found[path] = frozenset(at)
        elif isinstance(at, types.FunctionType | types.MethodType | functools.partial):
            return list(_of_function(path, at, found))
        elif isinstance(at, functools._lru_cache_wrapper):
            return [(path, at.__wrapped__, False)]
        elif is_users_object(at) and not isinstance(at, type):
            found[dotted(path, "__class__")] = holding(type(at))
            # Numbers of dataclasses are sources of the graph; those of plain objects are not.
            is_live = is_live and dataclasses.is_dataclass(at)
            parts: list[tuple[str, Any, bool]] = []
            for holder, attributes in _attributes(at):
                items = [(k, item) for k, item in attributes.items() if k in self._used]
                parts += self._unwritten(path, holder, items, is_live, found)
            return parts
        elif callable(at):
            found[path] = holding(at)
        elif has_content(at) or _is_equal_by_value(at):
            found[path] = _Equal(at)
        return []

    def _unwritten(
        self,
        path: str,
        holder: Any,
        items: list[tuple[Any, Any]],
        is_live: bool,
        found: dict[str, Any],
    ) -> list[tuple[str, Any, bool]]:
        """Return path and value of the items that the step itself does not change.

        Args:
            path: The path to the holder.
            holder: The holder of the items; if the step changes one, it has to be the same at each
                call.
            items: The items by key.
            is_live: Whether numbers among them are read at every call.
            found: Receives the holder.
        """
        rest = [(k, x) for k, x in items if (id(holder), k) not in self._written]
        if len(rest) < len(items):
            found[path] = holding(holder)
        return [(dotted(path, key), item, is_live) for key, item in rest]


def _of_function(path: str, at: Any, found: dict[str, Any]) -> Iterator[tuple[str, Any, bool]]:
    """Yield path and value of what a function holds; one remade from the same code is the same.

    Args:
        path: The path to the function.
        at: A function, a method or a partial one.
        found: Receives its code, and the objects that it is bound to.
    """
    if isinstance(at, types.FunctionType):
        found[path] = holding(at.__code__)
        cells = zip(at.__code__.co_freevars, at.__closure__ or (), strict=True)
        held = {name: getattr(cell, "cell_contents", None) for name, cell in cells}
        held |= {"__defaults__": at.__defaults__, "__kwdefaults__": at.__kwdefaults__}
    elif isinstance(at, types.MethodType):
        held = {"__func__": at.__func__, "__self__": at.__self__}
    else:
        held = {"func": at.func, "args": at.args, "keywords": at.keywords}
    for name, value in held.items():
        if isinstance(value, torch.Tensor) or is_users_object(value):
            found[dotted(path, f"{name} itself")] = holding(value)
        yield dotted(path, name), value, False


def _is_equal_by_value(value: Any) -> bool:
    kind = type(value)
    is_own = kind.__eq__ is not object.__eq__  # type: ignore[comparison-overlap]
    return is_own and kind.__hash__ is not None


def is_users_object(value: Any) -> bool:
    """Whether a value has attributes that the user's code may have given it."""
    package = type(value).__module__.partition(".")[0]
    return has_attributes(value) and package not in _CLOSED_PACKAGES


def is_settable(value: Any) -> bool:
    """Whether a value is an object of torch with attributes, such as a hook of `weight_norm`.

    Modules and optimizers are not meant: they have guards of their own.
    """
    return type(value).__module__.partition(".")[0] == "torch" and hasattr(value, "__dict__")


def _attributes(value: Any) -> Iterator[tuple[Any, Mapping[str, Any]]]:
    """Yield each holder of attributes, as in `held_numbers.place`, and its attributes by name."""
    if hasattr(value, "__dict__"):
        yield value.__dict__, value.__dict__
    keys = [key for key in slots_of_class(type(value)) if hasattr(value, key)]
    yield value, {key: getattr(value, key) for key in keys}


def _unread_arguments(step: Callable[..., Any], names: Sequence[str]) -> frozenset[str]:
    """Return the arguments that the step's own code never reads, such as a batch number."""
    code = getattr(step, "__code__", None)
    if code is None:
        return frozenset()
    loaded = {i.argval for i in dis.get_instructions(code) if i.opname.startswith("LOAD_")}
    return frozenset(name for name in names if name in code.co_varnames and name not in loaded)
