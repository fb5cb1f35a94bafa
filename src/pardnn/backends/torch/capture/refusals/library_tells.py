"""Functions of installed packages that a step logs to: `wandb.log({"loss": loss.item()})`.

Problem: the arguments of such a function go into its module or into a file. Capture would pass it
stand-ins of numbers that only a run knows, a few times, and no later step would call it again.

Idea: while a step is traced, a function of a module that the user's code names is not called if its
name says that it logs, and its result is dropped: each rank calls it after each step, as it does
what the step calls on objects of packages (`told_sinks`). One that saves, or gets anything but
numbers, texts and tensors, is refused.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import types
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any
from unittest import mock

from pardnn.backends.torch.capture.numbers.namespaces import replace_globals
from pardnn.backends.torch.capture.numbers.told_sinks import Tell, is_dropped, may_be_given
from pardnn.backends.torch.capture.refusals.unsupported import at, error_at
from pardnn.backends.torch.capture.tracer import Tracer
from pardnn.backends.torch.user_step.code_names import is_library_frame
from pardnn.backends.torch.user_step.object_graph import ObjectGraph
from pardnn.backends.torch.user_step.sinks import is_telling, read_from, told_functions
from pardnn.errors import UnsupportedError


@contextlib.contextmanager
def library_tells_noted(
    tracer: Tracer,
    functions: Collection[types.FunctionType],
    objects: ObjectGraph,
    tell: Tell,
) -> Iterator[None]:
    """Note calls of functions of packages that log while the context is open; refuse saving.

    Args:
        tracer: The tracer of the step that runs in it.
        functions: The user's, which may run.
        objects: The object graph of the step.
        tell: Called with what the step logs.

    Raises:
        UnsupportedError: E804.
    """
    others, told, read, where = {}, set[str](), dict[str, str | None](), tracer.locator.line

    def telling(name: str, *args: Any) -> None:
        told.add(_package(name))
        tell(name, *args)

    known = told_functions(functions, objects)
    beside = read_from(functions, objects, set(map(_package, known)))
    with contextlib.ExitStack() as stack:
        for full_name, (module, name) in (known | beside).items():
            real = vars(module)[name]
            if full_name in known:
                new = _noting(real, full_name, telling, where)
            elif callable(real):
                new = _reading(real, full_name, read, where)
            else:  # whoever names a container reads it
                read[full_name] = None
                continue
            others[id(real)] = new
            stack.enter_context(mock.patch.object(module, name, new))
        replace_globals(stack, functions, others)
        yield
    for name, line in read.items():
        if _package(name) in told:
            raise _read_back(name, line)


def _package(name: str) -> str:
    return name.partition(".")[0]


def _reading(
    real: Callable[..., Any],
    name: str,
    read: dict[str, str | None],
    where: Callable[[], str | None],
) -> Callable[..., Any]:
    """Return a function that notes that the user's code called it."""

    @functools.wraps(real)
    def reading(*args: Any, **kwargs: Any) -> Any:
        if not is_library_frame(sys._getframe(1)):
            read.setdefault(name, where())
        return real(*args, **kwargs)

    return reading


def _noting(
    real: Callable[..., Any], name: str, tell: Tell, where: Callable[[], str | None]
) -> Callable[..., Any]:
    own = threading.get_ident()

    @functools.wraps(real)
    def noting(*args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1)
        is_users = not is_library_frame(caller)
        if threading.get_ident() != own or not is_users or not is_dropped(caller):
            return real(*args, **kwargs)
        key = name.rpartition(".")[2]
        if not is_telling(key) or not may_be_given(key, [*args, *kwargs.values()]):
            raise told_library(name, where())
        tell(name, "", args, kwargs)
        return None

    return noting


def told_library(name: str, where: str | None) -> UnsupportedError:
    """Return E804: a step that calls a function of a package for its effect.

    Args:
        name: The name of the function.
        where: "file.py:line" of the user's code; None if unknown.
    """
    advice = (
        "Call it between two calls, with what the step returns. What logs (wandb.log) may get\n"
        "numbers, texts, tensors, and lists and dictionaries of them in the step."
    )
    if name == "torch.save":
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


def _read_back(name: str, where: str | None) -> UnsupportedError:
    """Return E804: a step that logs to a package, and reads what may hold what was logged."""
    package = _package(name)
    return error_at(
        where,
        f"the step reads {name}{at(where)}, and logs to {package}, which happens\n"
        "after each step: what it reads would be of a step before.\n"
        f"Read {name} between two calls of the step, and pass the step what it needs.",
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
