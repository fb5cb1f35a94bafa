"""Names that begin the paths from a step to what it refers to.

Arguments, attributes of the object whose method the step is, closure variables and globals all
begin paths, and what belongs to the batch is told by its name. So only arguments keep a name that
several of them have: `def update(self, q, r)` of an agent with a network `self.q`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from pardnn.backends.torch.user_step.slots import RootName


def argument_names(step: Callable[..., Any], num_args: int) -> list[str]:
    """Return the names of the step's positional arguments, from its signature if it has one."""
    try:
        parameters = list(inspect.signature(step).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [p.name for p in parameters[:num_args] if p.kind in positional]
    rest = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), "arg")
    return [*names, *(f"{rest}.{i}" for i in range(num_args - len(names)))]


def root_name(arguments: Iterable[tuple[str, int]]) -> RootName:
    """Return the path of the step itself, or of the object whose method it is.

    Args:
        arguments: Name and index of each argument.
    """
    return RootName(_first_parts(arguments))


def outer_name(name: str, arguments: Iterable[tuple[str, int]]) -> str:
    """Return what a closure variable or a global is called in paths.

    Args:
        name: Its name in the code.
        arguments: Name and index of each argument.
    """
    return f"outer.{name}" if name in _first_parts(arguments) else name


def _first_parts(arguments: Iterable[tuple[str, int]]) -> set[str]:
    return {name.partition(".")[0] for name, _ in arguments}
