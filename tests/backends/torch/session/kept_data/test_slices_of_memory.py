"""A batch or state that is a slice of a larger tensor, of which a step writes a part in place."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pardnn.backends.torch.parallelize import parallelize
from pardnn.errors import UnsupportedError
from tests.backends.torch.plans import random_plan
from tests.backends.torch.stepping import assert_leaves_as_eager

WHERE = ["batch", "parameter", "buffer"]


def made(place: Callable[[nn.Module, torch.Tensor], Any]) -> tuple[Any, tuple[Any, ...], Any]:
    torch.manual_seed(0)
    model, data = nn.Linear(6, 3).double(), torch.randn(10, 6, dtype=torch.float64)
    model.register_buffer("scale", torch.ones(4, 6, dtype=torch.float64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    place(model, data)

    def step(model, optimizer, x):
        with torch.no_grad():
            model.weight[0] = 0.5
            model.scale[:, 1] += 1
            x[1:3].mul_(2)
        optimizer.zero_grad()
        loss = model(x * model.scale).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return step, (model, optimizer, data[:4].clone()), [model, data]


def put(where: str, model: nn.Module, data: torch.Tensor) -> None:
    if where == "parameter":
        model.weight.data = data[5:8]  # type: ignore[union-attr]
    if where == "buffer":
        model.scale = data[4:8]


@pytest.mark.parametrize("where", WHERE)
def test_what_was_a_slice_at_capture_is_written_where_it_is(where: str) -> None:
    assert_leaves_as_eager(lambda: made(lambda model, data: put(where, model, data)))


@pytest.mark.parametrize("where", WHERE)
def test_what_becomes_a_slice_is_written_where_it_is(where: str) -> None:
    rows = torch.linspace(-1, 1, 60, dtype=torch.float64).reshape(10, 6)
    copies: list[torch.Tensor] = []

    def make() -> tuple[Any, tuple[Any, ...], Any]:
        copies.append(rows.clone())
        step, args, held = made(lambda model, data: None)
        return step, args, [held, copies[-1]]

    def between(i: int, args: tuple[Any, ...]) -> None:
        if i == 1:
            put(where, args[0], copies[-1])

    def given(i: int) -> dict[int, Any]:
        return {2: copies[-1][i : i + 4]} if where == "batch" else {}

    assert_leaves_as_eager(make, given=given, between=between)


def test_a_view_of_a_parameter_put_in_place_of_state_is_refused() -> None:
    step, (model, optimizer, x), _ = made(lambda model, data: None)
    fast: Any = parallelize(
        step, model, optimizer, x, device="cpu", decide=lambda g, n, _: random_plan(g, n)
    )
    fast(x)
    model.scale = model.weight.detach()[:1].expand(4, 6)
    with pytest.raises(UnsupportedError, match="shares its memory with model"):
        fast(x)
    fast.close()


def test_state_may_be_expanded_from_fewer_elements() -> None:
    def make() -> tuple[Any, tuple[Any, ...], Any]:
        torch.manual_seed(0)
        model = nn.Linear(6, 3).double()
        model.register_buffer("scale", torch.rand(3, 1, dtype=torch.float64).expand(3, 6))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(model, optimizer, x):
            optimizer.zero_grad()
            loss = nn.functional.linear(x, model.weight * model.scale).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        return step, (model, optimizer, torch.randn(4, 6, dtype=torch.float64)), [model]

    assert_leaves_as_eager(make)
