"""Attributes of the user's classes that a step changes: `Meter.total += loss.item()`.

Problem: all objects of a class share them, and the walk of the step's objects does not enter
classes; capture would count them once for each trace, and leave numbers of a trace in them.

Idea: compare the classes of all objects that the step reaches before and after each trace. Numbers
that were there before the first trace are followed, like those of objects. Anything else that
changes again after the first trace, or that receives a number or tensor of the trace, is refused.
What only the first step sets remains, as after an eager step: a flag that a warning was given, a
table of plain values. Containers of the user's other modules, `settings.counts.clear()`, are
compared in the same way, and so are the attributes of the user's objects in both, `settings.meter`.
Containers that a step only fills are replaced by recorders.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import operator
import threading
import types
from collections import deque
from collections.abc import Callable, Collection, Container, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor

from pardnn.backends.torch.capture.numbers.unseen_state import has_state, state_of
from pardnn.backends.torch.capture.refusals.changed_state import changed_class, changed_module
from pardnn.backends.torch.ops.host_scalars import node_of
from pardnn.backends.torch.user_step.class_numbers import Space
from pardnn.backends.torch.user_step.object_graph import OPAQUE_PACKAGES, PLAIN, ObjectGraph
from pardnn.backends.torch.user_step.slots import Attributes, dotted, items_of, slots_of_class

_CONTAINERS = (list, dict, set, deque)
#: Code, which no step changes without rebinding its name: that is looked at elsewhere.
_OF_CODE = (type, types.BuiltinFunctionType, types.ModuleType)
_OTHERS = (type, types.ModuleType, torch.Tensor)
_OPAQUE_BUT_ENTERED = (torch.nn.Module, threading.local)
#: How many containers around another one are looked into.
_MAX_DEPTH = 4


class Held(NamedTuple):
    """What a class or module holds, except for what the step's own names lead to.

    Attributes:
        values: Its attributes by name; of a module those that hold others.
        contents: The containers in them, attributes of objects included, with the attribute of each
            and a copy of what it holds.
        states: Arrays, iterators and the like in them, with the attribute and their state.
    """

    values: dict[str, Any]
    contents: list[tuple[str, Any, Any]]
    states: list[tuple[str, Any, Any]]


ClassAttributes = dict[Space, Held]


def class_attributes(objects: ObjectGraph, used: Container[str] | None = None) -> ClassAttributes:
    """Return what the user's classes hold, except for functions and the like.

    Args:
        objects: The object graph of the step.
        used: The names in code that may run, see `used_names`: what modules hold under others is
            left out. A data set in one can be large.
    """
    found: ClassAttributes = {}
    for space in objects.spaces:
        values = _values(space)
        if isinstance(space, types.ModuleType):
            # What the step's own names lead to is followed like any object.
            values = {
                key: value for key, value in values.items()
                if _is_entered(type(value)) and id(value) not in objects.seen
                and (used is None or key in used)
            }  # fmt: skip
        found[space] = _held(values, objects.seen)
    return found


def check_class_attributes(
    before: ClassAttributes,
    line: Callable[[str], str | None] = lambda _name: None,
    followed: Collection[tuple[type, str]] = (),
    filled: Collection[int] = (),
    *,
    is_first: bool,
) -> None:
    """Reject a step that changes a class at each call.

    Args:
        before: The result of `class_attributes` before the trace.
        line: Returns where the user's code changes an attribute.
        followed: Numbers of classes that are followed.
        filled: Ids of containers that recorders will replace in later traces.
        is_first: Whether it was the first step, whose values may remain.

    Raises:
        UnsupportedError: E804.
    """
    for kind, then in before.items():
        changed = [
            (key, key, value)
            for key, value in _values_now(kind, then).items()
            if not (key in then.values and _is_same(value, then.values[key]))
            and not ((kind, key) in followed and _is_plain(value))
        ]
        changed += [
            (key, dotted(key, _changed_key(x, content)), x)
            for key, x, content in then.contents
            if id(x) not in filled and not _has_same(x, content)
        ]
        changed += [(key, key, x) for key, x, state in then.states if state_of(x) != state]
        for key, name, value in changed:
            if not is_first or _is_traced(value):
                refusal = changed_module if isinstance(kind, types.ModuleType) else changed_class
                raise refusal(kind.__name__, key, line(name))


@contextlib.contextmanager
def class_attributes_restored(objects: ObjectGraph) -> Iterator[None]:
    """Restore class attributes if the code in the context fails.

    Args:
        objects: The object graph of the step.
    """
    before = class_attributes(objects)
    try:
        yield
    except BaseException:
        for kind, then in before.items():
            _restore(kind, then)
        raise


def _values(kind: Space) -> dict[str, Any]:
    """Return the attributes of a class or module that are no code and not special."""
    return {
        key: value
        for key, value in vars(kind).items()
        if not key.startswith("__")
        if not hasattr(type(value), "__get__") and not isinstance(value, _OF_CODE)
    }


def _values_now(kind: Space, then: Held) -> dict[str, Any]:
    """Return what a class holds now, or what those names of a module hold that are compared."""
    found = _values(kind)
    if isinstance(kind, type):
        return found
    return {key: value for key, value in found.items() if key in then.values}


def _held(values: dict[str, Any], known: Container[int]) -> Held:
    contents: list[tuple[str, Any, Any]] = []
    states: list[tuple[str, Any, Any]] = []
    seen = set[int]()
    for name, value in values.items():
        level = [value]
        for _ in range(_MAX_DEPTH + 1):
            level = [x for x in level if not isinstance(x, PLAIN) and id(x) not in seen]
            seen.update(map(id, level))
            level = [x for x in level if id(x) not in known]
            states += ((name, x, state_of(x)) for x in level if has_state(x))
            level = [held for x in level if _is_entered(type(x)) for held in _holders(x)]
            contents += ((name, each, _copied(each)) for each in level)
            level = [item for each in level for item in _items(each)]
    return Held(values, contents, states)


def _holders(value: Any) -> Iterator[Any]:
    """Yield what holds a value's items, and what holds its attributes."""
    if isinstance(value, _CONTAINERS):
        yield value
        if hasattr(value, "__dict__"):
            yield vars(value)
    else:
        yield items_of(value)


