"""A step that drops an optimizer's state, or puts another in its place, trains as eager does."""

import itertools
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from pardnn.backends.torch.capture.capture import capture
from pardnn.errors import UnsupportedError
from tests.backends.torch.stepping import Entry, assert_as_eager, assert_leaves_as_eager, small
from tests.long_cases import long_but

Drop = Callable[[torch.optim.Optimizer], Any]


class Counting(torch.optim.Optimizer):
    """Counts its steps in Python, as optimizers of many packages do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                state.update(average=torch.zeros_like(p), step=0)
            state["step"] += 1
            state["average"].mul_(0.9).add_(p.grad, alpha=0.1)
            p.sub_(state["average"] / (1 - 0.9 ** state["step"]), alpha=0.1)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.05)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def clear(optimizer: torch.optim.Optimizer) -> None:
    optimizer.state.clear()


def forget_one(optimizer: torch.optim.Optimizer) -> None:
    optimizer.state.pop(optimizer.param_groups[0]["params"][0], None)


def put_others(optimizer: torch.optim.Optimizer) -> None:
    optimizer.state = defaultdict(dict)


def empty_each(optimizer: torch.optim.Optimizer) -> None:
    for parameter in optimizer.param_groups[0]["params"]:
        optimizer.state[parameter] = {}


def dropping(make_optimizer: Callable[[Any], torch.optim.Optimizer], drop: Drop) -> Entry:
    model, x, y = small()

    def step(model, optimizer, x, y, is_time):
        if is_time:
            drop(optimizer)
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return step, (model, make_optimizer(model.parameters()), x, y, False)


WAYS = [clear, forget_one, put_others, empty_each]
QUICK = [(adam, clear), (adam, put_others), (momentum, empty_each), (Counting, forget_one)]


@pytest.mark.parametrize(
    ("make_optimizer", "drop"),
    long_but(QUICK, itertools.product([adam, momentum, Counting], WAYS)),
)
def test_dropped_state_begins_anew(
    make_optimizer: Callable[[Any], torch.optim.Optimizer], drop: Drop
) -> None:
    def make() -> Any:
        step, args = dropping(make_optimizer, drop)
        return step, args, args[:2]

    assert_leaves_as_eager(make, steps=6, given=lambda i: {4: i in (2, 5)})


def test_ranks_drop_state_alike() -> None:
    assert_as_eager(
        lambda: dropping(adam, clear), lambda i: {4: i in (2, 3)}, is_followed=True, steps=5
    )


def test_state_that_is_gone_after_the_step_is_refused() -> None:
    step, args = dropping(momentum, clear)
    step(*args)

    def dropping_last(model, optimizer, *batch):
        loss = step(model, optimizer, *batch)
        optimizer.state.clear()
        return loss

    with pytest.raises(UnsupportedError, match="removes 'optimizer.state") as caught:
        capture(dropping_last, *args)
    assert caught.value.code == "E804"
    assert args[1].state
