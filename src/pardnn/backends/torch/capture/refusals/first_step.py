"""The errors for first steps: E806, and E804 for second ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pardnn.backends.torch.capture.refusals.unsupported import at, error_at
from pardnn.errors import UnsupportedError, shown


def irregular_initial_state(name: str, reason: str) -> UnsupportedError:
    """Return E806: the first step creates a tensor from what only that step knows."""
    return UnsupportedError(
        f"{name!r} {reason}. It is created by the first step, so ranks cannot create it.\n"
        "Run one step of your own before capturing, or create the tensor where the model and the\n"
        "optimizer are made: from then on it is followed like any other.",
        code="E806",
        details={"state": name},
    )


def first_step_differs(names: Sequence[str]) -> UnsupportedError:
    """Return E806: the first step creates a number that later steps change in another way."""
    more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
    return UnsupportedError(
        f"the first step creates the number {names[0]!r}{more}, and computes other numbers\n"
        "with it than later steps would from any initial value.\n"
        "Run one step of your own before capturing, so that the number exists, or create it\n"
        "before the step.",
        code="E806",
        details={"numbers": list(names)},
    )


def made_later(name: str) -> UnsupportedError:
    """Return E804: the second step makes a tensor that the first one does not."""
    return UnsupportedError(
        f"the step is not the same twice: only its second run makes {shown(name)}, as an optimizer "
        "does\nwhere step() comes before backward() and finds no gradients at first.\n"
        "Call step() after backward(), or run one step of your own before `parallelize`.",
        code="E804", details={"differs": name},
    )  # fmt: skip


def takes_another_way(where: str | None) -> UnsupportedError:
    """Return E806: the first step computes something else than the later ones.

    Args:
        where: "file.py:line" of a call that it does not make; None if unknown.
    """
    which = f", which make a call{at(where)}\nthat the first one does not make" if where else ""
    return error_at(
        where,
        f"the first step does something different from later steps{which}.\n"
        "One graph has to stand for all of them. Run one step of your own before capturing.",
        "E806",
    )


def leaves_once(name: str) -> UnsupportedError:
    """Return E806: a value that only the first step leaves in the state of an optimizer."""
    return UnsupportedError(
        f"only the first step leaves something in {name!r}, which ranks cannot make.\n"
        "Run one step of your own before capturing.",
        code="E806",
        details={"state": name},
    )


def kept_of_numbers(name: str) -> UnsupportedError:
    """Return E806: a tensor that the first step makes from numbers that change, and keeps."""
    return UnsupportedError(
        f"the first step makes {name!r} from numbers that change from step to step, and keeps it:\n"
        "ranks would make it again in each step, and get a different one.\n"
        "Run one step of your own before capturing, or make the tensor before the step.",
        code="E806",
        details={"state": name},
    )


def kept_of_what_changed(name: str) -> UnsupportedError:
    """Return E806: a tensor that the first step keeps, made from what has changed since."""
    return UnsupportedError(
        f"the first step makes {name!r} and keeps it, but what it is made from has changed since:\n"
        "eager steps may continue with the old one, while ranks make it again in each step.\n"
        "Run one step of your own before parallelizing, or make the tensor before the step.",
        code="E806",
        details={"state": name},
    )


def cached_tensor(function: Callable[..., Any]) -> UnsupportedError:
    """Return E804: a cached tensor is made from what changes, and eager steps keep the old one.

    Args:
        function: The user's function that has the cache.
    """
    name = _name_of(function)
    return UnsupportedError(
        f"{name}() keeps a tensor in its cache, but what it is made from changes: from then on,\n"
        "the tensor differs from the one that eager steps continue with.\n"
        f"Call {name}.cache_clear() where you change it, or pass what changes as an argument.",
        code="E804",
        details={"function": name},
    )


def cached_and_written(function: Callable[..., Any]) -> UnsupportedError:
    """Return E804: code other than the function that makes a cached tensor writes it in place.

    Args:
        function: The user's function that has the cache.
    """
    name = _name_of(function)
    return UnsupportedError(
        f"{name}() keeps a tensor in its cache, and the step writes into it: eager steps find\n"
        "what was written before, while each parallel step makes the tensor again.\n"
        f"Write into a copy, {name}(...).clone(), or keep what changes in a module's buffer.",
        code="E804",
        details={"function": name},
    )


def _name_of(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", repr(function)).rpartition("<locals>.")[2]


def cache_counts(where: str) -> UnsupportedError:
    """Return E804: the step asks how often a cache was hit.

    Args:
        where: "file.py:line" of the user's code.
    """
    return error_at(
        where,
        f"the step calls cache_info(){at(where)}: the cache counts only while the\n"
        "step is captured, not in later calls.\n"
        "Ask before the step, or count the calls in an attribute: such numbers are followed.",
        "E804",
    )
