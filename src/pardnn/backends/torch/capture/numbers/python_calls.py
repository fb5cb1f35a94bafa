"""Python's own functions on numbers, made to work on symbols while a step is traced.

`min`, `max`, `all` and `any` compare numbers, or ask whether they are true; for numbers that only a
run knows, they return another such number. So `if all(g.isfinite().all() for g in gradients)` asks
only once.
"""

from __future__ import annotations

import builtins
import contextlib
import dis
import functools
import math
import operator
import sys
import types
from collections.abc import Callable, Collection, Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor

from pardnn.backends.torch.capture.numbers.namespaces import replace_globals
from pardnn.backends.torch.ops.host_scalars import (
    MATH_FUNCTIONS,
    NUMPY_FUNCTIONS,
    as_symbol,
    call_math,
    choose,
    node_of,
    symbol,
)
from pardnn.backends.torch.user_step.code_names import names_in

_DIVMOD = divmod


@contextlib.contextmanager
def python_calls() -> Iterator[None]:
    """Make functions of `math`, and some of NumPy, record their calls on symbols."""
    with contextlib.ExitStack() as stack:
        for name, (_, new) in _OF_MATH.items():
            stack.enter_context(mock.patch.object(math, name, new))
        for name in ("isfinite", "isinf", "isnan"):
            new = _recording(name, getattr(np, name))
            stack.enter_context(mock.patch.object(np, name, new))
        for name in NUMPY_FUNCTIONS:
            new = functools.partialmethod(_as_numpy, f"numpy_{name}")
            for kind in (torch.SymInt, torch.SymFloat):
                stack.enter_context(mock.patch.object(kind, name, new, create=True))
        for name in ("ceil", "floor"):
            new = _with_a_float(name, getattr(np, name))
            stack.enter_context(mock.patch.object(np, name, new))
        for name in ("__floordiv__", "__rfloordiv__"):
            for kind in (torch.SymInt, torch.SymFloat):
                new = _floor_division(getattr(kind, name), is_reflected=name[2] == "r")
                stack.enter_context(mock.patch.object(kind, name, new))
        stack.enter_context(mock.patch.object(torch.SymInt, "__hash__", _hash))
        for kind in (torch.SymInt, torch.SymFloat, torch.SymBool):
            stack.enter_context(mock.patch.object(kind, "__reduce_ex__", _reduced, create=True))
        stack.enter_context(mock.patch.object(builtins, "divmod", _divmod))
        for name, is_better in {"min": operator.lt, "max": operator.gt}.items():
            new = _choosing(getattr(builtins, name), is_better)
            stack.enter_context(mock.patch.object(builtins, name, new))
        for name, decides in {"all": False, "any": True}.items():
            new = _asking(getattr(builtins, name), decides)
            stack.enter_context(mock.patch.object(builtins, name, new))
        yield


@contextlib.contextmanager
def numbers_told(functions: Collection[types.FunctionType]) -> Iterator[None]:
    """Let the user's code see a symbol as a number: `assert isinstance(value, float)`.

    A placeholder looks like a tensor: `type(x) is torch.Tensor`. torch's own code tells them apart.
    Functions that it imported by their names (`from math import cos`) record their calls as well.

    Args:
        functions: The user's, which may run.
    """
    with contextlib.ExitStack() as stack:
        for name, new in (("isinstance", _is_instance), ("type", _Type)):
            asking = (each for each in functions if name in names_in(each.__code__))
            namespaces = {id(each.__globals__): each.__globals__ for each in asking}.values()
            for namespace in [each for each in namespaces if name not in each]:
                namespace[name] = new
                stack.callback(namespace.pop, name)
        replace_globals(stack, functions, {id(real): new for real, new in _OF_MATH.values()})
        yield


def _is_instance(value: Any, kinds: Any) -> bool:
    node = node_of(value)
    if isinstance(value, kinds) or node is None:
        return isinstance(value, kinds)
    return issubclass(node.kind, kinds)


def class_of(value: Any) -> type:
    """Return the type that a value has in an eager step."""
    if isinstance(value, FakeTensor):
        return torch.nn.Parameter if isinstance(value, torch.nn.Parameter) else torch.Tensor
    node = node_of(value)
    return type(value) if node is None else node.kind


class _Asked(type):
    """The class of the replacement of `type` in the user's code."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Return the class of a value as an eager step sees it; with more arguments, a new one."""
        return class_of(args[0]) if len(args) == 1 and not kwargs else type(*args, **kwargs)

    def __instancecheck__(cls, value: Any) -> bool:
        """Whether a value is a class."""
        return isinstance(value, type)

    def __subclasscheck__(cls, kind: type) -> bool:
        """Whether a class is a subclass of another."""
        return issubclass(kind, type)


class _Type(metaclass=_Asked):
    """The replacement of `type`."""


def _is_of_torch() -> bool:
    """Whether torch's code makes the current call."""
    return sys._getframe(2).f_globals.get("__name__", "").startswith("torch")


def _is_data(number: Any) -> bool:
    node = node_of(number)
    return node is not None and node.hint is None


