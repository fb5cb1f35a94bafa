"""Guards: the Python values that a captured step took for granted, compared at every call.

Problem: a traced step is one path through the user's code, and plain Python values decide which:
flags and counts among the arguments, attributes of modules such as `training` or `p`,
configurations, closure cells, globals, class attributes, `requires_grad`.

Idea: guards as in TorchDynamo. It guards on what the frames it compiles read; here no frame is
compiled, so every value is guarded that the step can reach *and* that code which may run mentions
by name (`used_names`). A guard holds a container and its items at capture. A check compares
identities first, in one pass, and values only where an identity differs.

Complexity: O(values guarded); 110 us a call for a GPT-2 of 12 layers (about 160 modules, 700
values).
"""

from __future__ import annotations

import dis
import enum
import functools
import itertools
import operator
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from pardnn.backends.torch.user_step.object_graph import (
    PLAIN,
    argument_names,
    dotted,
    is_library_file,
    walk_objects,
)
from pardnn.backends.torch.user_step.used_names import used_names

#: Compared by value; all other types are compared by identity, or walked.
_VALUES = (
    *PLAIN, complex, bytes, range, slice, frozenset, enum.Enum, torch.dtype, torch.device,
    torch.memory_format, torch.layout, torch.Size,
)  # fmt: skip
#: Not guarded: their contents are sources of the graph, or compared as settings.
_BOUND = (
    torch.optim.Optimizer,
    torch.optim.lr_scheduler.LRScheduler,
    torch.optim.lr_scheduler.ReduceLROnPlateau,
    torch.amp.GradScaler,
)
_CLOSED_PACKAGES = frozenset({
    "builtins", "collections", "logging", "numpy", "pardnn", "random", "threading", "torch",
    "typing",
    "weakref",
})  # fmt: skip
_MODULE_TABLES = ("_parameters", "_buffers", "_modules")
_ABSENT = object()


class Change:
    """A guarded value that has changed since capture.

    Attributes:
        name: Dotted path from the step's parameters, such as "model.dropout.p".
        then: The value at capture.
        now: The value at this call.
    """

    __slots__ = ("name", "now", "then")

    def __init__(self, name: str, then: Any, now: Any) -> None:
        self.name, self.then, self.now = name, then, now


class _Guard:
    """A guard on one container: its items under `keys`, and the length of a list.

    Args:
        name: Dotted path to it; empty for globals.
        holder: A dictionary, list or deque.
        keys: Of the items to compare.
        is_used: Whether a new item under a key is a change; None: new items never are.
    """

    __slots__ = ("get", "holder", "is_used", "keys", "name", "size", "then")

    def __init__(
        self,
        name: str,
        holder: Any,
        keys: Sequence[Any],
        is_used: Callable[[Any], bool] | None = None,
    ) -> None:
        self.name, self.holder, self.keys, self.is_used = name, holder, list(keys), is_used
        self.size = len(holder)
        # An itemgetter of one key would not return a tuple.
        self.get = operator.itemgetter(*self.keys, self.keys[0]) if self.keys else None
        self.then = self.get(holder) if self.get else ()

    def changes(self) -> list[Change]:
        """Return the items whose values changed."""
        items = _items(self.holder)
        found = [
            Change(dotted(self.name, key), then, items.get(key))
            for key, then in zip(self.keys, self.then, strict=False)
            if _differ(items.get(key, _ABSENT), then)
        ]
        if self.is_used is None or len(items) == self.size:
            return found
        if isinstance(self.holder, list | deque):
            return [*found, Change(f"len({self.name})", self.size, len(items))]
        known = set(self.keys)
        found += [
            Change(dotted(self.name, key), None, item)
            for key, item in items.items()
            if key not in known and not isinstance(item, torch.Tensor) and self.is_used(key)
        ]
        self.size = self.size if found else len(items)
        return found


def _items(holder: Any) -> Mapping[Any, Any]:
    return dict(enumerate(holder)) if isinstance(holder, list | deque) else holder


def _differ(now: Any, then: Any) -> bool:
    if isinstance(then, torch.Tensor) or isinstance(now, torch.Tensor):
        return not (isinstance(then, torch.Tensor) and isinstance(now, torch.Tensor))
    if type(now) is not type(then):
        return True
    if isinstance(then, tuple | list):
        return len(now) != len(then) or any(map(_differ, now, then))
    if isinstance(then, dict):
        return list(now) != list(then) or any(_differ(now[key], then[key]) for key in then)
    if isinstance(then, _VALUES):
        return bool(now != then) and not (now != now and then != then)
    return now is not then


