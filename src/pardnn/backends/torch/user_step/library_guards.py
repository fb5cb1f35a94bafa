"""Guards on the functions of libraries that the user's code names: `F.relu = torch.tanh`.

What a library's own code does is taken for granted, but a function that is replaced in its module
is another one to the user's code. One dictionary a module, whose version is compared.
"""

from __future__ import annotations

import types
from collections.abc import Collection, Sequence

from pardnn.backends.torch.user_step.code_names import is_library_module
from pardnn.backends.torch.user_step.item_guards import ItemGuard
from pardnn.backends.torch.user_step.object_graph import dotted


def library_guards(
    functions: Sequence[types.FunctionType], names: Collection[str]
) -> list[ItemGuard]:
    """Return a guard for each module of a library that functions reach by their globals.

    Args:
        functions: The user's, which may run.
        names: That they mention.
    """
    found = {
        id(value): (key, value)
        for function in functions
        for key, value in function.__globals__.items()
        if key in names and _is_library(value)
    }
    guards: list[ItemGuard] = []
    waiting = list(found.values())
    while waiting:
        name, module = waiting.pop()
        space = vars(module)
        named = sorted(key for key in names if key in space)
        guards.append(ItemGuard(name, space, [key for key in named if callable(space[key])]))
        inner = [(dotted(name, key), space[key]) for key in named if _is_library(space[key])]
        waiting += [(path, each) for path, each in inner if id(each) not in found]
        found |= {id(each): (path, each) for path, each in inner}
    return guards


def _is_library(value: object) -> bool:
    is_module = isinstance(value, types.ModuleType)
    return is_module and is_library_module(value)
