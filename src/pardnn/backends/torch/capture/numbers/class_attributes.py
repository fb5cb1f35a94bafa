"""Attributes of the user's classes that a step changes: `Meter.total += loss.item()`.

Problem: all objects of a class share them, and the walk of the step's objects does not enter
classes; capture would count them once for each trace, and leave numbers of a trace in them.

Idea: compare the classes of all objects that the step reaches before and after each trace. Numbers
that were there before the first trace are followed, like those of objects. Anything else that
changes again after the first trace, or that receives a number or tensor of the trace, is refused.
What only the first step sets remains, as after an eager step: a flag that a warning was given, a
table of plain values.
"""

from __future__ import annotations

import contextlib
import types
from collections import deque
from collections.abc import Callable, Collection, Iterator
from typing import Any

from torch._subclasses.fake_tensor import FakeTensor

from pardnn.backends.torch.capture.refusals.changed_state import changed_class
from pardnn.backends.torch.ops.host_scalars import node_of
from pardnn.backends.torch.user_step.class_numbers import users_classes
from pardnn.backends.torch.user_step.object_graph import PLAIN, ObjectGraph

_CONTAINERS = (list, dict, set, deque)
#: Code, which no step changes without rebinding its name: that is looked at elsewhere.
_OF_CODE = (type, types.BuiltinFunctionType, types.ModuleType)
#: Attributes by class: each with its value, and what a container holds.
ClassAttributes = dict[type, dict[str, tuple[Any, Any]]]


def class_attributes(objects: ObjectGraph) -> ClassAttributes:
    """Return what the user's classes hold, except for functions and the like.

    Args:
        objects: The object graph of the step.
    """
    return {kind: _held(kind) for kind in users_classes(objects.seen.values())}


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
        now = _held(kind)
        for key, (value, content) in now.items():
            is_same = key in then and _is_same((value, content), then[key])
            is_same |= (kind, key) in followed and not isinstance(value, bool | FakeTensor)
            if not is_same and (not is_first or _is_traced(value, content)):
                raise changed_class(kind.__name__, key, line(key))


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


def _held(kind: type) -> dict[str, tuple[Any, Any]]:
    values = ((k, v) for k, v in vars(kind).items() if not k.startswith("__"))
    return {
        key: (value, type(value)(value) if type(value) in _CONTAINERS else None)
        for key, value in values
        if not hasattr(type(value), "__get__") and not isinstance(value, _OF_CODE)
    }


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
    items = [value, *(held.values() if isinstance(held, dict) else held)]
    return any(isinstance(each, FakeTensor) or node_of(each) is not None for each in items)


def _restore(kind: type, then: dict[str, tuple[Any, Any]]) -> None:
    for key in _held(kind).keys() - then.keys():
        delattr(kind, key)
    for key, (value, content) in then.items():
        if vars(kind).get(key) is not value:
            setattr(kind, key, value)
        if content is not None and not _is_same((value, type(value)(value)), (value, content)):
            value.clear()
            (value.extend if isinstance(value, list | deque) else value.update)(content)
