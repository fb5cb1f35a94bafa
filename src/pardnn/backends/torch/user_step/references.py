"""What values refer to beside their attributes and items: weak references, members, keys, and ops.

A callback in a set, a module that is a key, an object behind a weak reference: what they hold
decides a step as anything else does. So do the functions of a `torch.library.custom_op` that run
while a step is traced, of which code has only the name; its kernel runs in each step.
"""

from __future__ import annotations

import array
import ctypes
import types
import weakref
from collections.abc import Collection, Iterator
from typing import Any

import numpy as np
import torch
from torch._library.custom_ops import OPDEFS

from pardnn.backends.torch.user_step.code_names import names_in

#: What changes in place and holds bytes alone; all values of `ctypes` are of one class.
BYTES = (bytearray, array.array, memoryview, ctypes.c_int.__mro__[-2])
#: What has nothing of its own to look into.
_ATOMS = (bool, int, float, complex, str, bytes, type(None), type, torch.Tensor)
_WEAK_CONTAINERS = (weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet)
_TRACED = ("_abstract_fn", "_setup_context_fn", "_backward_fn")
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
