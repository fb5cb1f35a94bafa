"""Steps that many cases share, and a small net for the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Entry = tuple[Callable[..., Any], tuple[Any, ...]]
Factory = Callable[[], Entry]


def loss_step(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Fit `model(x)` to `y`."""
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    return loss


def class_step(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Classify."""
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss


def dict_step(model: Any, optimizer: Any, batch: dict[str, torch.Tensor]) -> Any:
    """Train a model of transformers that returns its loss."""
    optimizer.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    return loss


def mlp(inputs: int = 16, hidden: int = 32, outputs: int = 8) -> nn.Sequential:
    """Return two layers."""
    return nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, outputs))


def small(seed: int = 0) -> tuple[nn.Sequential, torch.Tensor, torch.Tensor]:
    """Return a seeded net with a batch of floats and of floats to fit."""
    torch.manual_seed(seed)
    return mlp(), torch.randn(4, 16), torch.randn(4, 8)


def classes() -> tuple[nn.Sequential, torch.Tensor, torch.Tensor]:
    """Return a seeded net with a batch of floats and of classes."""
    net, x, _ = small()
    return net, x, torch.randint(8, (4,))


def sgd(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    """Return SGD over a model."""
    return torch.optim.SGD(model.parameters(), **{"lr": 0.05} | options)


def adam(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    """Return Adam over a model."""
    return torch.optim.Adam(model.parameters(), **{"lr": 1e-3} | options)
