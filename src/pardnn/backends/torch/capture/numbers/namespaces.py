"""Names that a step binds in the user's modules, beyond the globals that its code names.

Problem: `state.last = loss.item()`, where `state` is a module, or `global last` with a new name: no
place of the object graph holds them, so they would keep what a trace has put there. The same is
true of names in `builtins`.

Idea: note the content of modules before the step is traced, restore it, and refuse the step.
"""

from __future__ import annotations

import builtins
import contextlib
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from pardnn.backends.torch.capture.refusals.changed_state import bound_name
from pardnn.backends.torch.user_step.code_names import is_library_function, names_in
from pardnn.backends.torch.user_step.object_graph import ObjectGraph
from pardnn.backends.torch.user_step.references import cells
from pardnn.backends.torch.user_step.slots import GlobalName


class _Namespace(NamedTuple):
    """One module's names.

    Attributes:
        held: Its values by name, as they are now.
        then: The same before the step.
        known: Names that the object graph has.
    """

    held: dict[str, Any]
    then: dict[str, Any]
    known: frozenset[str]


def namespaces(objects: ObjectGraph) -> list[_Namespace]:
    """Return the content of `builtins` and of the user's modules whose code a step reaches.

    Args:
        objects: The object graph of the step.
    """
    found: dict[int, dict[str, Any]] = {id(vars(builtins)): vars(builtins)}
    for value in objects.seen.values():
        if isinstance(value, types.FunctionType) and not is_library_function(value):
            found[id(value.__globals__)] = value.__globals__
    for space in objects.spaces:
        if isinstance(space, types.ModuleType):
            found[id(vars(space))] = vars(space)
    known: dict[int, set[str]] = {}
    for _, holder, _ in objects.contents:
        if isinstance(holder, GlobalName):
            known.setdefault(id(holder.namespace), set()).add(holder.name)
    return [_Namespace(x, dict(x), frozenset(known.get(key, ()))) for key, x in found.items()]


def replace_globals(
    stack: contextlib.ExitStack,
    functions: Iterable[types.FunctionType],
    others: Mapping[int, Callable[..., Any]],
) -> None:
    """Replace functions under the names by which the user's code imported them.

    The names are in its globals, or in variables of a function around it.

    Args:
        stack: Puts the names back.
        functions: The user's, which may run.
        others: What stands for each function, by the function's id.
    """
    for function in functions:
        space = function.__globals__
        for key in names_in(function.__code__):
            real = space.get(key)
            if id(real) in others:  # `mock.patch.dict` would undo everything that the step sets
                space[key] = others[id(real)]
                stack.callback(space.__setitem__, key, real)
        for _, cell in cells(function):
            real = _content(cell)
            if id(real) in others:
                cell.cell_contents = others[id(real)]
                stack.callback(setattr, cell, "cell_contents", real)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def check_namespaces(
    spaces: list[_Namespace], line: Callable[[str], str | None] = lambda _name: None
) -> None:
    """Restore what a step has bound there, and reject the step.

    Args:
        spaces: The result of `namespaces` before the step.
        line: Returns where the user's code binds a name.

    Raises:
        UnsupportedError: E804.
    """
    changed: list[str] = []
    for held, then, known in spaces:
        for name, now in list(held.items()):
            # An import adds modules, and a warning its registry.
            is_own = isinstance(now, types.ModuleType) or name.startswith("__") or name in known
            if not is_own and (name not in then or then[name] is not now):
                changed.append(f"{held.get('__name__', '')}.{name}".lstrip("."))
                if name in then:
                    held[name] = then[name]
                else:
                    del held[name]
    if changed:
        raise bound_name(changed, line(changed[0]))
