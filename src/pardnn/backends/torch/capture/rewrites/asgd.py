"""ASGD's update without its branches, for steps that are traced.

Problem: `torch.optim.ASGD` copies the parameter while it does not average yet (`mu == 1`), takes
Python's `max` of step counts, and starts its rate `eta` from the rate of the group, which may
change before the first step.

Idea: compute both and select. In the step that creates the state, `eta` is read from the group.

Source: Polyak and Juditsky, Acceleration of stochastic approximation by averaging, 1992. The order
of operations is that of `torch.optim.asgd`, so that results are equal bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from pardnn.backends.torch.ops.host_scalars import choose

Tensors = list[torch.Tensor]


def single_tensor(
    _tracer: Any, real: Callable[..., None], *lists: Tensors, **settings: Any
) -> None:
    """Update as `torch.optim.asgd._single_tensor_asgd` does.

    Args:
        _tracer: The tracer of the step.
        real: The function itself, which is called where it has no branch.
        *lists: Parameters, gradients, averages, their weights `mu`, rates `eta`, step counts.
        **settings: Hyperparameters.
    """
    if settings["capturable"] or isinstance(settings["lr"], torch.Tensor):
        return real(*lists, **settings)
    lr = settings["lr"]
    for param, grad, average, mu, eta, _count, step in _counted(lists, settings):
        rate = choose(step == 1, lr, eta.item())
        param.mul_(1 - settings["lambd"] * rate)
        param.add_(grad, alpha=-rate)
        averaged = average + param.sub(average).mul_(mu)
        average.copy_(torch.where(mu != 1, averaged, param))
        _set_rates(mu, eta, step, lr, settings)
    return None


def multi_tensor(_tracer: Any, real: Callable[..., None], *lists: Tensors, **settings: Any) -> None:
    """Update as `_multi_tensor_asgd` does, in its own order of operations.

    Args:
        _tracer: The tracer of the step.
        real: The function itself, which is called where it has no branch.
        *lists: Parameters, gradients, averages, their weights `mu`, rates `eta`, step counts.
        **settings: Hyperparameters.
    """
    if settings["capturable"] or isinstance(settings["lr"], torch.Tensor):
        return real(*lists, **settings)
    lr = settings["lr"]
    for param, grad, average, mu, eta, count, step in _counted(lists, settings):
        first = torch.full_like(eta, lr)
        is_first = torch.full_like(eta, choose(step == 1, 1.0, 0.0))
        rate = torch.where(is_first != 0, first, eta)
        param.addcmul_(torch.add(grad, param, alpha=settings["lambd"]), rate, value=-1)
        average.addcmul_(param - average, mu)
        _set_rates(mu, eta, step, lr, settings, count)
    return None


def _counted(lists: tuple[Tensors, ...], settings: dict[str, Any]) -> Iterator[tuple[Any, ...]]:
    """Yield the tensors of each parameter, its gradient with the weight decay, and its step."""
    decay = settings["weight_decay"]
    for each in zip(*lists, strict=True):
        param, grad, average, mu, eta, count = _as_real(each, settings)
        count += 1
        step = count.item()
        if decay != 0:
            grad = grad.add(param, alpha=decay)
        yield param, grad, average, mu, eta, count, step


def _as_real(tensors: tuple[torch.Tensor, ...], settings: dict[str, Any]) -> Tensors:
    param, grad, average, *rest = tensors
    grad = -grad if settings["maximize"] else grad
    made = [param, grad, average]
    made = [torch.view_as_real(t) for t in made] if param.is_complex() else made
    return [*made, *rest]


def _set_rates(
    mu: torch.Tensor,
    eta: torch.Tensor,
    step: Any,
    lr: Any,
    settings: dict[str, Any],
    count: torch.Tensor | None = None,
) -> None:
    """Set the weight and the rate of the next step.

    Args:
        mu: The weight.
        eta: The rate.
        step: Number of this step.
        lr: Rate of the group.
        settings: Hyperparameters.
        count: `step` as a tensor where the rate is computed from tensors; None for numbers.
    """
    divisor = 1 + settings["lambd"] * lr * (step if count is None else count)
    rate = lr / divisor ** settings["alpha"]
    eta.copy_(rate if isinstance(rate, torch.Tensor) else torch.full((), rate))
    since = step - settings["t0"]
    mu.copy_(torch.full((), 1 / choose(since > 1, since, 1.0)))
