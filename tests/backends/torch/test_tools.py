"""Scripts of other tools on ranks: steps that are spread at their first call, a `Trainer` class."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import nn

import pardnn
from pardnn import backends
from pardnn.backends.torch.first_call import OnFirstCall
from pardnn.backends.torch.hugging_face import trainer_class
from pardnn.errors import UsageError


def step(model: Any, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss


def build() -> tuple[nn.Module, torch.optim.Optimizer, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(3, 4)


def test_a_decorated_step_is_called_as_before_and_keeps_its_losses() -> None:
    fast = pardnn.parallelize(step, costs="v100")
    args, others = build(), build()
    assert [fast(*args).item() for _ in range(3)] == [step(*others).item() for _ in range(3)]
    assert (fast.steps, fast.captures, fast.__name__) == (3, 1, "step")
    with pytest.raises(UsageError, match="argument 0 of the step is not that of the first call"):
        fast(build()[0], *args[1:])
    with pytest.raises(UsageError, match="argument 2"):
        fast(*args[:2])
    fast.close()


def test_what_needs_a_first_call_says_so() -> None:
    with pytest.raises(UsageError, match="'save' is there from the first call"):
        pardnn.parallelize(step).save("x")  # type: ignore[attr-defined]


def test_a_step_without_arguments_is_spread_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "parallelize", lambda *_, **__: "spread", raising=False)
    assert pardnn.parallelize(lambda: torch.zeros(())) == "spread"
    assert isinstance(pardnn.parallelize(step), OnFirstCall)


def test_tools_see_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 3)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.setenv(name, "3")
    assert pardnn.connect() == 3
    assert not {"RANK", "WORLD_SIZE", "LOCAL_RANK"} & os.environ.keys()


def test_a_trainer_with_an_update_of_its_own_is_refused() -> None:
    class Own:
        def training_step(self) -> None: ...

        compute_loss = training_step

    Own.__module__ = "transformers.trainer"
    trainer_class(Own, pardnn.parallelize, {})

    class Mine(Own):
        def compute_loss(self) -> None: ...

    with pytest.raises(UsageError, match="Mine has compute_loss of its own"):
        trainer_class(Mine, pardnn.parallelize, {})
