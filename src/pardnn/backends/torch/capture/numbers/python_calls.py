"""Python's own functions of numbers, as they have to work on symbols while a step is traced."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from pardnn.backends.torch.ops.host_scalars import MATH_FUNCTIONS, call_math, node_of


@contextlib.contextmanager
def python_calls() -> Iterator[None]:
    """Let functions of `math` record their calls on symbols.

    A function that was imported by name (`from math import cos`) takes the number itself, which is
    guarded.
    """
    with contextlib.ExitStack() as stack:
        for name in MATH_FUNCTIONS:
            new = _recording(name, getattr(math, name))
            stack.enter_context(mock.patch.object(math, name, new))
        yield


def _recording(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        if len(args) == 1 and node_of(args[0]) is not None:
            return call_math(name, args[0])
        return real(*args)

    return call
