"""Ranks that run mixed plans, cut inside of submeshes and placed on them, train as one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.backends.torch import models
from tests.backends.torch.executors import perceptron
from tests.backends.torch.runtime.test_microbatched_ranks import assert_trained, double
from tests.long_cases import long_but


def towers() -> models.Entry:
    """Return pairs of products, which Megatron cuts by columns and rows, with dropout between."""
    torch.manual_seed(0)
    pairs = [nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(4)]
    model = nn.Sequential(*pairs[:2], nn.Dropout(0.1), *pairs[2:])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return models.classify_step, (model, optimizer, torch.randn(6, 16), torch.randint(16, (6,)))


CASES: list[Any] = [
    (double(towers), 4, 2, "megatron*1f1b"),
    (double(towers), 4, 2, "zero-1*1f1b"),
    (double(perceptron), 4, 3, "tofu*round-robin"),
    (double(models.gan), 4, 2, "tofu*pardnn"),
    *long_but(
        (),
        [
            (double(models.MODELS["resnet"]), 4, 1, "tofu*pardnn"),
            (double(models.MODELS["lstm"]), 4, 2, "tofu*pardnn"),
        ],
    ),
]


@pytest.mark.parametrize(("factory", "size", "pieces", "algorithm"), CASES)
def test_mixed_plans_train_as_one_device(
    factory: Callable[[], models.Entry], size: int, pieces: int, algorithm: str
) -> None:
    assert_trained(factory, size, pieces, algorithm)
