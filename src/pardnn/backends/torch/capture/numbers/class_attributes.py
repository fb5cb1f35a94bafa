"""Attributes of the user's classes that a step changes: `Meter.total += loss.item()`.

Problem: all objects of a class share them, and the walk of the step's objects does not enter
classes; capture would count them once for each trace, and leave numbers of a trace in them.

Idea: compare the classes of all objects that the step reaches before and after each trace. Numbers
that were there before the first trace are followed, like those of objects. Anything else that
changes again after the first trace, or that receives a number or tensor of the trace, is refused.
What only the first step sets remains, as after an eager step: a flag that a warning was given, a
table of plain values. Containers of the user's other modules, `settings.log.append(...)`, are
compared in the same way.
"""

from __future__ import annotations

import contextlib
import copy
import types
from collections import deque
from collections.abc import Callable, Collection, Iterator
from typing import Any

from torch._subclasses.fake_tensor import FakeTensor

from pardnn.backends.torch.capture.refusals.changed_state import (
    changed_class,
    changed_module,
)
from pardnn.backends.torch.ops.host_scalars import node_of
from pardnn.backends.torch.user_step.class_numbers import users_classes
from pardnn.backends.torch.user_step.code_names import is_library_module
from pardnn.backends.torch.user_step.object_graph import PLAIN, ObjectGraph

_CONTAINERS = (list, dict, set, deque)
#: Code, which no step changes without rebinding its name: that is looked at elsewhere.
_OF_CODE = (type, types.BuiltinFunctionType, types.ModuleType)
#: How many containers around another one are looked into.
_MAX_DEPTH = 4
#: Attributes by class: each with its value, and what a container holds; also containers in others,
#: by names such as "history['loss']".
Attributes = dict[str, tuple[Any, Any]]
ClassAttributes = dict[type | types.ModuleType, Attributes]


def class_attributes(objects: ObjectGraph) -> ClassAttributes:
    """Return what the user's classes hold, except for functions and the like.

    Args:
        objects: The object graph of the step.
    """
    found: ClassAttributes = {kind: _held(kind) for kind in users_classes(objects.seen.values())}
    for value in objects.seen.values():
        if isinstance(value, types.ModuleType) and not is_library_module(value):
            # What the step's own names lead to is followed like any object.
            walked = {key for key, each in vars(value).items() if id(each) in objects.seen}
            found[value] = {
                key: held for key, held in _held(value).items()
                if held[1] is not None and _attribute(key) not in walked
            }  # fmt: skip
    return found


def check_class_attributes(
    before: ClassAttributes,
    line: Callable[[str], str | None] = lambda _name: None,
    followed: Collection[tuple[type, str]] = (),
    *,
    is_first: bool,
) -> None:
    """Reject a step that changes a class at each call.

    Args:
        before: The result of `class_attributes` before the trace.
        line: Returns where the user's code changes an attribute.
        followed: Numbers of classes that are followed.
        is_first: Whether it was the first step, whose values may remain.

    Raises:
        UnsupportedError: E804.
    """
    for kind, then in before.items():
        for key, (value, content) in _now(kind, then).items():
            is_same = key in then and _is_same((value, content), then[key])
            is_same |= (kind, key) in followed and not isinstance(value, bool | FakeTensor)
            if not is_same and (not is_first or _is_traced(value, content)):
                attribute = _attribute(key)
                if isinstance(kind, types.ModuleType):
                    raise changed_module(kind.__name__, attribute, line(attribute))
                raise changed_class(kind.__name__, attribute, line(attribute))


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


def _attribute(name: str) -> str:
    """Return the attribute of a class or module by which a container was found."""
    return name.partition("[")[0]


def _now(kind: type | types.ModuleType, then: Attributes) -> Attributes:
    """Return what a class holds now, or those containers of a module that are compared."""
    found = _held(kind)
    if isinstance(kind, type):
        return found
    return {key: held for key, held in found.items() if _attribute(key) in then}


def _held(kind: type | types.ModuleType) -> Attributes:
    values = ((k, v) for k, v in vars(kind).items() if not k.startswith("__"))
    found: dict[str, tuple[Any, Any]] = {}
    for key, value in values:
        if not hasattr(type(value), "__get__") and not isinstance(value, _OF_CODE):
            found[key] = value, None
            found.update(_contents(key, value))
    return found


def _contents(name: str, value: Any, depth: int = 0) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """Yield what a container and those in it hold, by name."""
    if not isinstance(value, _CONTAINERS) or depth > _MAX_DEPTH:
        return
    content = copy.copy(value)
    yield name, (value, content)
    items = content.items() if isinstance(content, dict) else enumerate(content)
    for key, item in items:
        if isinstance(item, _CONTAINERS):
            yield from _contents(f"{name}[{key!r}]", item, depth + 1)


def _is_same(now: tuple[Any, Any], then: tuple[Any, Any]) -> bool:
    (value, content), (old, held) = now, then
    if type(value) is not type(old) or isinstance(value, FakeTensor):
        return False
    if type(value) is tuple:
        pairs = zip(value, old, strict=False)
        return len(value) == len(old) and all(_is_same((a, None), (b, None)) for a, b in pairs)
    if node_of(value) is not None or not isinstance(content, _CONTAINERS):
        return value is old or (isinstance(value, PLAIN) and value == old)
    if value is not old or len(content) != len(held):
        return False
    if isinstance(content, dict):
        return all(k in held and held[k] is v for k, v in content.items())
    return content == held if isinstance(content, set) else all(
        map(lambda a, b: a is b, content, held)
    )  # fmt: skip


def _is_traced(value: Any, content: Any) -> bool:
    held = value if type(value) is tuple else content or ()
    items = held.values() if isinstance(held, dict) else held
    return (
        isinstance(value, FakeTensor)
        or node_of(value) is not None
        or any(_is_traced(each, None) for each in items)
    )


def _restore(kind: type | types.ModuleType, then: Attributes) -> None:
    own = {key for key in then if _attribute(key) == key}
    for key in _now(kind, then).keys() & vars(kind).keys() - own:
        delattr(kind, key)
    for key, (value, content) in then.items():
        if key in own and vars(kind).get(key) is not value:
            setattr(kind, key, value)
        if content is not None and not _is_same((value, copy.copy(value)), (value, content)):
            value.clear()
            (value.extend if isinstance(value, list | deque) else value.update)(content)
