"""From an entry point's factory to the graph of its step, without allocating tensor data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pardnn.backends.torch.capture.capture import capture
from pardnn.backends.torch.deferred_init.initialise import Recording, initialise
from pardnn.errors import UsageError
from pardnn.graph.ir import Graph


def make_step(factory: Callable[[], Any]) -> tuple[Callable[..., Any], tuple[Any, ...], Recording]:
    """Call a factory under fake tensors and return its step, its args and the recording.

    Raises:
        UsageError: E224, if it returns anything but `(step, args)`.
        UserCodeError: The factory raised an error.
    """
    made, recording = initialise(factory)
    if not (isinstance(made, tuple) and len(made) == 2 and callable(made[0])):
        raise UsageError(
            f"the entry point returned {type(made).__name__}, not (step, args): a function that "
            "trains one step and returns the loss, and the tuple of its arguments",
            code="E224",
        )
    step, args = made
    if not isinstance(args, tuple | list):
        raise UsageError(
            f"the entry point returned (step, {type(args).__name__}); args must be a tuple",
            code="E224",
        )
    return step, tuple(args), recording


def capture_factory(factory: Callable[[], Any]) -> Graph:
    """Return the graph of the step that a factory makes."""
    step, args, _ = make_step(factory)
    return capture(step, *args)
