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
from pardnn.backends.torch.user_step.sinks import is_telling, told_functions
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
    others = {}
    with contextlib.ExitStack() as stack:
        for full_name, (module, name) in told_functions(functions, objects).items():
            real = vars(module)[name]
            others[id(real)] = new = _noting(real, full_name, tell, tracer.locator.line)
            stack.enter_context(mock.patch.object(module, name, new))
        replace_globals(stack, functions, others)
        yield


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
