"""Functions of installed packages that a step logs to: `wandb.log({"loss": loss.item()})`.

Problem: the arguments of such a function go into its module or into a file. Capture would pass it
stand-ins of numbers that only a run knows, a few times, and no later step would call it again.

Idea: while a step is traced, a function of a module that the user's code names is refused if its
name says that it logs or saves, and its result is dropped. Calls on objects of the package are
followed (`told_sinks`).
"""

from __future__ import annotations

import contextlib
import functools
import re
import sys
import threading
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch

from pardnn.backends.torch.capture.numbers.namespaces import replace_globals
from pardnn.backends.torch.capture.numbers.told_sinks import is_dropped
from pardnn.backends.torch.capture.refusals.unsupported import at, error_at
from pardnn.backends.torch.user_step.code_names import is_library_file, is_library_frame, names_in
from pardnn.backends.torch.user_step.object_graph import ObjectGraph
from pardnn.errors import UnsupportedError

_TELLING = re.compile(r"(log|report|track|save)(_\w+)?")
#: Their log records are effects like all others.
_OF_RECORDS = ("absl", "logging")
#: The only such function of torch's: module and name.
_OF_TORCH = ("torch.serialization", "save")


@contextlib.contextmanager
def library_tells_refused(
    where: Callable[[], str | None],
    functions: Collection[types.FunctionType],
    objects: ObjectGraph,
) -> Iterator[None]:
    """Refuse calls of functions of packages that log or save while the context is open.

    Args:
        where: Returns the user's line that runs.
        functions: The user's, which may run.
        objects: The object graph of the step: modules that it reaches count.

    Raises:
        UnsupportedError: E804.
    """
    others = {}
    with contextlib.ExitStack() as stack:
        for module, name in dict.fromkeys(_told(functions, objects.seen.values())):
            real = getattr(module, name)
            others[id(real)] = new = _refusing(real, where)
            stack.enter_context(mock.patch.object(module, name, new))
        replace_globals(stack, functions, others)
        yield


def _told(
    functions: Collection[types.FunctionType], reached: Iterable[Any]
) -> Iterator[tuple[types.ModuleType, str]]:
    """Yield the functions that log or save and that code names, by module and name."""
    spaces = [(each.__globals__, names_in(each.__code__)) for each in functions]
    named = {name for _, names in spaces for name in names}
    held = [space[name] for space, names in spaces for name in names if name in space]
    imported = [sys.modules[name] for name in named if name in sys.modules]
    for value in (*held, *imported, *reached):
        if isinstance(value, types.ModuleType):
            yield from ((value, name) for name in named if _is_telling(vars(value).get(name)))
        elif _is_telling(value):
            yield sys.modules[value.__module__], value.__name__


def _is_telling(value: Any) -> bool:
    if not isinstance(value, types.FunctionType) or not _TELLING.fullmatch(value.__name__):
        return False
    if (value.__module__, value.__name__) == _OF_TORCH:
        return True
    file, package = value.__code__.co_filename, value.__module__.partition(".")[0]
    is_installed = "/site-packages/" in file and is_library_file(file)
    is_held = vars(sys.modules.get(value.__module__, torch)).get(value.__name__) is value
    return is_installed and is_held and package not in (*_OF_RECORDS, "torch")


def _refusing(real: Callable[..., Any], where: Callable[[], str | None]) -> Callable[..., Any]:
    own = threading.get_ident()

    @functools.wraps(real)
    def refusing(*args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1)
        is_users = not is_library_frame(caller)
        if threading.get_ident() == own and is_users and is_dropped(caller):
            raise told_library(f"{real.__module__}.{real.__name__}", where())
        return real(*args, **kwargs)

    return refusing


def told_library(name: str, where: str | None) -> UnsupportedError:
    """Return E804: a step that calls a function of a package for its effect.

    Args:
        name: The name of the function.
        where: "file.py:line" of the user's code; None if unknown.
    """
    advice = (
        "Call it between two calls, with what the step returns. An object made before the step\n"
        "may be used in it: run = wandb.init() before it, and run.log(...) in it."
    )
    if name == ".".join(_OF_TORCH):
        advice = (
            "Save between two calls: fast.save(path) writes everything that training resumes from."
        )
    return error_at(
        where,
        f"the step calls {name}{at(where)}: this would happen at capture only,\n"
        "not in later steps.\n"
        f"{advice}",
        "E804",
    )


def changed_library(names: Sequence[str]) -> UnsupportedError:
    """Return E804: a step that changes what an installed package holds at each call.

    Args:
        names: The names of what has changed.
    """
    more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
    return UnsupportedError(
        f"the step changes {names[0]}{more} of an installed package: this would happen at capture\n"
        "only, not in later steps.\n"
        "Call what changes it between two calls, with what the step returns.",
        code="E804",
        details={"changed": list(names)},
    )
