"""Guards on replaced functions of libraries: `F.relu = torch.tanh`.

A library's own code is assumed not to change, but somebody may replace a function in its module, or
a method in its class. The guards cover functions that the user's code names, those that code
reached by the step may run, and Python's own: `builtins.print = ...`. Each module or class is one
dictionary, whose version is compared.

The classes that an abstract one counts as its own are read likewise.

Process-wide settings, such as thread counts, are guarded if code names the function that returns
them.
"""

from __future__ import annotations

import abc
import builtins
import decimal
import locale
import os
import sys
import types
import warnings
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pardnn.backends.torch.user_step.code_names import is_installed_file, is_library_module
from pardnn.backends.torch.user_step.guards.content import HEAP_TYPE
from pardnn.backends.torch.user_step.guards.item import VALUES, ItemGuard
from pardnn.backends.torch.user_step.slots import dotted
from pardnn.backends.torch.user_step.used_names import (
    CLOSED_LIBRARIES,
    UsedNames,
    runs_unnamed,
)

#: Where torch's own modules find the functions that they call.
_OF_TORCH = (torch, torch.nn.functional)
NamedModules = dict[int, tuple[str, types.ModuleType]]
_CONTAINERS = (list, dict, set, deque)
#: Larger ones are tables of a package, not settings.
MOST_ITEMS = 1000


def library_modules(used: UsedNames, reached: Iterable[Any]) -> NamedModules:
    """Return the modules of libraries that the user's functions reach, by id, with a name.

    Args:
        used: The names that code which may run mentions.
        reached: What the step reaches.
    """
    held = [(value.__name__, value) for value in reached if _is_library(value)]
    return dict(_named_modules(used, held))


def library_guards(
    used: UsedNames, reached: Iterable[Any], modules: NamedModules
) -> list[ItemGuard]:
    """Return a guard for each library class and module whose code the step may run.

    Args:
        used: The names that code which may run mentions.
        reached: What the step reaches: its classes count, including the user's.
        modules: From `library_modules`.
    """
    kinds = [value for value in reached if isinstance(value, type)]
    found, named = dict(modules), modules.keys()
    built_in = vars(builtins)
    guards = [ItemGuard("builtins", built_in, sorted(used.of_users & built_in.keys()))]
    for kind in dict.fromkeys([torch.Tensor, *kinds]):
        module = sys.modules.get(kind.__module__)
        if kind.__flags__ & HEAP_TYPE and module is not None and is_library_module(module):
            found.setdefault(id(module), (module.__name__, module))
            guards.append(_of_class(kind, used))
    for module in _OF_TORCH:
        found.setdefault(id(module), (module.__name__, module))
    for name, module in found.values():
        keys = _keys(module, used, is_named=id(module) in named)
        guards.append(ItemGuard(name, vars(module), keys))
    return guards


def library_containers(used: UsedNames, modules: NamedModules) -> Iterator[tuple[str, Any]]:
    """Yield the containers of packages that the user's code names: `lib.settings["rate"]`.

    Python's own modules and those of `CLOSED_LIBRARIES` are left out: what changes in them, such
    as `sys.modules`, is not the user's.

    Args:
        used: The names that code which may run mentions.
        modules: From `library_modules`.
    """
    for path, module in modules.values():
        package = module.__name__.partition(".")[0]
        file = vars(module).get("__file__") or ""
        if not is_installed_file(file) or package in CLOSED_LIBRARIES:
            continue
        for key, value in vars(module).items():
            if key in used.of_users and isinstance(value, _CONTAINERS) and len(value) <= MOST_ITEMS:
                yield dotted(path, key), value


def _named_modules(
    used: UsedNames, held: Iterable[tuple[str, types.ModuleType]]
) -> Iterator[tuple[int, tuple[str, types.ModuleType]]]:
    """Yield the modules that the user's functions reach, by id, with a name.

    Args:
        used: The names that they mention.
        held: Modules of libraries in closures and objects.
    """
    waiting = deque(
        (key, value)
        for function in used.functions
        for key, value in function.__globals__.items()
        if key in used.of_users and _is_library(value)
    )
    waiting.extend(held)
    seen = set[int]()
    while waiting:
        name, module = waiting.popleft()  # the shortest name first
        if id(module) not in seen:
            seen.add(id(module))
            yield id(module), (name, module)
            inner = {key: x for key, x in vars(module).items() if key in used.of_users}
            waiting += [(dotted(name, key), x) for key, x in inner.items() if _is_library(x)]


def _keys(module: types.ModuleType, used: UsedNames, *, is_named: bool) -> list[str]:
    """Return what is guarded in a module: what the user's code names, and what other code runs."""
    kinds = object if module in _OF_TORCH else types.FunctionType | type
    return [
        key
        for key, x in vars(module).items()
        if (is_named and key in used.of_users and (callable(x) or isinstance(x, VALUES)))
        or (key in used.names and callable(x) and isinstance(x, kinds))
    ]