class _Snapshot:
    """All guards as flat lists: that nothing has changed is found by two loops in C."""

    def __init__(self, guards: Sequence[_Guard]) -> None:
        self._sized = [guard.holder for guard in guards if guard.is_used is not None]
        self._sizes = [guard.size for guard in guards if guard.is_used is not None]
        kept = [guard for guard in guards if guard.get is not None]
        self._getters, self._holders = [g.get for g in kept], [g.holder for g in kept]
        self._then = list(itertools.chain.from_iterable(guard.then for guard in kept))

    def holds(self) -> bool:
        """Whether every guarded item is the object that it was, and no container grew."""
        if list(map(len, self._sized)) != self._sizes:
            return False
        rows = map(operator.call, self._getters, self._holders)
        try:
            return all(map(operator.is_, itertools.chain.from_iterable(rows), self._then))
        except LookupError:
            return False


class Guards:
    """All guards of a captured step.

    Args:
        step: The user's step.
        args: Its arguments, with the example batch.
        batch: Indices of the arguments that are the batch.
    """

    def __init__(self, step: Callable[..., Any], args: Sequence[Any], batch: Sequence[int]) -> None:
        arguments = list(args)
        objects = walk_objects(step, arguments)
        self._used = used_names(step, objects.seen.values())
        self._guards: list[_Guard] = []
        # Closure cells and slots, which no container holds: (name, getter, what it returned).
        self._attributes: list[tuple[str, Callable[[], Any], Any]] = []
        self._seen: dict[int, Any] = {}
        self._parameters: list[tuple[str, torch.Tensor]] = []
        names = argument_names(step, len(arguments))
        for i, name in enumerate(names):
            if i not in batch:
                self._walk(name, arguments[i])
        self._walk("", step)
        for function in self._used.functions:
            self._walk("", function)
        self._snapshot = _Snapshot(self._guards)
        self._flags = [tensor.requires_grad for _, tensor in self._parameters]
        self._gradients = [tensor.grad for _, tensor in self._parameters]
        self._batch_then = {i: self._batch_values(names[i], arguments[i]) for i in batch}
        self._names = names
        self._ignored = _unread_arguments(step, names)

    def changes(self, batch: dict[int, Any]) -> list[Change]:
        """Return what differs from the capture, in the order of the walk.

        Args:
            batch: This call's batch by index of the argument.
        """
        found: list[Change] = []
        if not self._snapshot.holds():
            found = [change for guard in self._guards for change in guard.changes()]
            self._snapshot = _Snapshot(self._guards)
        for name, get, then in self._attributes:
            now = get()
            if now is not then and _differ(now, then):
                found.append(Change(name, then, now))
        flags = [tensor.requires_grad for _, tensor in self._parameters]
        if flags != self._flags:
            found += [
                Change(f"{name}.requires_grad", then, now)
                for (name, _), then, now in zip(self._parameters, self._flags, flags, strict=True)
                if then != now
            ]
        gradients = [tensor.grad for _, tensor in self._parameters]
        if not all(map(operator.is_, gradients, self._gradients)):
            found += [
                Change(f"{name}.grad", _gradient_text(then), _gradient_text(now))
                for (name, _), then, now in zip(
                    self._parameters, self._gradients, gradients, strict=True
                )
                if then is not now
            ]
        for i, value in batch.items():
            found += self._batch_changes(i, value)
        return found

    def _batch_changes(self, index: int, value: Any) -> Iterator[Change]:
        if self._names[index] in self._ignored or isinstance(value, torch.Tensor):
            return
        then, now = self._batch_then[index], self._batch_values(self._names[index], value)
        for name in dict.fromkeys([*then, *now]):
            if _differ(now.get(name, _ABSENT), then.get(name, _ABSENT)):
                yield Change(name, then.get(name), now.get(name))

    def _batch_values(self, name: str, value: Any) -> dict[str, Any]:
        """Return the plain values of a batch by path, without the numbers that stay live."""
        found: dict[str, Any] = {}
        stack = [(name, value)]
        while stack:
            path, at = stack.pop()
            if isinstance(at, float | torch.Tensor):
                continue
            if isinstance(at, _VALUES):
                found[path] = at
            elif isinstance(at, dict):
                stack += [(dotted(path, key), item) for key, item in at.items()]
            elif isinstance(at, tuple | list | deque):
                stack += [(dotted(path, i), item) for i, item in enumerate(at)]
            elif _is_users_object(at):
                items = at.__dict__.items()
                stack += [(dotted(path, key), item) for key, item in items if key in self._used]
        return found

    def _walk(self, name: str, start: Any) -> None:
        stack = [(name, start)]
        while stack:
            path, value = stack.pop()
            if isinstance(value, tuple):
                stack += [(dotted(path, i), item) for i, item in enumerate(value)]
            elif not isinstance(value, (torch.Tensor, *_VALUES)) and id(value) not in self._seen:
                self._seen[id(value)] = value
                stack += reversed(list(self._children(path, value)))

    def _children(self, path: str, value: Any) -> Iterator[tuple[str, Any]]:
        if isinstance(value, torch.optim.Optimizer):
            self._optimizer(path, value)
        elif isinstance(value, _BOUND):
            return
        elif isinstance(value, torch.nn.Module):
            yield from self._module(path, value)
        elif isinstance(value, dict | list | deque):
            yield from self._container(path, value, lambda _key: True)
        elif isinstance(value, types.FunctionType):
            yield from self._function(value)
        elif isinstance(value, types.MethodType):
            yield from ((path, value.__self__), (path, value.__func__))
        elif hasattr(value, "func") and hasattr(value, "keywords"):  # functools.partial
            yield from ((path, value.func), (path, value.args), (path, value.keywords))
        elif isinstance(value, type | types.ModuleType):
            if _is_users_code(value):
                yield from self._container(path, vars(value), self._used.__contains__)
        elif _is_users_object(value):
            yield from self._container(path, value.__dict__, self._used.__contains__)
            yield from self._classes(value)
        elif _slots(value):
            yield from self._slotted(path, value)

    def _classes(self, value: Any) -> Iterator[tuple[str, Any]]:
        yield from ((kind.__name__, kind) for kind in type(value).__mro__)

    def _slotted(self, path: str, value: Any) -> Iterator[tuple[str, Any]]:
        for key in _slots(value):
            if key in self._used and hasattr(value, key):
                item = getattr(value, key)
                get = functools.partial(getattr, value, key, None)
                self._attributes.append((dotted(path, key), get, item))
                yield dotted(path, key), item

    def _optimizer(self, path: str, optimizer: torch.optim.Optimizer) -> None:
        """Guard the numbers of groups and parameters; settings are sources, or compared there."""
        groups = optimizer.param_groups
        self._guards.append(_Guard(f"{path}.param_groups", groups, [], lambda _key: True))
        for i, group in enumerate(groups):
            name = f"{path}.param_groups.{i}.params"
            self._guards.append(_Guard(name, group["params"], [], lambda _key: True))

    def _container(
        self, path: str, holder: Any, is_used: Callable[[Any], bool]
    ) -> Iterator[tuple[str, Any]]:
        items = {key: item for key, item in _items(holder).items() if is_used(key)}
        kept = [key for key, item in items.items() if not isinstance(item, torch.Tensor)]
        self._guards.append(_Guard(path, holder, kept, is_used))
        yield from ((dotted(path, key), items[key]) for key in kept)

    def _module(self, path: str, module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
        attributes = module.__dict__

        def is_used(key: Any) -> bool:
            return key == "training" or (key not in _MODULE_TABLES and key in self._used)

        for key, parameter in attributes["_parameters"].items():
            if parameter is not None:
                self._parameters.append((dotted(path, key), parameter))
        yield from self._container(path, attributes, is_used)
        yield from self._container(path, attributes["_modules"], lambda _key: True)
        yield from self._classes(module)

    def _function(self, function: types.FunctionType) -> Iterator[tuple[str, Any]]:
        names = function.__code__.co_freevars
        for key, cell in zip(names, function.__closure__ or (), strict=False):
            try:
                value = cell.cell_contents
            except ValueError:  # not assigned yet
                continue
            if not isinstance(value, torch.Tensor):
                get = functools.partial(getattr, cell, "cell_contents")
                self._attributes.append((key, get, value))
                yield key, value
        if is_library_file(function.__code__.co_filename):
            return
        used = {name for name in function.__code__.co_names if name in function.__globals__}
        namespace = function.__globals__
        kept = [key for key in sorted(used) if not isinstance(namespace[key], torch.Tensor)]
        self._guards.append(_Guard("", namespace, kept))
        yield from ((key, namespace[key]) for key in kept)


def _slots(value: Any) -> list[str]:
    package = type(value).__module__.partition(".")[0]
    if package in _CLOSED_PACKAGES:
        return []
    return [key for kind in type(value).__mro__ for key in getattr(kind, "__slots__", ())]


def _gradient_text(gradient: torch.Tensor | None) -> str | None:
    return None if gradient is None else f"a gradient of shape {list(gradient.shape)}"


def _is_users_object(value: Any) -> bool:
    package = type(value).__module__.partition(".")[0]
    return hasattr(value, "__dict__") and package not in _CLOSED_PACKAGES


def _is_users_code(value: Any) -> bool:
    """Whether a class or module is defined in the user's files, not in a library."""
    module = sys.modules.get(value.__module__) if isinstance(value, type) else value
    return module is not None and not is_library_file(getattr(module, "__file__", None) or "<")


def _unread_arguments(step: Callable[..., Any], names: Sequence[str]) -> frozenset[str]:
    """Return the arguments that the step's own code never reads, such as a batch number."""
    code = getattr(step, "__code__", None)
    if code is None:
        return frozenset()
    loaded = {i.argval for i in dis.get_instructions(code) if i.opname.startswith("LOAD_")}
    return frozenset(name for name in names if name in code.co_varnames and name not in loaded)
