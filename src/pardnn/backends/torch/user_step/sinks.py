"""Sinks of a step: open files, csv writers, progress bars, experiment writers.

A sink is an object of a library, or an open file, that only receives data: it holds no tensor that
a step could compute with, and no module holds it. Capture records the calls that a step makes on
it, and each rank makes them after each step.

So are functions of packages that log, by their name: `wandb.log({"loss": loss.item()})`.

Files, databases and queues may only be used as sinks: what is read from them is not guarded, and
would be frozen in the graph.
"""

from __future__ import annotations

import csv
import dataclasses
import enum
import io
import re
import sys
import types
from collections import deque
from collections.abc import Collection, Iterator
from typing import Any

import torch

from pardnn.backends.torch.user_step.code_names import (
    is_installed_file,
    is_library_file,
    names_in,
)
from pardnn.backends.torch.user_step.held_numbers import named_places
from pardnn.backends.torch.user_step.object_graph import (
    OPAQUE_PACKAGES,
    PLAIN,
    ObjectGraph,
    walk_value,
)

_CSV_WRITER = type(csv.writer(io.StringIO()))
#: Packages whose objects are sinks whatever they hold; a progress bar holds the data it iterates.
_OF_SINKS = ("tqdm", "torch.utils.tensorboard", "tensorboardX")
#: Types whose content is in C, in a file or in another process.
_OUTSIDE = (
    "sqlite3.", "_queue.", "mmap.", "multiprocessing.queues.", "multiprocessing.connection.",
    "multiprocessing.managers.", "pandas.", "polars.", "pyarrow.", "h5py.", "lmdb.",
)  # fmt: skip
#: Names of functions that only receive data, and of others that are called for their effect.
_TELLING = re.compile(r"(log|report|track)(_\w+)?")
_SAVING = re.compile(r"save(_\w+)?")
#: Their log records are effects like all others.
_OF_RECORDS = ("absl", "logging")
#: The only such function of torch's: module and name.
_OF_TORCH = ("torch.serialization", "save")
_NO_SINKS = (torch.Tensor, torch.nn.Module, dict, list, set, enum.Enum, BaseException)


def is_outside(value: Any) -> bool:
    """Whether the content of a value is outside Python: an open file, a database, a queue."""
    if isinstance(value, io.IOBase):
        return not value.closed
    module = f"{type(value).__module__}."
    return isinstance(value, _CSV_WRITER) or module.startswith(_OUTSIDE)


def sinks_of(objects: ObjectGraph) -> dict[str, Any]:
    """Return the sinks that a step reaches, by name.

    Args:
        objects: The object graph of the step.
    """
    found: dict[str, Any] = {}
    seen: set[int] = set()
    modules = tuple(f"{name}." for name in objects.modules.values() if name)
    for name, _, value in named_places(objects):
        if type(value) in PLAIN or id(value) in seen or "<" in name:
            continue
        is_held = name.startswith(modules)
        if is_outside(value) or (not is_held and _is_librarys(value) and not _holds_tensors(value)):
            seen.add(id(value))
            found.setdefault(name, value)
    return found


def may_be_told(value: Any) -> bool:
    """Whether calls on a value may be made after a step, as for the values of `sinks_of`."""
    return is_outside(value) or (_is_librarys(value) and not _holds_tensors(value))


def told_functions(
    functions: Collection[types.FunctionType], objects: ObjectGraph
) -> dict[str, tuple[types.ModuleType, str]]:
    """Return the functions of packages that log or save and that code names, by full name.

    Args:
        functions: The user's, which may run.
        objects: The object graph of the step: modules that it reaches count.

    Returns:
        For each, the module that holds it, and its name there.
    """
    return {
        f"{module.__name__}.{name}": (module, name)
        for module, name in _named(functions, objects)
        if _is_called_for(module, name)
    }


def read_from(
    functions: Collection[types.FunctionType], objects: ObjectGraph, packages: Collection[str]
) -> dict[str, tuple[types.ModuleType, str]]:
    """Return, likewise, what may hold what was logged: other functions, and containers."""
    kinds = types.FunctionType | types.MethodType | list | dict | set | deque
    return {
        f"{module.__name__}.{name}": (module, name)
        for module, name in _named(functions, objects)
        if module.__name__.partition(".")[0] in packages
        and isinstance(vars(module).get(name), kinds)
        and not _is_called_for(module, name)
    }


def _named(
    functions: Collection[types.FunctionType], objects: ObjectGraph
) -> Iterator[tuple[types.ModuleType, str]]:
    """Yield what code names that modules hold: module and name."""
    spaces = [(each.__globals__, names_in(each.__code__)) for each in functions]
    named = {name for _, names in spaces for name in names}
    held = [space[name] for space, names in spaces for name in names if name in space]
    imported = [sys.modules[name] for name in named if name in sys.modules]
    for value in (*held, *imported, *objects.seen.values()):
        if isinstance(value, types.ModuleType):
            yield from ((value, name) for name in named)
        elif isinstance(value, types.FunctionType):
            module = sys.modules.get(value.__module__)
            if module is not None:
                yield module, value.__name__


def _is_called_for(module: types.ModuleType, name: str) -> bool:
    """Whether a package's module holds a function, or a method, that is called for its effect."""
    value = vars(module).get(name)
    function = value.__func__ if isinstance(value, types.MethodType) else value
    if not isinstance(function, types.FunctionType):
        return False
    if (function.__module__, name) == _OF_TORCH:
        return True
    file, package = function.__code__.co_filename, function.__module__.partition(".")[0]
    is_installed = is_installed_file(file) and is_library_file(file)
    is_named = is_telling(name) or _SAVING.fullmatch(name) is not None
    return is_installed and is_named and package not in (*_OF_RECORDS, "torch")


def is_telling(name: str) -> bool:
    """Whether a function only receives data, by its name."""
    return _TELLING.fullmatch(name) is not None


def _is_librarys(value: Any) -> bool:
    kind = type(value)
    module = kind.__module__
    if module.startswith(_OF_SINKS):
        return hasattr(value, "__dict__")
    if module.partition(".")[0] in OPAQUE_PACKAGES or isinstance(value, _NO_SINKS):
        return False
    if not hasattr(value, "__dict__") or isinstance(value, type) or callable(value):
        return False
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    is_installed = is_installed_file(file) and is_library_file(file)
    return is_installed and not dataclasses.is_dataclass(value)


def _holds_tensors(value: Any) -> bool:
    if type(value).__module__.startswith(_OF_SINKS):
        return False
    held = walk_value(value)
    return bool(held.tensors or held.stateful or held.arrays)
