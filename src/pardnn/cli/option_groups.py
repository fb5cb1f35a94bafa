"""Options that go together are written once: a command takes the group as one parameter."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, get_type_hints


def with_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command with each option of its groups as a parameter, as typer reads them.

    Args:
        command: Its parameters are options, or groups: a NamedTuple whose fields are options, each
            with its default.
    """
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {}
    options: dict[str, tuple[Any, Any]] = {}
    for name, parameter in inspect.signature(command).parameters.items():
        kind = hints[name]
        if not hasattr(kind, "_field_defaults"):
            options[name] = kind, parameter.default
            continue
        groups[name] = kind
        fields = get_type_hints(kind, include_extras=True)
        options |= {field: (fields[field], kind._field_defaults[field]) for field in kind._fields}

    @functools.wraps(command)
    def called(**given: Any) -> None:
        for name, kind in groups.items():
            given[name] = kind(**{field: given.pop(field) for field in kind._fields})
        command(**given)

    parameters = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=kind, default=default)
        for name, (kind, default) in options.items()
    ]
    vars(called)["__signature__"] = inspect.Signature(parameters)
    called.__annotations__ = {name: kind for name, (kind, _) in options.items()}
    return called