def _choosing(real: Callable[..., Any], is_better: Callable[..., Any]) -> Callable[..., Any]:
    """Return `min` or `max`, which choose among numbers that only a run knows."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if kwargs or _is_of_torch():
            return real(*args, **kwargs)
        items = [*args[0]] if len(args) == 1 else args
        if not next(filter(_is_data, items), None) is not None:
            return real(items) if len(args) == 1 else real(*args)
        symbols = [as_symbol(item, next(filter(_is_data, items))) for item in items]
        return functools.reduce(lambda a, b: choose(is_better(b, a), b, a), symbols)

    return call


def _asking(real: Callable[..., Any], decides: bool) -> Callable[..., Any]:
    """Return `all` or `any`, which an item whose truth is `decides` settles."""

    def call(items: Any, /) -> Any:
        if _is_of_torch():
            return real(items)
        asked = []
        for item in items:
            found = item
            if isinstance(item, torch.Tensor):
                found = (item if item.dtype == torch.bool else item != 0).item()
            if _is_data(found):
                asked.append(found if isinstance(found, torch.SymBool) else found != 0)
            elif bool(found) == decides:
                return decides
        combine = operator.or_ if decides else operator.and_
        return functools.reduce(combine, asked) if asked else not decides

    return call


def _as_numpy(number: Any, name: str) -> Any:
    return call_math(name, number)


def _with_a_float(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    """Return NumPy's version of a function, which gives a float where `math` gives an int."""

    def call(*args: Any, **kwargs: Any) -> Any:
        is_recorded = len(args) == 1 and not kwargs and node_of(args[0]) is not None
        return torch.sym_float(call_math(name, args[0])) if is_recorded else real(*args, **kwargs)

    return call


def _hash(number: torch.SymInt) -> int:
    """Allow a number to be looked up in a set or dictionary: its value is guarded.

    Raises:
        TypeError: It would become a key of a dictionary or of a function's cache.
    """
    if number.node.is_nested_int():
        return hash(number.node.nested_int())
    frame = sys._getframe(1)
    if _looks_up(frame.f_code, frame.f_lasti):
        return hash(int(number))
    raise TypeError("unhashable type: non-nested SymInt")


@functools.lru_cache(256)
def _looks_up(code: types.CodeType, at: int) -> bool:
    """Whether the instruction of a code at an offset is `x in y`, `y[x]` or `y.get(x)`."""
    done = [each for each in dis.get_instructions(code) if each.offset <= at]
    if done[-1].opname in ("CONTAINS_OP", "BINARY_SUBSCR"):
        return True
    begin = done[-1].positions and done[-1].positions[::2]
    # Python 3.12 has one instruction for attributes and methods.
    loads = [x for x in done if x.opname in ("LOAD_METHOD", "LOAD_ATTR")]
    methods = [x for x in loads if x.positions and x.positions[::2] == begin]
    is_call = done[-1].opname in ("PRECALL", "CALL")
    return is_call and bool(methods) and methods[-1].argval == "get"


def _reduced(number: Any, protocol: Any) -> Any:
    """Allow a number to be pickled: its value is guarded. A copy of it is itself."""
    node, caller = node_of(number), sys._getframe(1).f_globals.get("__name__")
    if node is None or caller == "copy":
        return object.__reduce_ex__(number, protocol)
    return node.kind, (node.kind(number),)


def _floor_division(real: Callable[..., Any], *, is_reflected: bool) -> Callable[..., Any]:
    """Return `//` of symbols as Python has it; torch rounds a quotient down: `1.0 // 0.2` is 4.0.

    Args:
        real: torch's own, of which the first argument is a symbol.
        is_reflected: Whether that symbol is the divisor.
    """

    def call(this: Any, other: Any) -> Any:
        is_number = isinstance(other, int | float | torch.SymInt | torch.SymFloat)
        if node_of(this) is None or not is_number:
            return real(this, other)
        if isinstance(other, int | float):  # NumPy's and enum members as well
            other = as_symbol(int(other) if isinstance(other, int) else float(other), this)
        number, by = (other, this) if is_reflected else (this, other)
        return symbol(number.node.floordiv(by.node))

    return call


def _divmod(number: Any, by: Any, /) -> tuple[Any, Any]:
    """Divide as Python does; a symbol has no method for both at once."""
    if node_of(number) is None and node_of(by) is None:
        return _DIVMOD(number, by)
    return number // by, number % by


def _is_plain(number: Any) -> bool:
    return type(number) in (int, float, bool)


def _recording(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(each, FakeTensor) for each in args) and not _is_of_torch():
            args = tuple(x.item() if isinstance(x, FakeTensor) else x for x in args)
        are_symbols = [node_of(each) is not None for each in args]
        if any(are_symbols) and all(map(operator.or_, are_symbols, map(_is_plain, args))):
            return call_math(name, *args)
        return real(*args, **kwargs)

    return call


#: Functions of `math` and what records their calls, by their names.
_OF_MATH = {
    name: (getattr(math, name), _recording(function, getattr(math, name)))
    for name, function in MATH_FUNCTIONS.items()
}
