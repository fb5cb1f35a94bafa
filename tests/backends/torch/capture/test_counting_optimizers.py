"""Optimizers that count their steps in Python are followed, number by number."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from pardnn.backends.torch.capture.capture import capture
from pardnn.backends.torch.parallelize import parallelize
from pardnn.errors import UnsupportedError
from testbed.counting_optimizers import OPTIMIZERS, Lookahead, Ranger
from tests.backends.torch.plans import random_plan
from tests.backends.torch.ranks import run_ranks
from tests.backends.torch.stepping import (
    Entry,
    assert_as_eager,
    assert_leaves_as_eager,
    eager,
    on_ranks,
    small,
)


def train(model, optimizer, x, y):
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    return loss


def entry(name: str, taken: int = 0) -> Entry:
    model, x, y = small()
    optimizer = OPTIMIZERS[name](model.parameters())
    for _ in range(taken):
        train(model, optimizer, x, y)
    optimizer.zero_grad()
    return train, (model, optimizer, x, y)


def counts(args: tuple[Any, ...]) -> Any:
    optimizer = args[1]
    steps = [(state.get("step"), [*state]) for state in optimizer.state.values()]
    return steps, [group.get("step") for group in optimizer.param_groups]


@pytest.mark.parametrize("name", ["adabelief", "yogi", "lamb"])
def test_a_fresh_optimizer_counts_on(name: str) -> None:
    assert_as_eager(lambda: entry(name), state=counts)


@pytest.mark.parametrize("taken", [1, 7])
def test_an_optimizer_that_has_taken_steps_goes_on(taken: int) -> None:
    assert_as_eager(
        lambda: entry("rectified_adam", taken), state=counts, steps=4 if taken > 1 else 3
    )


def test_the_number_of_steps_that_decides_is_a_condition() -> None:
    (found,) = on_ranks(lambda: entry("rectified_adam", 1), 1, steps=6)
    assert found.startswith("E509")
    assert "what is compared (testbed/counting_optimizers.py:" in found
    assert "is True, but was False" in found


def lookahead() -> Entry:
    model, x, y = small()
    optimizer = Lookahead(OPTIMIZERS["adabelief"](model.parameters()), k=3)
    return train, (model, optimizer, x, y)


def test_lookahead_counts_beside_its_base() -> None:
    expected = eager(lookahead, steps=2)
    for found in on_ranks(lookahead, 2, steps=2):
        assert found == expected
    (found,) = on_ranks(lookahead, 1, steps=3)
    assert "(optimizer.counter + 1) % " in found


class InTurn(torch.optim.SGD):
    """Decays weights at every second step, counted in the group."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
        self.param_groups[0]["count"] = 0

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"] if group["count"] == 0 else ():
                p.data.mul_(0.5)
            group["count"] += 1
            if group["count"] >= 2:
                group["count"] = 0
        super().step(closure)


@pytest.mark.parametrize("kind", [Ranger, InTurn])
def test_paths_by_a_count_are_followed(kind: Any) -> None:
    def make() -> Entry:
        model, x, y = small()
        return train, (model, kind(model.parameters(), lr=0.1), x, y)

    expected = eager(make, state=counts, steps=6)

    def body(_rank: int, _store: str) -> Any:
        step, args = make()
        decide = lambda graph, size, _: random_plan(graph, size)  # noqa: E731
        fast = parallelize(step, *args, decide=decide, device="cpu")
        return [[fast(*args[2:]).item().hex(), repr(counts(args)), ""] for _ in range(6)]

    (found,) = run_ranks(1, body)
    assert found.value == expected, found.error


def test_captured_state_is_put_back() -> None:
    step, args = entry("yogi", 2)
    before = counts(args)
    capture(step, *args)
    assert counts(args) == before


class Normed(torch.optim.SGD):
    """Leaves norms that it has stacked, as Lamb of pytorch_optimizer does, and never reads them."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        params = self.param_groups[0]["params"]
        for p, norm in zip(params, torch.stack(torch._foreach_norm(params)), strict=True):
            self.state[p]["norm"] = norm
        super().step(closure)


@pytest.mark.parametrize("taken", [0, 1])
def test_norms_that_an_optimizer_leaves_in_its_state(taken: int) -> None:
    def make() -> Any:
        model, x, y = small()
        optimizer = Normed(model.parameters(), lr=0.1)
        for _ in range(taken):
            train(model, optimizer, x, y)
        norms = lambda: [state.get("norm") for state in optimizer.state.values()]  # noqa: E731
        return train, (model, optimizer, x, y), norms

    assert_leaves_as_eager(make)


class Scaled(torch.optim.SGD):
    """Scales its rate by what the step before has found, as AvaGrad does."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.param_groups[0].update(step=0, gamma=None)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        (group,) = self.param_groups
        group["step"] += 1
        rate = group["lr"] if group["step"] == 1 else group["gamma"] * group["lr"]
        for p in group["params"]:
            p.add_(p.grad, alpha=-rate)
        group["gamma"] = 1 / (1 + sum(p.grad.norm().item() for p in group["params"]))


def test_a_number_that_only_the_first_step_makes_is_there_in_the_second() -> None:
    def make() -> Any:
        model, x, y = small()
        optimizer = Scaled(model.parameters())
        return train, (model, optimizer, x, y), [model, optimizer.param_groups]

    assert assert_leaves_as_eager(make) == 2


class Anchored(torch.optim.SGD):
    """Keeps the first values of a parameter, unless all are zeros, as Prodigy does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            if "p0" not in self.state[p]:
                self.state[p]["p0"] = torch.tensor(0.0)
                if p.any():
                    self.state[p]["p0"] = p.detach().clone()
            p.grad += 0.1 * (p - self.state[p]["p0"])
        super().step()


def anchored(taken: int) -> Entry:
    model, x, y = small()
    optimizer = Anchored(model.parameters(), lr=0.1)
    for _ in range(taken):
        train(model, optimizer, x, y)
    optimizer.zero_grad()
    return train, (model, optimizer, x, y)


def test_a_state_that_data_decides_at_the_first_step_is_there_after_one() -> None:
    step, args = anchored(0)
    with pytest.raises(UnsupportedError, match="'optimizer.state.p0'.*\n.*\n.*\n.*one step of"):
        capture(step, *args)
    assert_as_eager(lambda: anchored(1), steps=2, sizes=(1,))