@functools.cache
def _is_entered(kind: type) -> bool:
    """Whether a class is that of containers, or of objects with attributes."""
    if issubclass(kind, _CONTAINERS):
        return not hasattr(kind, "is_pardnn_recorder")
    if issubclass(kind, _OTHERS):
        return False
    is_opaque = kind.__module__.partition(".")[0] in OPAQUE_PACKAGES
    has_any = bool(kind.__dictoffset__ or slots_of_class(kind))
    return (has_any and not is_opaque) or issubclass(kind, _OPAQUE_BUT_ENTERED)


def _copied(container: Any) -> Any:
    return dict(container) if isinstance(container, Attributes) else copy.copy(container)


def _items(container: Any) -> Iterable[Any]:
    return container.values() if isinstance(container, dict | Attributes) else container


def _is_same(value: Any, old: Any) -> bool:
    if type(value) is not type(old) or isinstance(value, FakeTensor):
        return False
    if type(value) is tuple:
        return len(value) == len(old) and all(map(_is_same, value, old))
    is_plain = node_of(value) is None and isinstance(value, PLAIN)
    return value is old or (is_plain and value == old)


def _has_same(container: Any, content: Any) -> bool:
    """Whether a container holds the same objects as a copy of it, in the same order."""
    if len(container) != len(content):
        return False
    if isinstance(container, dict | Attributes):
        pairs = zip(container.items(), content.items(), strict=True)
        return all(_is_one(k, key) and _is_one(x, old) for (k, x), (key, old) in pairs)
    if isinstance(container, set):
        return container == content
    return all(map(operator.is_, container, content))


def _changed_key(container: Any, content: Any) -> Any:
    """Return a key whose value differs in a copy from before; 0 in anything but a dictionary."""
    if not isinstance(content, dict):
        return 0
    unset = object()
    keys = dict.fromkeys((*content, *container))
    pairs = ((key, container.get(key, unset), content.get(key, unset)) for key in keys)
    return next((key for key, now, then in pairs if not _is_one(now, then)), 0)


def _is_one(value: Any, old: Any) -> bool:
    return value is old or _is_same(value, old)


def _is_plain(value: Any) -> bool:
    return node_of(value) is not None or isinstance(value, PLAIN)


def _is_traced(value: Any, depth: int = 0) -> bool:
    if isinstance(value, FakeTensor) or node_of(value) is not None:
        return True
    is_entered = isinstance(value, (tuple, Attributes, *_CONTAINERS)) and depth <= _MAX_DEPTH
    return is_entered and any(_is_traced(each, depth + 1) for each in _items(value))


def _restore(kind: Space, then: Held) -> None:
    for key in _values_now(kind, then).keys() - then.values.keys():
        delattr(kind, key)
    for key, value in then.values.items():
        if vars(kind).get(key) is not value:
            setattr(kind, key, value)
    for _, value, content in then.contents:
        if not _has_same(value, content):
            value.clear()
            (value.extend if isinstance(value, list | deque) else value.update)(content)
