"""Ways of torch's own to write a step: optimizers in hooks, solvers, queues, transforms."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.backends.torch import models
from tests.backends.torch.beside_eager import assert_equal
from tests.backends.torch.models import small


def optimizer_in_backward() -> models.Entry:
    """As torch's tutorial has it: a gradient is used and dropped as soon as it is there."""
    _, (model, _, x, y) = small()
    optimizers = {p: torch.optim.Adam([p], lr=0.01) for p in model.parameters()}

    def update(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)

    def step(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        return loss

    return step, (model, x, y)


def test_an_optimizer_per_parameter_in_the_backward_pass() -> None:
    graph = assert_equal(optimizer_in_backward)
    assert any(op.name == "optimizers.model.0.weight.state.model.0.weight.exp_avg"
               for op in graph.ops)  # fmt: skip
