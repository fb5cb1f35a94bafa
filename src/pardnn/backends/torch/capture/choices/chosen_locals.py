"""Local variables set by data-dependent code, see `choices`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pardnn.backends.torch.capture.choices.normal_form import CHOSEN, VALUE
from pardnn.backends.torch.capture.refusals import unsupported
from pardnn.backends.torch.user_step.object_graph import PLAIN


class _NotChosenError(Exception):
    """Two values are of kinds between which nothing can select."""


def chosen_locals(
    then: Mapping[str, Any],
    now: Mapping[str, Any],
    either: Callable[[Any, Any], Any],
    line: str | None,
) -> dict[str, Any]:
    """Return the local variables after code that has run only if a condition holds.

    Args:
        then: The variables before it, or after the other branch; a name may be unbound there, if no
            code that reads it then runs.
        now: The variables after it.
        either: Selects between a value before and one after; None if it cannot.
        line: "file.py:line" of the condition.

    Raises:
        UnsupportedError: E802, if one differs and cannot be selected.
    """
    found: dict[str, Any] = {}
    for name in {**then, **now}:
        old, new = then.get(name, now.get(name)), now.get(name, then.get(name))
        try:
            found[name] = _chosen(old, new, either)
        except _NotChosenError:
            raise unsupported.choice(
                line,
                f"{_binds(name)} a value that is neither a number nor a tensor like the other one "
                "without\na gradient (torch.where(p, a, b) selects)",
            ) from None
    return found


def _chosen(old: Any, new: Any, either: Callable[[Any, Any], Any]) -> Any:
    if _is_one(old, new):
        return new
    if type(old) is tuple and type(new) is tuple and len(old) == len(new):
        return tuple(_chosen(*pair, either) for pair in zip(old, new, strict=True))
    found = either(old, new)
    if found is None:
        raise _NotChosenError
    return found


def _binds(name: str) -> str:
    """Return what binds a name, as written in the original function; see `normal_form`."""
    if name == VALUE:
        return "returns"
    return "gives a ternary" if name.startswith(CHOSEN) else f"gives {name!r}"


def _is_one(old: Any, new: Any) -> bool:
    """Whether two values cannot be distinguished."""
    if old is new:
        return True
    return type(old) is type(new) and isinstance(new, PLAIN) and repr(old) == repr(new)
