"""Evaluation: a forward-only function of a step's models, on the state where the step keeps it.

It is captured and planned like a step, once per shape, but need not train or return a loss. Its
graph shares parameters and buffers with the step's; everything else on the devices, above all
optimizer states, counts against their memory.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from pardnn.backends.torch.runtime.executor import History
from pardnn.backends.torch.session.live_state import LiveState
from pardnn.backends.torch.session.new_variant import Decide, Maker
from pardnn.backends.torch.session.variants import Variants
from pardnn.backends.torch.user_step.sources import batch_indices


class Evaluation:
    """One function on the state of a step.

    Args:
        function: The user's function.
        state: What the ranks hold.
        decide: Plans a graph for a number of devices, with the state where it is.
    """

    def __init__(
        self, function: Callable[..., Any], state: LiveState, decide: Decide | None
    ) -> None:
        self._history = History([], [], "evaluation")
        self._state = state
        self._make = Maker(
            state, _without_gradients(function), self._history, None, decide, trains=False
        )
        self._variants: Variants | None = None

    def __call__(self, args: Sequence[Any]) -> Any:
        """Run the function with its arguments, including models, and return its result."""
        with in_eval_mode(arg for arg in args if isinstance(arg, torch.nn.Module)):
            if self._variants is None:
                first = self._make(self._state.next_number(), args, ())
                self._variants = Variants(self._state, self._history, self._make, first)
            variant = self._variants.step([args[i] for i in batch_indices(args)])
            return variant.finished()


def _without_gradients(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def evaluation(*args: Any) -> Any:
        with torch.no_grad():
            return function(*args)

    return evaluation


@contextlib.contextmanager
def in_eval_mode(models: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Put models into eval mode, and restore the mode of each of their modules afterwards."""
    modules = [module for model in models for module in model.modules()]
    before = [module.training for module in modules]
    for module in modules:
        module.training = False
    try:
        yield
    finally:
        for module, training in zip(modules, before, strict=True):
            module.training = training
