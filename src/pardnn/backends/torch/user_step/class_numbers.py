"""Numbers, flags and texts of the user's classes that a step may change: `Model.calls += 1`.

The walk of a step's objects does not enter classes. Such a value is a variable, like a global: the
class is its namespace.
"""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from pardnn.backends.torch.user_step.code_names import codes_of, is_users_code
from pardnn.backends.torch.user_step.slots import GlobalName

#: While a step is traced, symbols stand for the numbers. What begins as None becomes an object that
#: only the first step makes, which stays.
_PLAIN = frozenset({int, float, bool, str, torch.SymInt, torch.SymFloat, torch.SymBool})
Space = type | types.ModuleType


def users_spaces(found: Iterable[Space]) -> list[Space]:
    """Return the user's own among classes and modules, by name."""
    return sorted(filter(is_users_code, found), key=space_name)


def space_name(space: Space) -> str:
    """Return the full name of a class or module."""
    is_class = isinstance(space, type)
    return f"{space.__module__}.{space.__qualname__}" if is_class else space.__name__


def class_numbers(
    spaces: Iterable[Space], functions: Iterable[types.FunctionType]
) -> Iterator[tuple[str, GlobalName, Any]]:
    """Yield name, place and value of each plain value of a class that code may change.

    Args:
        spaces: The user's classes and modules.
        functions: The user's, which may run.
    """
    stored = frozenset[str]().union(*(_stored(each.__code__) for each in functions))
    for kind in spaces if stored else ():
        for key, value in list(vars(kind).items()) if isinstance(kind, type) else ():
            if key in stored and type(value) in _PLAIN:
                yield f"{space_name(kind)}.{key}", GlobalName(kind, key), value


@functools.cache
def _stored(code: types.CodeType) -> frozenset[str]:
    """Return the attributes that code sets."""
    found = (at for each in codes_of(code) for at in dis.get_instructions(each))
    return frozenset(at.argval for at in found if at.opname == "STORE_ATTR")