def _of_class(kind: type, used: UsedNames) -> ItemGuard:
    known = frozenset(vars(kind))

    def is_run(key: str) -> bool:
        return key in used.names or runs_unnamed(key)

    def is_new(key: str) -> bool:
        # Only methods, since `copyreg` keeps a list `__slotnames__` in classes of pickled objects.
        is_read = key in used.names or (is_run(key) and _is_method(vars(kind)[key]))
        return key not in known and is_read

    methods = [key for key, x in vars(kind).items() if _is_method(x) and is_run(key)]
    values = [k for k, x in vars(kind).items() if isinstance(x, VALUES) and k in used.of_users]
    return ItemGuard(kind.__qualname__, vars(kind), [*methods, *values], is_new)


def _is_method(value: object) -> bool:
    return callable(value) or isinstance(value, property | classmethod)


def _is_library(value: object) -> bool:
    is_module = isinstance(value, types.ModuleType)
    return is_module and is_library_module(value)


def _folder() -> str | None:
    try:
        return str(Path.cwd())
    except FileNotFoundError:  # the folder was removed
        return None


def _precision() -> tuple[Any, ...]:
    context = decimal.getcontext()
    return context.prec, context.rounding, context.Emin, context.Emax


def _precisions() -> list[str]:
    get = torch._C._get_fp32_precision_getter
    return [get(backend, op) for backend in ("mkldnn", "cuda") for op in ("matmul", "conv", "rnn")]


#: Process-wide settings, read by a function or attribute of this name.
_PROCESS_SETTINGS: dict[str, Callable[[], Any]] = {
    "Decimal": _precision,
    "argv": lambda: list(sys.argv),
    "cpu_count": os.cpu_count,
    "cwd": _folder,
    "get_deterministic_debug_mode": torch.get_deterministic_debug_mode,
    "get_float32_matmul_precision": torch.get_float32_matmul_precision,
    "get_num_interop_threads": torch.get_num_interop_threads,
    "get_num_threads": torch.get_num_threads,
    "getcwd": _folder,
    "getlocale": locale.getlocale,
    # What the step itself sets holds for all graphs, but each was captured under one setting.
    "set_num_threads": torch.get_num_threads,
    "set_float32_matmul_precision": torch.get_float32_matmul_precision,
    "fp32_precision": lambda: _precisions(),
    "is_anomaly_enabled": torch.is_anomaly_enabled,
    "benchmark": torch._C._get_cudnn_benchmark,
    "allow_tf32": lambda: 2 * torch._C._get_cublas_allow_tf32() + torch._C._get_cudnn_allow_tf32(),
    "deterministic": torch._C._get_cudnn_deterministic,
    "enabled": torch._C._get_cudnn_enabled,
    "is_deterministic_algorithms_warn_only_enabled": (
        torch.is_deterministic_algorithms_warn_only_enabled
    ),
    "fill_uninitialized_memory": torch._C._get_deterministic_fill_uninitialized_memory,
    "getrecursionlimit": sys.getrecursionlimit,
    "getswitchinterval": sys.getswitchinterval,
    "initial_seed": torch.initial_seed,
    "geterr": np.geterr,
    "sched_getaffinity": lambda: sorted(os.sched_getaffinity(0)),
    "warn": lambda: [each for each in warnings.filters if each[0] == "error"],
}
#: By these, texts of arrays are made or told.
_TELLING = frozenset({"print", "str", "repr", "format", "write", "debug", "info", "warning"})
#: How messages name them, if not by such a function.
_SHOWN = {
    "Decimal": "decimal.getcontext()",
    "set_num_threads": "get_num_threads()",
    "set_float32_matmul_precision": "get_float32_matmul_precision()",
    "fp32_precision": "fp32_precision of torch.backends",
    "allow_tf32": "allow_tf32",
    "argv": "sys.argv",
    "warn": "the filters of warnings that raise",
    "benchmark": "torch.backends.cudnn.benchmark",
    "deterministic": "torch.backends.cudnn.deterministic",
    "enabled": "torch.backends.cudnn.enabled",
    "fill_uninitialized_memory": "torch.utils.deterministic.fill_uninitialized_memory",
}


def process_settings(names: Collection[str]) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield the process-wide settings that code asks for, with a getter for each.

    Args:
        names: The names that the user's code mentions.
    """
    for name, get in _PROCESS_SETTINGS.items():
        if name in names:
            yield _SHOWN.get(name, f"{name}()"), get
    if not _TELLING.isdisjoint(names):
        yield "numpy.get_printoptions()", np.get_printoptions


class Registered:
    """The classes registered with an abstract one or a subclass: its `isinstance` counts them.

    Args:
        kind: The abstract class.
    """

    def __init__(self, kind: abc.ABCMeta) -> None:
        self._kind, self._token, self._known = kind, -1, list[str]()

    def __call__(self) -> list[str]:
        """Return their names, in order: the same on all ranks."""
        if (token := abc.get_cache_token()) != self._token:  # some class was registered somewhere
            self._token, self._known = token, sorted(_registered_with(self._kind))
        return self._known


def _registered_with(kind: abc.ABCMeta) -> Iterator[str]:
    found = (ref() for ref in abc._get_dump(kind)[0])  # type: ignore[attr-defined]
    yield from (each.__qualname__ for each in found if each is not None)
    for each in type.__subclasses__(kind):
        yield from _registered_with(each)
