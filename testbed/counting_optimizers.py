"""Optimizers that count their steps in Python, as third-party packages write them, in short form.

Sources: AdaBelief (Zhuang et al., NeurIPS 2020), Yogi (Zaheer et al., NeurIPS 2018), LAMB (You
et al., ICLR 2020), RAdam (Liu et al., ICLR 2020), Lookahead (Zhang et al., NeurIPS 2019), in the
way of `adabelief-pytorch`, `torch_optimizer` and `timm`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.optim import Optimizer


class _Counting(Optimizer):
    """State by parameter with "step", "exp_avg" and "exp_avg_sq"."""

    #: First value of both averages.
    start = 0.0

    def __init__(self, params: Any, lr: float = 1e-2, **more: Any) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "eps": 1e-8} | more)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Take one step."""
        for group in self.param_groups:
            self.count(group)
            for p in group["params"]:
                state = self.state[p]
                if len(state) == 0:
                    state["step"] = 0
                    state["exp_avg"] = torch.full_like(p, self.start)
                    state["exp_avg_sq"] = torch.full_like(p, self.start)
                state["step"] += 1
                self.update(p, p.grad, state, group, *group["betas"])

    def count(self, group: dict[str, Any]) -> None:
        """Count in the group."""

    def update(self, p: Any, grad: Any, state: Any, group: Any, beta1: float, beta2: float) -> None:
        """Update one parameter.

        Args:
            p: The parameter.
            grad: Its gradient.
            state: Of the parameter.
            group: Its hyperparameters.
            beta1: Decay of the average of gradients.
            beta2: Decay of that of their squares.
        """
        raise NotImplementedError


class AdaBelief(_Counting):
    """Divides by the deviation of the gradient from its average."""

    def update(self, p: Any, grad: Any, state: Any, group: Any, beta1: float, beta2: float) -> None:
        """Update one parameter."""
        mean, var = state["exp_avg"], state["exp_avg_sq"]
        correction1 = 1 - beta1 ** state["step"]
        correction2 = 1 - beta2 ** state["step"]
        mean.mul_(beta1).add_(grad, alpha=1 - beta1)
        residual = grad - mean
        var.mul_(beta2).addcmul_(residual, residual, value=1 - beta2)
        denominator = (var.add_(group["eps"]).sqrt() / math.sqrt(correction2)).add_(group["eps"])
        p.addcdiv_(mean, denominator, value=-group["lr"] / correction1)


class Yogi(_Counting):
    """Changes the second moment by sign."""

    start = 1e-6

    def update(self, p: Any, grad: Any, state: Any, group: Any, beta1: float, beta2: float) -> None:
        """Update one parameter."""
        mean, square = state["exp_avg"], state["exp_avg_sq"]
        correction1 = 1 - beta1 ** state["step"]
        correction2 = 1 - beta2 ** state["step"]
        mean.mul_(beta1).add_(grad, alpha=1 - beta1)
        squared = grad.mul(grad)
        square.addcmul_(torch.sign(square - squared), squared, value=-(1 - beta2))
        denominator = (square.sqrt() / math.sqrt(correction2)).add_(group["eps"])
        p.addcdiv_(mean, denominator, value=-group["lr"] / correction1)


class Lamb(_Counting):
    """Scales each layer's step by the ratio of two norms; counts in the group."""

    def count(self, group: dict[str, Any]) -> None:
        """Count in the group, which has no number before the first step."""
        if "step" in group:
            group["step"] += 1
        else:
            group["step"] = 1

    def update(self, p: Any, grad: Any, state: Any, group: Any, beta1: float, beta2: float) -> None:
        """Update one parameter."""
        mean, square = state["exp_avg"], state["exp_avg_sq"]
        mean.lerp_(grad, 1 - beta1)
        square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        denominator = (square.sqrt() / math.sqrt(1 - beta2 ** group["step"])).add_(group["eps"])
        update = (mean / (1 - beta1 ** group["step"])).div_(denominator)
        weight_norm, update_norm = p.norm(2.0), update.norm(2.0)
        one = torch.ones_like(weight_norm)
        ratio = torch.where(update_norm > 0, weight_norm / update_norm, one)
        trust = torch.where(weight_norm > 0, ratio, one)
        p.add_(update, alpha=-group["lr"] * trust)  # reads a number


class RectifiedAdam(_Counting):
    """Takes plain momentum as long as the second moment has too few samples."""

    def update(self, p: Any, grad: Any, state: Any, group: Any, beta1: float, beta2: float) -> None:
        """Update one parameter."""
        mean, square = state["exp_avg"], state["exp_avg_sq"]
        mean.mul_(beta1).add_(grad, alpha=1 - beta1)
        square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        step = state["step"]
        longest = 2 / (1 - beta2) - 1
        length = longest - 2 * step * beta2**step / (1 - beta2**step)
        if length >= 5:
            rect = math.sqrt(
                (1 - beta2**step) * (length - 4) / (longest - 4) * (length - 2) / length
                * longest / (longest - 2)
            )  # fmt: skip
            denominator = square.sqrt().add_(group["eps"])
            p.addcdiv_(mean, denominator, value=-rect * group["lr"] / (1 - beta1**step))
        else:
            p.add_(mean, alpha=-group["lr"] / (1 - beta1**step))


class Ranger(_Counting):
    """Keeps what it computed of the step's number, for the other parameters, and looks ahead."""

    def __init__(self, params: Any, k: int = 3, **more: Any) -> None:
        super().__init__(params, **more)
        self.k, self.buffer = k, [[None, None] for _ in range(2)]

    def update(self, p: Any, grad: Any, state: Any, group: Any, beta1: float, beta2: float) -> None:
        """Update one parameter."""
        if "slow" not in state:
            state["slow"] = torch.empty_like(p)
            state["slow"].copy_(p)
        mean, square = state["exp_avg"], state["exp_avg_sq"]
        mean.mul_(beta1).add_(grad, alpha=1 - beta1)
        square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        kept: list[Any] = self.buffer[int(state["step"] % 2)]
        if state["step"] == kept[0]:
            rate = kept[1]
        else:
            kept[0] = state["step"]
            rate = math.sqrt(1 - beta2 ** state["step"]) / (1 - beta1 ** state["step"])
            kept[1] = rate
        p.addcdiv_(mean, square.sqrt().add_(group["eps"]), value=-rate * group["lr"])
        if state["step"] % self.k == 0:
            state["slow"].add_(p - state["slow"], alpha=0.5)
            p.copy_(state["slow"])


class Lookahead(Optimizer):
    """Draws slow weights towards the fast ones of another optimizer at every k-th step."""

    def __init__(self, base: Optimizer, k: int = 2, alpha: float = 0.5) -> None:
        self.base, self.k, self.alpha, self.counter = base, k, alpha, 0
        super().__init__(base.param_groups, {})
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["slow"] = p.detach().clone()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Take one step."""
        self.base.step()
        self.counter += 1
        if self.counter % self.k == 0:
            for group in self.param_groups:
                for p in group["params"]:
                    slow = self.state[p]["slow"]
                    slow.add_(p - slow, alpha=self.alpha)
                    p.copy_(slow)


OPTIMIZERS: dict[str, type[_Counting]] = {
    "adabelief": AdaBelief, "yogi": Yogi, "lamb": Lamb, "rectified_adam": RectifiedAdam,
}  # fmt: skip
