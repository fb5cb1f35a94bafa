"""Numbers of the user's classes that a step may change: `Model.calls += 1`.

The walk of a step's objects does not enter classes. Such a number is a variable, like a global: the
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

#: While a step is traced, symbols stand for the numbers.
_NUMBERS = frozenset({int, float, torch.SymInt, torch.SymFloat})


def users_classes(values: Iterable[Any]) -> list[type]:
    """Return the user's classes among values and the values' own classes, bases included.

    Args:
        values: All objects that a step reaches.
    """
    kinds = dict.fromkeys(each if isinstance(each, type) else type(each) for each in values)
    bases = dict.fromkeys(base for kind in kinds for base in kind.__mro__)
    return [*filter(is_users_code, bases)]


def class_numbers(
    values: Iterable[Any], functions: Iterable[types.FunctionType]
) -> Iterator[tuple[str, GlobalName, Any]]:
    """Yield name, place and value of each number of a class that code may change.

    Args:
        values: All objects that a step reaches.
        functions: The user's, which may run.
    """
    stored = frozenset[str]().union(*(_stored(each.__code__) for each in functions))
    for kind in users_classes(values) if stored else ():
        for key, value in list(vars(kind).items()):
            if key in stored and type(value) in _NUMBERS:
                yield f"{kind.__module__}.{kind.__qualname__}.{key}", GlobalName(kind, key), value


@functools.cache
def _stored(code: types.CodeType) -> frozenset[str]:
    """Return the attributes that code sets."""
    found = (at for each in codes_of(code) for at in dis.get_instructions(each))
    return frozenset(at.argval for at in found if at.opname == "STORE_ATTR")
