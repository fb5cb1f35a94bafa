"""Objects that a step visibly drops: those with a weak reference, a finalizer or `__del__`.

Problem: in an eager step the last reference is dropped, and `ref()` is None from then on. Capture
and guards keep references to what the step held, so the object stays alive.

Idea: list such objects before a trace. If one of them can afterwards only be reached weakly, the
step is refused. A weak reference to a tensor is always refused, because it bypasses the
placeholder.
"""

from __future__ import annotations

import inspect
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from pardnn.backends.torch.capture.refusals.unsupported import error_at
from pardnn.backends.torch.user_step.code_names import (
    is_library_file,
    is_library_function,
    is_users_code,
    names_in,
)
from pardnn.backends.torch.user_step.object_graph import ObjectGraph
from pardnn.errors import UnsupportedError, shown


class Dropped:
    """The objects of a step whose deletion would be visible.

    Args:
        objects: What the step reaches before it runs.
        walk: Returns what it reaches now, except through weak references.

    Raises:
        UnsupportedError: E804, for a weak reference to a tensor.
    """

    def __init__(self, objects: ObjectGraph, walk: Callable[[], ObjectGraph]) -> None:
        self._walk, self._watched = walk, dict(_watched(objects))
        if self._watched:
            held = walk().seen
            self._watched = {key: told for key, told in self._watched.items() if key in held}

    def check(self) -> None:
        """Reject a step that has dropped one of them.

        Raises:
            UnsupportedError: E804.
        """
        held = self._walk().seen if self._watched else {}
        for key, told in self._watched.items():
            if key not in held:
                raise dropped_object(*told)


def _watched(objects: ObjectGraph) -> Iterator[tuple[int, tuple[str, str]]]:
    """Yield the ids of objects, with their kinds and what makes their deletion visible."""
    seen = objects.seen.values()
    may_ask = any(isinstance(x, types.FunctionType) and _names_weak(x) for x in seen)
    ends: dict[type, str | None] = {}
    for value in seen:
        kind = type(value)
        if kind not in ends:
            ends[kind] = _told_by(kind, may_ask=may_ask)
        if isinstance(value, weakref.ref):
            found = weakref.ref.__call__(value)
            if isinstance(found, torch.nn.Parameter):
                continue  # recurrent layers have them; computing with one is refused elsewhere
            if isinstance(found, torch.Tensor):
                raise weak_tensor(tuple(found.shape))
            if found is not None:
                yield id(found), (type(found).__name__, "a weak reference")
        elif (told := ends[kind]) is not None:
            yield id(value), (kind.__name__, told)
    for info in list(weakref.finalize._registry.values()):  # type: ignore[attr-defined]
        found = info.weakref()
        if _is_users(info.func) or any(map(objects.seen.__contains__, map(id, _of(info.func)))):
            yield id(found), (type(found).__name__, "weakref.finalize")


def _told_by(kind: type, *, may_ask: bool) -> str | None:
    """Return what makes the deletion of a class's objects visible; None if nothing does."""
    if _is_users(inspect.getattr_static(kind, "__del__", None)):
        return "__del__"
    is_asked = may_ask and kind.__weakrefoffset__ and is_users_code(kind)
    return "a weak reference" if is_asked else None


def _names_weak(function: types.FunctionType) -> bool:
    """Whether code makes weak references, by the module of that name or a name imported from it."""
    if is_library_function(function):
        return False
    named = (function.__globals__.get(key) for key in names_in(function.__code__))
    return any(each is weakref or getattr(each, "__module__", "") == "weakref" for each in named)


def _of(function: Any) -> list[Any]:
    """Return the object to which a method is bound."""
    return [own] if (own := getattr(function, "__self__", None)) is not None else []


def _is_users(function: Any) -> bool:
    code = getattr(function, "__code__", None)
    return code is not None and not is_library_file(code.co_filename)


def dropped_object(kind: str, told: str) -> UnsupportedError:
    """Return E804: a step that drops an object whose deletion is visible.

    Args:
        kind: Name of its class.
        told: What makes it visible.
    """
    return error_at(
        None,
        f"the step drops an object of class {shown(kind)}, and {told} would notice its end:\n"
        "captured steps keep the object that the first one left, so it lives on.\n"
        "Drop it between two calls or before `parallelize`, or keep what the step checks in an\n"
        "attribute (state.is_there = False).",
        "E804",
    )


def weak_tensor(shape: tuple[int, ...]) -> UnsupportedError:
    """Return E804: a weak reference to a tensor.

    Args:
        shape: The shape of the tensor.
    """
    return error_at(
        None,
        f"the step reaches a weak reference to a tensor of shape {list(shape)}, behind\n"
        "which capture cannot replace the tensor.\n"
        "Refer weakly to the module or object that holds it: owner = weakref.ref(module), and\n"
        "in the step owner().weight.",
        "E804",
    )
