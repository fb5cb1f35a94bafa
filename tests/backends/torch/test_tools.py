"""Scripts of other tools on ranks: steps that are spread at their first call, a `Trainer` class."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pardnn
from pardnn import backends
from pardnn.backends.torch.first_call import OnFirstCall
from pardnn.backends.torch.hugging_face import trainer_class
from pardnn.errors import FileError, MismatchError, UsageError
from tests.backends.torch.ranks import connect, run_ranks


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
    with pytest.raises(UsageError, match="argument 0 of the step is not the one of the first call"):
        fast(build()[0], *args[1:])
    with pytest.raises(UsageError, match="argument 2"):
        fast(*args[:2])
    fast.close()


def _named_as_what_it_calls(model: Any, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss


#: As a decorated `step` that calls `optimizer.step()`: the name leads the guards to it.
zero_grad = pardnn.parallelize(_named_as_what_it_calls, costs="v100")


def test_a_decorated_step_may_have_the_name_of_a_method_that_it_calls() -> None:
    args, others = build(), build()
    assert [zero_grad(*args).item() for _ in range(3)] == [step(*others).item() for _ in range(3)]
    assert zero_grad.captures == 1
    zero_grad.close()


def test_what_needs_a_first_call_says_so() -> None:
    with pytest.raises(UsageError, match="'save' exists only after the first call"):
        pardnn.parallelize(step).save("x")  # type: ignore[attr-defined]


def test_what_is_loaded_before_the_first_call_is_there_at_that_call(tmp_path: Path) -> None:
    """With the numbers that a data loader draws in between."""

    def drawn(number: int) -> list[float]:
        found = [torch.rand(()).item() for _ in range(number)]
        return [*found, random.random()]

    first, args = pardnn.parallelize(step, costs="v100"), build()
    first(*args)
    first.save(tmp_path, extra={"epoch": 1})
    expected = [drawn(2), first(*args).item(), drawn(1)]
    first.close()
    again, others = pardnn.parallelize(step, costs="v100"), build()
    torch.manual_seed(5)
    assert again.load(tmp_path) == {"epoch": 1}
    assert [drawn(2), again(*others).item(), drawn(1)] == expected
    assert again.steps == 2
    again.close()


def test_a_step_does_not_train_before_what_was_asked_for_is_loaded(tmp_path: Path) -> None:
    first = pardnn.parallelize(step, costs="v100")
    first(*build())
    first.save(tmp_path)
    first.close()
    other, model = pardnn.parallelize(step, costs="v100"), nn.Linear(5, 2)
    other.load(tmp_path)
    args = model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(3, 5)
    for _ in range(2):
        with pytest.raises(MismatchError, match=r"model\.weight"):
            other(*args)
    other.close()


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


def test_ranks_of_lightning_agree_on_what_rank_0_found() -> None:
    def run(rank: int, store: str) -> Any:
        world = connect(rank, 2, store, 20)
        strategy = pardnn.lightning_strategy(object, None)
        sent = [strategy.broadcast(each) for each in (rank == 0, f"é{rank}", None)]
        world.close()
        return [strategy.is_global_zero, *sent]

    found = [outcome.value for outcome in run_ranks(2, run)]
    assert found == [[True, True, "é0", None], [False, True, "é0", None]]


def test_a_checkpoint_of_lightnings_own_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "epoch=0.ckpt"
    path.write_bytes(b"PK")
    strategy = pardnn.lightning_strategy(object, pardnn.parallelize(step))
    with pytest.raises(FileError, match="E430"):
        strategy.load_checkpoint(path)
