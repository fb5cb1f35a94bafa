"""Orders that a step may go by: of optimizer state, of its groups, of a batch that is a dict."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pardnn.backends.torch.user_step.guards.guards import Guards
from pardnn.backends.torch.user_step.guards.parameter import tensors_of_groups
from tests.backends.torch.plans import random_plan
from tests.backends.torch.stepping import Entry, assert_leaves_as_eager, parallelize


def made() -> Entry:
    """A step whose loss weighs the optimizer's state by where it comes."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(3)))
    groups = [{"params": list(half.parameters())} for half in (model[:1], model[1:])]
    optimizer = torch.optim.Adam(groups, lr=0.01)

    def step(model: Any, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        for i, state in enumerate(optimizer.state.values()):
            loss = loss + sum((i + k) * value.sum() for k, value in enumerate(state.values()))
        loss.backward()
        for i, group in enumerate(optimizer.param_groups):
            for k, parameter in enumerate(group["params"]):
                parameter.grad.mul_(1 + i + k)
        optimizer.step()
        return loss

    return step, (model, optimizer, torch.randn(4, 3))


def test_state_is_in_the_order_in_which_eager_steps_create_it() -> None:
    step, args = made()
    step(*args)
    expected = [list(map(id, args[0].parameters())).index(id(key)) for key in args[1].state]
    step, args = made()
    fast = parallelize(step, *args, device="cpu", decide=lambda graph, n, _: random_plan(graph, n))
    fast(args[2])
    fast.close()
    parameters = list(map(id, args[0].parameters()))
    assert [parameters.index(id(key)) for key in args[1].state] == expected
    assert {tuple(state) for state in args[1].state.values()} == {("step", "exp_avg", "exp_avg_sq")}


def last(items: dict[Any, Any]) -> None:
    """Move the first key to the end."""
    key = next(iter(items))
    items[key] = items.pop(key)


MOVES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "the order of optimizer.state": lambda o: last(o.state),
    "optimizer.param_groups.0": lambda o: o.param_groups.reverse(),
    "optimizer.param_groups.0.params.0": lambda o: o.param_groups[0]["params"].reverse(),
    "the order of optimizer.param_groups.0": lambda o: last(o.param_groups[0]),
}


@pytest.mark.parametrize("name", MOVES)
def test_another_order_is_noticed(name: str) -> None:
    step, args = made()
    step(*args)
    guards = Guards(step, args, (2,))
    assert guards.changes({}) == []
    MOVES[name](args[1])
    for _ in range(2):  # it is not taken for known
        assert guards.changes({})[0].name == name


def test_new_state_is_no_other_order() -> None:
    step, args = made()
    step(*args)
    states = list(args[1].state.values())
    guards = Guards(step, args, (2,))
    states[0]["note"] = 1
    assert guards.changes({}) == []
    last(states[0])
    assert [change.name for change in guards.changes({})] == ["the order of optimizer.state"]


def test_steps_go_by_the_order_of_each_call() -> None:
    def between(i: int, args: Any) -> None:
        if i == 1:
            args[1].param_groups.reverse()
            last(args[1].state)
            last(next(iter(args[1].state.values())))

    def make() -> Any:
        step, args = made()
        return step, args, [args[0]]

    assert_leaves_as_eager(make, between=between)


def test_the_order_of_a_batch_is_that_of_each_call() -> None:
    x, y = torch.ones(4, 3), torch.full((4, 3), 2.0)

    def make() -> Any:
        torch.manual_seed(0)
        model = nn.Linear(3, 3)

        def step(model: Any, batch: dict[str, Any]) -> Any:
            weighed = [(i + 1) * value for i, value in enumerate(batch.values())]
            loss = model(sum(weighed)).square().mean()
            loss.backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.sub_(parameter.grad, alpha=0.1)
            model.zero_grad()
            return loss

        return step, (model, {"x": x, "y": y}), [model]

    orders = [{"x": x, "y": y}, {"y": y, "x": x}]
    assert assert_leaves_as_eager(make, given=lambda i: {1: orders[i % 2]}) == 2


@pytest.mark.parametrize("is_own", [True, False])
def test_a_key_that_a_step_sets_in_a_group_is_its_own(is_own: bool) -> None:
    """Lamb counts in `group["step"]`, from the first step on."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
    group = optimizer.param_groups[0]
    written = {(id(group), "step")} if is_own else set[tuple[int, str]]()
    guards, _ = tensors_of_groups("optimizer", optimizer, {"step"}, written)
    group["step"] = 1
    changes = [change.name for guard in guards for change in guard.changes()]
    assert changes == ([] if is_own else ["optimizer.param_groups.0.step"])


def test_numbers_that_are_read_at_every_call_are_in_an_order_too() -> None:
    weights: list[dict[str, float]] = []

    def make() -> Any:
        _, (model, optimizer, x) = made()
        weights.append({"a": 1.0, "b": 0.5})
        own = weights[-1]

        def step(model: Any, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean() * next(iter(own.values()))
            loss.backward()
            optimizer.step()
            return loss

        return step, (model, optimizer, x), [model, own]

    def between(i: int, _args: Any) -> None:
        if i in (1, 2):
            weights[-1]["a"] = 1.0 + i  # from here on an input of the graph
        if i == 3:
            last(weights[-1])

    assert assert_leaves_as_eager(make, steps=5, between=between) <= 3
