"""A flag in a buffer, by which a step goes one of two ways that no graph holds both of."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pardnn.backends.torch.capture.capture import capture
from pardnn.backends.torch.capture.trace_ir import Call, Value
from pardnn.backends.torch.session.constants import Constants
from pardnn.backends.torch.user_step.sources import WholeTensor
from pardnn.errors import MismatchError, UnsupportedError
from tests.backends.torch.stepping import Entry, assert_as_eager, eager, on_ranks, small


class Noisy(nn.Module):
    """Draws numbers only once it is on, as codebooks begin by clusters of their first batch."""

    is_on: torch.Tensor

    def __init__(self, *, is_on: bool, writes: bool = False) -> None:
        super().__init__()
        self.register_buffer("is_on", torch.tensor([is_on]))
        self.writes = writes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_on:
            return x
        if self.writes:
            self.is_on.data.copy_(torch.tensor([False]))
        return x + torch.randn_like(x)


def made(**how: bool) -> Entry:
    model, x, y = small()
    model.append(Noisy(**how))

    def step(model, optimizer, x, y):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return step, (model, torch.optim.SGD(model.parameters(), lr=0.1), x, y)


@pytest.mark.parametrize("is_on", [False, True])
def test_a_flag_that_the_step_does_not_write_decides(is_on: bool) -> None:
    assert_as_eager(lambda: made(is_on=is_on))


def test_a_flag_that_the_step_writes_does_not() -> None:
    step, args = made(is_on=True, writes=True)
    with pytest.raises(UnsupportedError, match=r"draws random numbers(.|\n)*one step of") as caught:
        capture(step, *args)
    assert caught.value.code == "E802"
    assert args[0][-1].is_on.item()
    step(*args)
    capture(step, *args)


@pytest.mark.parametrize("size", [1, 2])
def test_a_flag_that_changes_between_two_calls(size: int) -> None:
    """One rank captures the other way; of several, only one has traced the step."""
    models: list[Any] = []

    def make() -> Entry:
        torch.manual_seed(0)
        step, args = made(is_on=False)
        models.append(args[0])
        torch.manual_seed(1)
        return step, args

    def turned_on(i: int) -> dict[int, Any]:
        models[-1][-1].is_on.fill_(i == 2)
        return {}

    found = on_ranks(make, size, turned_on, steps=4, is_followed=True)
    if size == 1:
        assert found == [eager(make, turned_on, steps=4)]
    else:
        assert all(isinstance(each, str) and each.startswith("E509") for each in found)


def test_a_flag_that_another_rank_holds_is_none() -> None:
    """What a rank keeps for all is no constant of a later step, nor is it one any longer."""
    tensor = torch.tensor([0])
    call = Call("constant")
    value = Value(call, None)
    held = WholeTensor((1,), (1,), -1)
    assert not [*Constants([(tensor, value)], is_alone=False).changes()]
    with pytest.raises(MismatchError, match="was written since capture"):
        next(Constants([(tensor, value)], is_alone=False, whole_of=lambda _: held).changes())
