"""What functions of installed packages keep in module globals: `global count; count += 1`.

Problem: no walk of a step's objects enters libraries, so only capture would change them, and no
    later step would.

Idea: the globals that reached functions of packages name are compared before and after each trace:
numbers, lists, numbers in dictionaries, and those of the package's own objects. One that changes
again after the first trace is put back, and the step refused. What only the first step sets stays,
and dictionaries and sets may grow: those are caches.

Complexity: O(globals that the functions name).
"""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from pardnn.backends.torch.capture.refusals.library_tells import changed_library
from pardnn.backends.torch.user_step.code_names import (
    function_of,
    global_names,
    held_by,
    is_installed_file,
    names_in,
)
from pardnn.backends.torch.user_step.object_graph import PLAIN
from pardnn.backends.torch.user_step.used_names import (
    CLOSED_LIBRARIES,
    UsedNames,
    imported_modules,
)

_LISTS = (list, deque)


class LibraryGlobals(NamedTuple):
    """One namespace, container or attributes of an object.

    Attributes:
        name: The name in messages.
        holder: A dictionary or a list.
        then: A copy of its plain values, or of all items of a list.
    """

    name: str
    holder: Any
    then: Any


def library_globals(used: UsedNames, reached: Iterable[Any]) -> list[LibraryGlobals]:
    """Return what functions of packages may change in their modules.

    Args:
        used: What the step may use.
        reached: Objects of the step; modules among them count.
    """
    found: dict[int, LibraryGlobals] = {}
    named: dict[int, tuple[dict[str, Any], set[str]]] = {}
    for function in _functions(used, reached):
        space = function.__globals__
        named.setdefault(id(space), (space, set()))[1].update(global_names(function.__code__))
    for space, names in named.values():
        package = str(space.get("__name__"))
        held = {name: space[name] for name in names if name in space}
        found[id(space)] = LibraryGlobals(package, space, _plain(held))
        for name, value in held.items():
            for holder in _holders(value, package.partition(".")[0]):
                then = list(holder) if isinstance(holder, _LISTS) else _plain(holder)
                if id(holder) not in found:
                    found[id(holder)] = LibraryGlobals(f"{package}.{name}", holder, then)
    return list(found.values())


def _functions(used: UsedNames, reached: Iterable[Any]) -> Iterator[types.FunctionType]:
    """Yield functions of packages: those that the user's code names, and what these name."""
    values: list[Any] = [each for each in reached if isinstance(each, types.ModuleType)]
    for function in used.functions:
        space = function.__globals__
        values += [space[name] for name in names_in(function.__code__) if name in space]
        values += [*held_by(function), *(module for _, module in imported_modules(function))]
    waiting: list[Any] = [*used.installed]
    for value in values:
        held = vars(value) if isinstance(value, types.ModuleType) else {}
        waiting += [held[name] for name in used.of_users & held.keys()] if held else [value]
    seen = set[types.FunctionType]()
    while waiting:
        function = function_of(waiting.pop())
        if function is not None and function not in seen and _is_installed(function):
            seen.add(function)
            space = function.__globals__
            waiting += [space[x] for x in global_names(function.__code__) if x in space]
            yield function


def _is_installed(function: types.FunctionType) -> bool:
    package = (function.__module__ or "").partition(".")[0]
    return is_installed_file(function.__code__.co_filename) and package not in CLOSED_LIBRARIES


def _holders(value: Any, package: str) -> Iterator[Any]:
    """Yield a value that may change in place, or an object's attributes and what they hold."""
    if type(value) in (dict, *_LISTS):
        yield value
    elif type(value).__module__.partition(".")[0] == package and type(_vars_of(value)) is dict:
        yield value.__dict__
        yield from (each for each in value.__dict__.values() if type(each) in (dict, *_LISTS))


def _vars_of(value: Any) -> Any:
    """Return the attributes that an object holds itself; None if it has none."""
    return None if isinstance(value, type) else getattr(value, "__dict__", None)


def _plain(held: dict[Any, Any]) -> dict[Any, Any]:
    return {key: value for key, value in held.items() if type(value) in PLAIN}


def check_library_globals(before: Iterable[LibraryGlobals], *, is_first: bool) -> None:
    """Put back what a package has changed at each call, and reject the step.

    Args:
        before: The result of `library_globals` before the trace.
        is_first: Whether it was the first step, which may set what then remains.

    Raises:
        UnsupportedError: E804.
    """
    changed: list[str] = []
    for name, holder, then in () if is_first else before:
        if isinstance(holder, _LISTS):
            if len(holder) != len(then):
                changed.append(name)
                holder.clear()
                holder.extend(then)
            continue
        for key, value in then.items():
            now = holder.get(key, value)
            if type(now) not in PLAIN or now != value:
                changed.append(f"{name}.{key}")
                holder[key] = value
    if changed:
        raise changed_library(changed)
