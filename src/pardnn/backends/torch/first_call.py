"""A step that is parallelized at its first call, with that call's arguments."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from pardnn.backends.torch.checkpoint.python_values import decode
from pardnn.backends.torch.checkpoint.random_state import random_state, set_random_state
from pardnn.backends.torch.devices import this_device
from pardnn.backends.torch.parallelize import Parallel
from pardnn.backends.torch.user_step.sources import batch_indices
from pardnn.checkpoint.directory import read_manifest, resolve
from pardnn.errors import MismatchError, UsageError


class OnFirstCall:
    """The step on this rank; call it with all of its arguments, including models and optimizers.

    `save`, `evaluate` and everything else of `Parallel`, except `load`, exist after the first call.

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
        self._to_load: tuple[str | Path, int] | None = None

    def load(self, path: str | Path, step: int | None = None) -> Any:
        """Read a checkpoint; see `Parallel.load`.

        Before the first call, only `extra` and the random state are read, so that a data loader
        draws what it would have drawn; everything else is read at that call.

        Args:
            path: As given to `save`.
            step: Number of trained steps; None takes the latest.

        Raises:
            FileError: As `Parallel.load`.
        """
        if self._fast is not None:
            return self._fast.load(path, step)
        manifest = read_manifest(resolve(Path(path), step))
        set_random_state(manifest.random, torch.device(this_device()))
        self._to_load = (path, manifest.step)
        return decode(manifest.extra)

    def _load(self, path: str | Path, step: int) -> None:
        """Read what `load` was asked for, and keep the current random state."""
        device = torch.device(this_device())
        drawn = random_state(device)
        self._fast.load(path, step)
        set_random_state(drawn, device)
        if self._fast.steps != step:
            raise MismatchError(
                f"rank {self._fast.rank} found step {step} as the latest in {str(path)!r:.200}, "
                f"and rank 0 step {self._fast.steps}.\nName the step, or let no other run save "
                "there.",
                code="E521",
            )
        self._to_load = None

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
                f"argument {others[0] if others else len(args)} of the step is not the one of the "
                "first call. A step keeps its models and optimizers; call parallelize for each set."
            )
        if self._to_load is not None:
            self._load(*self._to_load)
        return self._fast(*(arg for i, arg in enumerate(args) if i not in self._kept))

    def __getattr__(self, name: str) -> Any:
        fast = self.__dict__.get("_fast")
        # Probes such as `hasattr(step, "func")` get False.
        if name.startswith("_") or not hasattr(Parallel, name):
            raise AttributeError(name)
        if fast is None:
            raise UsageError(
                f"{name!r:.60} exists only after the first call of the step.\nIf you need it "
                "before, pass the arguments: parallelize(step, model, ...)."
            )
        return getattr(fast, name)
