"""Idioms of layers and optimizers: flags in buffers, kept random states, hooks with heads."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from bench.sweep.steps import Entry, Factory, adam, loss_step, small


class Codebook(nn.Module):
    """Moves each row to its nearest code; codes begin at random rows of the first batch."""

    ready: torch.Tensor
    codes: torch.Tensor

    def __init__(self, *, is_ready: bool) -> None:
        super().__init__()
        self.register_buffer("ready", torch.tensor([is_ready]))
        self.register_buffer("codes", torch.randn(6, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the codes, with the gradients of the rows."""
        if not self.ready:
            self.codes.copy_(x.detach()[torch.randint(len(x), (6,))])
            self.ready.fill_(True)
        ids = torch.cdist(x.detach(), self.codes).argmin(-1)
        near = self.codes[ids]
        if self.training:
            self.codes.index_add_(0, ids, 0.1 * (x.detach() - near))
        return x + (near - x).detach()


def _codebook(*, is_ready: bool) -> Factory:
    def factory() -> Entry:
        model, x, y = small()
        model.append(Codebook(is_ready=is_ready))
        return loss_step, (model, adam(model), x, y)

    return factory


class Recomputed(torch.autograd.Function):
    """Keeps no activation: the backward pass computes the block again, with the same dropout."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, block: Any) -> torch.Tensor:
        """Run the block and note the random state before it."""
        block.state, ctx.x, ctx.block = torch.get_rng_state(), x.detach(), block
        with torch.no_grad():
            return block.layers(ctx.x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Run it again from that state."""
        with torch.enable_grad(), torch.random.fork_rng(devices=[]):
            x = ctx.x.requires_grad_()
            torch.set_rng_state(ctx.block.state)
            ctx.block.layers(x).backward(grads[0])
        return x.grad, None


class Reversible(nn.Module):
    """A block that is computed twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.state = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3)), None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the layers make of a batch."""
        return Recomputed.apply(x, self)  # pyright: ignore[reportReturnType]


def reversible() -> Entry:
    model, x, y = small()
    model.append(Reversible())
    return loss_step, (model, adam(model), x, y)


class Projected:
    """A hook with a head of its own, as BYOL puts on a hidden layer."""

    def __init__(self) -> None:
        self.head = nn.Linear(32, 32)

    def __call__(self, _module: Any, _given: Any, found: torch.Tensor) -> torch.Tensor:
        """Return what the head makes of the layer's result."""
        return self.head(found)


def hook_with_a_head() -> Entry:
    model, x, y = small()
    model[1].register_forward_hook(hook := Projected())
    return loss_step, (model, torch.optim.SGD([*model.parameters(), *hook.head.parameters()]), x, y)


class Counting(torch.optim.SGD):
    """Counts for all parameters together, as MADGRAD does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update with a rate that grows."""
        state: Any = self.state
        if "k" not in state:
            state["k"] = torch.tensor([0])
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad, alpha=0.05 * math.pow(state["k"] + 1, 0.5))
        state["k"] += 1


def counting() -> Entry:
    model, x, y = small()
    return loss_step, (model, Counting(model.parameters()), x, y)


CASES: dict[str, Factory] = {
    "codebook": _codebook(is_ready=True),
    "codebook_at_first_use": _codebook(is_ready=False),
    "reversible": reversible,
    "hook_with_a_head": hook_with_a_head,
    "counting": counting,
}
