"""RAdam's update without its branch, for steps that are traced.

Problem: `torch.optim.RAdam` rectifies its rate only once the step count has made the variance
tractable (`rho_t > 5`, from the sixth step on with the usual `beta2`), and one graph must serve
every step.

Idea: compute both updates and select one. If a host number is defined on one side only (a square
root whose operand is negative on the other), its operand on the other side is 1.0.

Source: Liu et al., On the Variance of the Adaptive Learning Rate and Beyond, ICLR 2020, Alg. 2. The
order of operations is that of `torch.optim.radam`, so that results are equal bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from pardnn.backends.torch.ops.host_scalars import choose

_TRACTABLE = 5.0
Tensors = list[torch.Tensor]


def single_tensor(
    _tracer: Any, real: Callable[..., None], *lists: Tensors, **settings: Any
) -> None:
    """Update as `torch.optim.radam._single_tensor_radam` does.

    Args:
        _tracer: The tracer of the step.
        real: The function itself, which is called where it has no branch.
        *lists: Parameters, gradients, both averages, step counts.
        **settings: Hyperparameters.
    """
    if settings["capturable"] or settings["differentiable"]:
        return real(*lists, **settings)
    beta1, beta2, lr = settings["beta1"], settings["beta2"], _number(settings["lr"])
    for param, mean, square, step in _averaged(lists, lr, settings):
        correction2 = 1 - beta2**step
        update = mean / (1 - beta1**step) * lr
        is_rectified, rect, _ = _rectification(beta2, step)
        adaptive = (correction2**0.5) / square.sqrt().add_(settings["eps"])
        # As a number of 0 or 1: a bool on the host cannot become a tensor.
        is_adaptive = torch.full((), choose(is_rectified, 1.0, 0.0), device=param.device)
        param.add_(torch.where(is_adaptive != 0, update * adaptive * rect, update), alpha=-1.0)
    return None


def multi_tensor(_tracer: Any, real: Callable[..., None], *lists: Tensors, **settings: Any) -> None:
    """Update as `_multi_tensor_radam` does, which has another order of operations.

    Args:
        _tracer: The tracer of the step.
        real: The function itself, which is called where it has no branch.
        *lists: Parameters, gradients, both averages, step counts.
        **settings: Hyperparameters.
    """
    if settings["capturable"] or settings["differentiable"]:
        return real(*lists, **settings)
    beta1, beta2, lr = settings["beta1"], settings["beta2"], _number(settings["lr"])
    for param, mean, square, step in _averaged(lists, lr, settings):
        is_rectified, rect, plain = _rectification(beta2, step)
        rect = choose(is_rectified, rect, 0.0)
        correction1 = 1 - beta1**step
        plain_size = (lr * plain / correction1) * -1
        size = ((1 - beta2**step) ** 0.5) * (lr * rect / correction1) * -1
        buffer = square.sqrt().add_(settings["eps"]).div_(size).reciprocal_().add_(plain_size)
        param.addcmul_(mean, buffer)
    return None


def _number(rate: Any) -> Any:
    return rate.item() if isinstance(rate, torch.Tensor) else rate


def _averaged(
    lists: tuple[Tensors, ...], lr: Any, settings: dict[str, Any]
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor, Any]]:
    """Update both averages by the gradient; yield parameter, averages and number of steps."""
    beta1, beta2 = settings["beta1"], settings["beta2"]
    for each in zip(*lists, strict=True):
        param, grad, mean, square, count = _as_real(each, settings)
        count += 1
        step = count.item()
        grad = _decayed(param, grad, lr, settings)
        mean.lerp_(grad, 1 - beta1)
        square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        yield param, mean, square, step


def _as_real(tensors: tuple[torch.Tensor, ...], settings: dict[str, Any]) -> Tensors:
    param, grad, mean, square, count = tensors
    grad = -grad if settings["maximize"] else grad
    made = [param, grad, mean, square]
    made = [torch.view_as_real(t) for t in made] if param.is_complex() else made
    return [*made, count]


def _decayed(
    param: torch.Tensor, grad: torch.Tensor, lr: Any, settings: dict[str, Any]
) -> torch.Tensor:
    decay = settings["weight_decay"]
    if decay == 0:
        return grad
    if not settings["decoupled_weight_decay"]:
        return grad.add(param, alpha=decay)
    param.mul_(1 - lr * decay)
    return grad


def _rectification(beta2: Any, step: Any) -> tuple[Any, Any, Any]:
    """Return whether to rectify, the factor (1.0 where not), and 0.0 if rectified, else 1.0."""
    longest = 2 / (1 - beta2) - 1
    length = longest - 2 * step * (beta2**step) / (1 - beta2**step)
    is_rectified = length > _TRACTABLE
    above = (length - 4) * (length - 2) * longest
    below = choose(is_rectified, (longest - 4) * (longest - 2) * length, 1.0)
    rect = choose(is_rectified, above / below, 1.0) ** 0.5
    return is_rectified, rect, choose(is_rectified, 0.0, 1.0)
