"""What values refer to beside their attributes and items: weak references, members, keys, and ops.

A callback in a set, a module that is a key, an object behind a weak reference: what they hold
decides a step as anything else does. So do the functions of a `torch.library.custom_op` that run
while a step is traced, of which code has only the name; its kernel runs in each step. Functions
given to a `torch.library.Library` are held by torch's C++ alone, which tells nobody: they are those
with a reference more than Python's objects account for.
"""

from __future__ import annotations

import array
import ctypes
import functools
import gc
import inspect
import sys
import types
import weakref
from collections import Counter
from collections.abc import Collection, Iterator
from typing import Any

import numpy as np
import torch
from torch._library import autograd
from torch._library.custom_ops import OPDEFS

from pardnn.backends.torch.user_step.code_names import is_library_file, names_in

#: What changes in place and holds bytes alone; all values of `ctypes` are of one class.
BYTES = (bytearray, array.array, memoryview, ctypes.c_int.__mro__[-2])
#: What has nothing of its own to look into.
_ATOMS = (bool, int, float, complex, str, bytes, type(None), type, torch.Tensor)
_WEAK_CONTAINERS = (weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet)
_TRACED = ("_abstract_fn", "_setup_context_fn", "_backward_fn")
_CALLED = (types.FunctionType, types.MethodType)
#: Of code that takes any number of arguments.
_OPEN = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS
#: Namespaces of torch's own ops.
_OWN = frozenset({"aten", "prims", "prim", "torchvision", "quantized", "inductor", "higher_order"})
_PROXIES = (weakref.ProxyType, weakref.CallableProxyType)


def behind_proxy(value: Any) -> Any:
    """Return what a weak proxy stands for, and any other value itself; None if that is gone."""
    if type(value) not in _PROXIES:
        return value
    try:
        return value.__sizeof__.__self__
    except ReferenceError:
        return None


def referred(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a value refers to that is no attribute and no item, and what to call it.

    Members of sets have no order that is the same on all ranks, so they are called by their types.

    Args:
        value: Any object.
    """
    if isinstance(value, weakref.ref):
        found = value()
        if found is not None:
            yield type(found).__name__, found
        return
    if isinstance(value, _WEAK_CONTAINERS):
        yield "data", value.data
        return
    if type(value).__module__ == "multiprocessing.sharedctypes" and hasattr(value, "get_obj"):
        yield "value", value.get_obj()
        return
    if isinstance(value, types.FunctionType):
        yield from _ops_named(names_in(value.__code__))
        return
    if isinstance(value, torch.library.CustomOpDef):
        yield from ((key, own) for key in _TRACED if (own := getattr(value, key)) is not None)
        return
    members: Any = ()
    # As the kind itself does: a container that tells who reads it is asked by the walk alone.
    kind = next((k for k in (dict, set, frozenset) if isinstance(value, k)), None)
    if kind is not None:
        members = list(kind.__iter__(value))  # of a dictionary, the keys
    elif isinstance(value, np.ndarray) and value.dtype == object:
        members = value.flat
    yield from ((type(each).__name__, each) for each in members if not isinstance(each, _ATOMS))


def _ops_named(names: Collection[str]) -> Iterator[tuple[str, Any]]:
    """Yield the custom ops that code calls by name: `torch.ops.mylib.op(x)`."""
    if "ops" in names:
        for full, op in OPDEFS.items():
            if set(full.split("::")) <= set(names):
                yield full, op
        named = {
            (space, op.partition(".")[0])
            for space, op, _ in (each.split("/") for each in torch.library._impls)
            if space in names and space not in _OWN and op.partition(".")[0] in names
        }
        for space, op in sorted(named - {tuple(full.split("::")) for full in OPDEFS}):
            yield from ((f"{space}::{op}", each) for each in _registered(space, op))


def _registered(space: str, name: str) -> Iterator[Any]:
    """Yield the functions that may be registered for an op: those of C++'s with its arguments."""
    packet = getattr(getattr(torch.ops, space), name)
    counts = {len(getattr(packet, each)._schema.arguments) for each in packet.overloads()}
    functions, backwards = _held_by_cpp(frozenset(torch.library._impls))
    for function in functions:
        code = getattr(getattr(function, "__func__", function), "__code__", None)
        number = 0 if code is None else code.co_argcount + code.co_kwonlyargcount
        # Before its arguments one may take the dispatcher's keys, and what it is bound to.
        if code is None or code.co_flags & _OPEN or counts & {number, number - 1, number - 2}:
            yield function
    yield from backwards


@functools.lru_cache(maxsize=1)  # a walk asks for each function, and a look takes 0.1 s
def _held_by_cpp(_registered: frozenset[str]) -> tuple[list[Any], list[Any]]:
    """Return the user's functions that C++ holds, and those that take gradients of ops."""
    objects = gc.get_objects()
    running, frame = set(), sys._getframe()
    while frame is not None:
        running.add(frame.f_code)
        frame = frame.f_back
    found = [x for x in objects if type(x) in _CALLED and not _is_known(x, running)]
    infos = [x for x in objects if type(x) is autograd.Info]
    del objects
    ids = set(map(id, found))
    holders = (each for each in gc.get_referrers(*found) if each is not found) if found else ()
    known = Counter(id(x) for each in holders for x in gc.get_referents(each) if id(x) in ids)
    # Three more: of `found`, of `x` and of the call.
    held = [x for x in found if sys.getrefcount(x) - 3 > known[id(x)]]
    of_ops = [f for info in infos for f in (info._backward_fn, info._setup_context_fn) if f]
    return held, of_ops


def _is_known(value: Any, running: Collection[types.CodeType]) -> bool:
    """Whether a function is of a library, or runs: its frame holds it, too."""
    code = getattr(getattr(value, "__func__", value), "__code__", None)
    return code is None or code in running or is_library_file(code.co_filename)
