"""Stand-ins for what a step has left: any use of one shows that the next step reads it.

What a step leaves differs from step to step, and a later trace could not tell an old number from a
constant. So a later trace finds an object of the same type in its place, and any use of this object
ends the trace. `numbers.containers` works in the same way, and notes what is put into such an
object.
"""

from __future__ import annotations

import abc
import types
from collections import OrderedDict
from typing import Any

import torch

from pardnn.backends.torch.capture.numbers.containers import OtherUse

#: Members that stay as they are, since Python itself and the walk of objects read them.
OWN = frozenset({
    "__class__", "__class_getitem__", "__del__", "__dict__", "__doc__", "__hash__", "__init__",
    "__init_subclass__", "__module__", "__mro__", "__new__", "__slots__", "__subclasshook__",
    "__weakref__",
})  # fmt: skip
#: Members of numbers and containers, for types of torch's or of the user's.
_COMMON = (
    *dir(float), *dir(list), *dir(dict), "__bool__", "__call__", "__enter__", "__next__",
    "__index__", "__torch_function__",
)  # fmt: skip

_OTHER_USES = tuple, OrderedDict, torch.SymInt, torch.SymFloat, torch.SymBool


def stand_in(value: Any, name: str) -> Any:
    """Return a stand-in for a value.

    Args:
        value: What a trace has left in a place.
        name: The name of the place; each use of the stand-in raises `OtherUse` with it.
    """

    def use(*_args: Any, **_kwargs: Any) -> Any:
        raise OtherUse(name)

    members = {key: use for key in (*_COMMON, *dir(type(value))) if key not in OWN}
    members |= {"__getattribute__": _getting(name), "is_pardnn_recorder": True}
    for base in (type(value), object):
        # The walk looks into tuples, and comparing numbers reads the nodes of symbols.
        if not issubclass(base, _OTHER_USES) and _is_silent(base):
            try:
                kind = type("StandIn", (base,), members)
                return _new_of(base)(kind)
            except TypeError:
                continue
    raise AssertionError("object has subclasses")


def _is_silent(kind: type) -> bool:
    """Whether subclassing runs no user code, such as that of a registry."""
    is_plain = type(kind) in (type, abc.ABCMeta)
    return is_plain and isinstance(kind.__init_subclass__, types.BuiltinFunctionType)


def _new_of(kind: type) -> Any:
    """Return a constructor that bypasses a class's own code, as its `__new__` may set items."""
    news = (each.__dict__.get("__new__") for each in kind.__mro__)
    return next(new for new in news if isinstance(new, types.BuiltinFunctionType))


def _getting(name: str) -> Any:
    def get(self: Any, key: str) -> Any:
        if key in OWN:
            return object.__getattribute__(self, key)
        raise OtherUse(name)

    return get
