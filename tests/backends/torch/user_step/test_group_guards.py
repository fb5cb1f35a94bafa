"""Tensors among the hyperparameters: another one is noticed where the graph would not read it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from pardnn.backends.torch.user_step.guards.guards import Guards
from tests.backends.torch.stepping import Entry, assert_leaves_as_eager


def made(*, shared: bool) -> Entry:
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    groups = [{"params": [p]} for p in model.parameters()]
    optimizer = torch.optim.Adam(groups, lr=torch.tensor(0.01))
    for group in optimizer.param_groups if not shared else ():
        group["lr"] = torch.tensor(0.01)

    def step(model: Any, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return step, (model, optimizer, torch.randn(4, 6))


def put(index: int, value: Any) -> Callable[[torch.optim.Optimizer], Any]:
    return lambda optimizer: optimizer.param_groups[index].update(lr=value)


CHANGES: dict[str, tuple[bool, Callable[[Any], Any], list[str]]] = {
    "filled": (True, lambda o: o.param_groups[0]["lr"].fill_(0.5), []),
    "another": (True, put(1, torch.tensor(0.01)), ["optimizer.param_groups.1.lr"]),
    "own-another": (False, put(1, torch.tensor(0.5)), []),
    "own-double": (
        False,
        put(1, torch.tensor(0.5, dtype=torch.float64)),
        ["optimizer.param_groups.1.lr"],
    ),
    "own-number": (False, put(0, 0.5), ["optimizer.param_groups.0.lr"]),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_named_unless_it_is_read_at_each_call(name: str) -> None:
    shared, change, expected = CHANGES[name]
    step, args = made(shared=shared)
    guards = Guards(step, args, (2,))
    change(args[1])
    assert list(dict.fromkeys(each.name for each in guards.changes({}))) == expected


@pytest.mark.parametrize("shared", [True, False])
def test_another_tensor_is_followed(shared: bool) -> None:
    def make() -> Any:
        step, args = made(shared=shared)
        return step, args, args

    def between(i: int, args: Any) -> None:
        if i:
            args[1].param_groups[1]["lr"] = torch.tensor(0.1 * i)

    assert assert_leaves_as_eager(make, between=between) == 1 + shared


@pytest.mark.parametrize("where", ["step", "caller"])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_numbers_of_the_user_in_optimizer_state_are_followed(kind: Any, where: str) -> None:
    """A key that no step before had, and later another number, which other calls count."""

    def count(states: Any, parameter: Any) -> None:
        states[parameter]["count"] = states[parameter].get("count", 0) + 1

    def step(model: Any, optimizer: Any, x: torch.Tensor, i: int) -> torch.Tensor:
        if where == "step" and i % 3 == 1:
            count(optimizer.state, model.weight)
        weight = 1 + 0.1 * optimizer.state.get(model.weight, {}).get("count", 0)
        optimizer.zero_grad()
        loss = model(x).square().mean() * weight
        loss.backward()
        optimizer.step()
        return loss

    def make() -> Any:
        torch.manual_seed(0)
        model = nn.Linear(6, 3)
        args = model, kind(model.parameters(), lr=0.1), torch.randn(4, 6), 0
        return step, args, args

    def between(i: int, args: Any) -> None:
        if where == "caller" and i % 3 == 1:
            count(args[1].state, args[0].weight)

    assert assert_leaves_as_eager(make, 7, lambda i: {3: i}, between) > 1


def call(value: Any, loss: torch.Tensor) -> torch.Tensor:
    return value(loss)


def first(value: Any, loss: torch.Tensor) -> torch.Tensor:
    return loss * float(value[0])


HELD: dict[str, tuple[Any, Any, Callable[..., Any]]] = {
    "function": (torch.tanh, torch.sigmoid, call),
    "lambda": (lambda x: x * 3, lambda x: x * 4, call),
    "module": (nn.Tanh(), nn.Sigmoid(), call),
    "class": (nn.Tanh, nn.Sigmoid, lambda value, loss: value()(loss)),
    "tuple of functions": ((torch.tanh,), (torch.sigmoid,), lambda value, x: value[0](x)),
    "list": ([1.0], [3.0], first),
    "array": (np.array([1.0]), np.array([3.0]), first),
    "dictionary": ({0: 1.0}, {0: 3.0}, first),
    "dtype": (torch.float32, torch.float64, lambda value, x: x * value.itemsize),
    "none": (None, [3.0], lambda value, x: x if value is None else first(value, x)),
}


@pytest.mark.parametrize("name", HELD)
def test_whatever_else_a_group_holds_is_noticed_when_it_changes(name: str) -> None:
    before, after, use = HELD[name]

    def make() -> Any:
        _, (model, optimizer, x) = made(shared=True)
        optimizer.param_groups[0]["own"] = before

        def own_step(model: Any, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = use(optimizer.param_groups[0]["own"], model(x).square().mean())
            loss.backward()
            optimizer.step()
            return loss

        return own_step, (model, optimizer, x), (model, optimizer.state)

    def between(i: int, args: Any) -> None:
        if i == 2:
            args[1].param_groups[0]["own"] = after

    assert assert_leaves_as_eager(make, between=between) == 2


def test_items_of_a_list_of_settings_are_noticed() -> None:
    def make() -> Any:
        step, args = made(shared=True)
        for group in args[1].param_groups:
            group["betas"] = [0.9, 0.99]
        return step, args, args

    def between(i: int, args: Any) -> None:
        if i == 2:
            args[1].param_groups[0]["betas"][0] = 0.5

    assert assert_leaves_as_eager(make, between=between) == 2
