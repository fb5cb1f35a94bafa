"""A step that is spread over the ranks at its first call, with that call's arguments."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from pardnn.backends.torch.user_step.sources import batch_indices
from pardnn.errors import UsageError


class OnFirstCall:
    """The step on this rank; called with all of its arguments, models and optimizers among them.

    `save`, `load`, `evaluate` and all else of `Parallel` are there from the first call on.

    Args:
        step: The user's step.
        make: Returns the `Parallel` for the arguments of the first call.
    """

    def __init__(self, step: Callable[..., Any], make: Callable[..., Any]) -> None:
        functools.update_wrapper(self, step)
        self._make = make
        self._fast: Any = None
        self._kept: dict[int, Any] = {}
        self._count = 0

    def __call__(self, *args: Any) -> Any:
        """Run one step on all ranks.

        Raises:
            UsageError: E201, if another model or optimizer is given than at the first call.
        """
        if self._fast is None:
            batch = set(batch_indices(args))
            self._fast = self._make(*args)
            self._count = len(args)
            self._kept = {i: arg for i, arg in enumerate(args) if i not in batch}
        others = [i for i, kept in self._kept.items() if i >= len(args) or args[i] is not kept]
        if others or len(args) != self._count:
            raise UsageError(
                f"argument {others[0] if others else len(args)} of the step is not that of the "
                "first call. A step keeps its models and optimizers; call parallelize for each set."
            )
        return self._fast(*(arg for i, arg in enumerate(args) if i not in self._kept))

    def __getattr__(self, name: str) -> Any:
        fast = self.__dict__.get("_fast")
        if name.startswith("_"):
            raise AttributeError(name)
        if fast is None:
            raise UsageError(
                f"{name!r:.60} is there from the first call of the step on.\n"
                "Where it is needed before, give the arguments: parallelize(step, model, ...)."
            )
        return getattr(fast, name)
