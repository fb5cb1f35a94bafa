"""Objects that the step changes, under two names, in states that it passes, or made by itself."""

from __future__ import annotations

import copy
import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pardnn.backends.torch.parallelize import parallelize
from pardnn.errors import UnsupportedError
from tests.backends.torch.plans import random_plan
from tests.backends.torch.stepping import assert_leaves_as_eager, weighed

HELD = SimpleNamespace()


def of_attributes() -> Any:
    HELD.one = HELD.two = [1.0]

    def weigh(loss: Any) -> Any:
        HELD.one[0] *= 1.5
        return loss * HELD.two[0]

    return weigh, lambda: setattr(HELD, "two", list(HELD.two))


def of_dictionaries() -> Any:
    HELD.one = HELD.two = {"gain": 1.0}

    def weigh(loss: Any) -> Any:
        HELD.one["gain"] += 1
        return loss * HELD.two["gain"]

    return weigh, lambda: setattr(HELD, "two", dict(HELD.two))


def of_rows() -> Any:
    row = [1.0]
    HELD.rows = [row, row]

    def weigh(loss: Any) -> Any:
        HELD.rows[0][0] += 1
        return loss * HELD.rows[1][0]

    return weigh, lambda: HELD.rows.__setitem__(1, list(HELD.rows[0]))


def of_variables() -> Any:
    one = two = [1.0]

    def split() -> None:
        nonlocal two
        two = list(two)

    def weigh(loss: Any) -> Any:
        one[0] += 1
        return loss * two[0]

    return weigh, split


@pytest.mark.parametrize("of", [of_attributes, of_dictionaries, of_rows, of_variables])
def test_a_name_may_be_given_an_equal_copy_of_what_the_step_changes(of: Any) -> None:
    splits: list[Any] = []

    def make() -> Any:
        weigh, split = of()
        splits.append(split)
        return weighed(weigh, copy.copy(HELD))

    def between(i: int, _args: Any) -> None:
        if i == 2:
            splits[-1]()

    assert_leaves_as_eager(make, 4, between=between)


def test_another_state_of_the_step_may_ask_other_questions() -> None:
    """From "warm" the step leaves "main", from where it does the same until its fourth call."""

    def make() -> Any:
        held = SimpleNamespace(phase="warm", n=0)

        def weigh(loss: Any) -> Any:
            held.n += 1
            if held.phase == "warm" and held.n >= 2:
                held.phase = "main"
            elif held.phase == "main" and held.n >= 4:
                held.phase = "cool"
            return loss * {"warm": 1.0, "main": 2.0, "cool": 0.5}[held.phase]

        return weighed(weigh, held)

    assert_leaves_as_eager(make, 6)


def test_another_state_of_the_step_may_ask_more() -> None:
    """From "warm" the step asks nothing of the number of its call, later it does."""

    def make() -> Any:
        held = SimpleNamespace(phase="warm", n=0)

        def weigh(loss: Any) -> Any:
            held.n += 1
            if held.phase == "main" and held.n >= 4:
                return loss * 2.0
            held.phase = "main"
            return loss * 1.0

        return weighed(weigh, held)

    assert_leaves_as_eager(make, 6)


def test_numbers_in_a_list_that_a_first_step_makes_are_in_that_list_alone() -> None:
    def make() -> Any:
        model, x, log = nn.Linear(3, 2), torch.ones(2, 3), dict[str, Any]()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        nn.init.ones_(model.weight)
        nn.init.zeros_(model.bias)

        def step(model: Any, optimizer: Any, x: torch.Tensor) -> Any:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), torch.zeros(2, 2))
            loss.backward()
            optimizer.step()
            log.setdefault("loss", []).append(loss.item())
            log.setdefault("n", 0)
            log["n"] += 1
            return loss

        return step, (model, optimizer, x), log

    assert_leaves_as_eager(make, 3)


class Scaled(nn.Module):
    """Makes a table at its first use."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.table, self.gain = nn.Linear(3, 2), None, 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.table is None:
            self.table = torch.full((2,), self.gain)
        return self.linear(x) * self.table


GAIN = SimpleNamespace(now=1.0)


@functools.cache
def gains(n: int) -> torch.Tensor:
    return torch.full((n,), GAIN.now)


class Cached(Scaled):
    """Keeps what a cached function has made."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.table is None:
            self.table = gains(2)
        return self.linear(x) * self.table


def trained(model: Any, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss


@pytest.mark.parametrize("kind", [Scaled, Cached])
def test_what_a_step_of_ones_own_has_kept_stays(kind: Any) -> None:
    """As the refusal says: what the tensor is made from may change afterwards."""

    def change(i: int, args: Any) -> None:
        GAIN.now = args[0].gain = 1.0 + i

    def make() -> Any:
        torch.manual_seed(0)
        gains.cache_clear()
        model = kind()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        args = model, optimizer, torch.ones(2, 3)
        GAIN.now = 1.0
        trained(*args)
        return trained, args, [model]

    assert_leaves_as_eager(make, 3, between=change)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_kept_tensor_of_a_number_that_changes_is_refused(momentum: float) -> None:
    model, x = Scaled(), torch.ones(2, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)

    fast = parallelize(
        trained, model, optimizer, x, device="cpu", decide=lambda graph, n, _: random_plan(graph, n)
    )
    fast(x)
    model.gain = 2.0
    with pytest.raises(UnsupportedError, match="'model.table' and keeps it") as caught:
        fast(x)
    assert caught.value.code == "E806"
    fast.close()
