"""The first step of SGD with dampening, for steps that are traced.

Problem: `torch.optim.SGD` copies the first gradient into its momentum, and then adds dampened
gradients: the first step differs from all others.

Idea: no dampening in the first step, and a momentum that starts from -0.0: then the sum is the
gradient bit by bit. A number next to each momentum says whether the first step is over; it is an
optimizer state, so it is initialised, kept and undone with the momentum. torch ignores it.

Source: the order of operations is that of `torch.optim.sgd`, which is called for each parameter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

#: Key of the optimizer state that is 0.0 before the first step and 1.0 after it.
DAMPENED = "dampened"
Tensors = list[torch.Tensor]


class Dampening:
    """The two replaced functions of `torch.optim.sgd`, and the state that they share."""

    def __init__(self) -> None:
        self._state_of: dict[int, dict[str, Any]] = {}

    def init_group(
        self,
        _tracer: Any,
        real: Callable[..., Any],
        optimizer: torch.optim.SGD,
        group: dict[str, Any],
        params: Tensors,
        *lists: Any,
    ) -> Any:
        """Call `SGD._init_group` and note the state of each parameter.

        Args:
            _tracer: The tracer of the step.
            real: The method itself.
            optimizer: Whose group it is.
            group: Parameters and hyperparameters.
            params: Gets the parameters that have gradients.
            *lists: Get the gradients and momenta.
        """
        found = real(optimizer, group, params, *lists)
        self._state_of = {id(p): optimizer.state[p] for p in params if p in optimizer.state}
        return found

    def update(
        self,
        _tracer: Any,
        real: Callable[..., Any],
        params: Tensors,
        grads: Tensors,
        momenta: list[torch.Tensor | None],
        **settings: Any,
    ) -> None:
        """Update as `torch.optim.sgd.sgd` does, without dampening where a momentum is new.

        Args:
            _tracer: The tracer of the step.
            real: The function itself.
            params: Parameters.
            grads: Their gradients.
            momenta: Their momenta; those that are None are created.
            **settings: Hyperparameters.
        """
        dampening = settings["dampening"]
        # An int zero is not a live number: it stays zero.
        never = isinstance(dampening, int) and dampening == 0
        for param, momentum in zip(params, momenta, strict=False):
            if momentum is None and not never:
                self._state_of[id(param)][DAMPENED] = torch.zeros(())
        flags = [self._state_of.get(id(param), {}).get(DAMPENED) for param in params]
        if all(flag is None for flag in flags):
            real(params, grads, momenta, **settings)
            return
        for i, flag in enumerate(flags):
            mine = momenta[i : i + 1]
            is_dampened = 1.0 if flag is None or mine[0] is None else flag.item()
            changed = {"dampening": dampening * is_dampened}
            real(params[i : i + 1], grads[i : i + 1], mine, **settings | changed)
            momenta[i] = mine[0]
            if flag is not None:
                flag.fill_(1.0)
