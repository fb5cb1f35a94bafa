"""Attributes that users set on tensors, and steps read: `weight.lr_mult`, `x.mask`."""

from __future__ import annotations

import types
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.backends.torch.stepping import assert_leaves_as_eager
from tests.long_cases import long_but


def set_on(tensor: Any, **attributes: Any) -> torch.Tensor:
    for key, value in attributes.items():
        setattr(tensor, key, value)
    return tensor


def captures(
    weight: Callable[[Any, Any, Any], Any],
    between: Callable[[int, Any, Any], Any] = lambda _i, _model, _optimizer: None,
    x: Callable[[int], torch.Tensor] = lambda i: torch.full((5, 4), 1.0 + i),
) -> int:
    """Compare a step whose loss is weighed by `weight(model, optimizer, x)` with eager ones."""

    def make() -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
        set_on(model[0].weight, mult=1.0, scale=torch.tensor(1.0), steps=[1.0])
        set_on(model[1].get_buffer("running_mean"), mult=1.0)
        optimizer = torch.optim.Adam(model.parameters(), lr=set_on(torch.tensor(0.1), mult=1.0))

        def step(model: Any, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean() * weight(model, optimizer, x)
            loss.backward()
            optimizer.step()
            return loss

        return step, (model, optimizer, x(0)), [model]

    def before(i: int, args: Any) -> None:
        between(i, *args[:2])

    return assert_leaves_as_eager(make, given=lambda i: {2: x(i)}, between=before)


CASES: dict[str, tuple[Callable[..., Any], Callable[..., Any], int]] = {
    "of a parameter": (
        lambda m, o, x: m[0].weight.mult,
        lambda i, m, o: set_on(m[0].weight, mult=1.0 + i), 3,
    ),
    "of a buffer": (
        lambda m, o, x: m[1].running_mean.mult,
        lambda i, m, o: set_on(m[1].running_mean, mult=1.0 + i), 3,
    ),
    "of a setting": (
        lambda m, o, x: o.param_groups[0]["lr"].mult,
        lambda i, m, o: set_on(o.param_groups[0]["lr"], mult=1.0 + i), 3,
    ),
    "in a list": (
        lambda m, o, x: m[0].weight.steps[0],
        lambda i, m, o: m[0].weight.steps.__setitem__(0, 1.0 + i), 2,
    ),
    "that comes": (
        lambda m, o, x: 2 if hasattr(m[0].bias, "no_decay") else 1,
        lambda i, m, o: i == 1 and set_on(m[0].bias, no_decay=True), 2,
    ),
    "a tensor": (
        lambda m, o, x: m[0].weight.scale,
        lambda i, m, o: m[0].weight.scale.fill_(1.0 + i), 1,
    ),
    "of a state that comes": (
        lambda m, o, x: 2 if any(hasattr(s.get("exp_avg"), "f") for s in o.state.values()) else 1,
        lambda i, m, o: i == 2 and set_on(o.state[m[0].weight]["exp_avg"], f=True), 2,
    ),
    "of a state": (
        lambda m, o, x: getattr(o.state[m[0].weight].get("exp_avg"), "scale", 1.0),
        lambda i, m, o: i == 2 and set_on(o.state[m[0].weight]["exp_avg"], scale=3.0), 2,
    ),
    "that is listed": (
        lambda m, o, x: 1 + ("no_decay" in dir(m[0].bias)) + 2 * ("mode" in dir(m)),
        lambda i, m, o: i and set_on(m if i == 1 else m[0].bias, no_decay=True, mode=2), 3,
    ),
    "that is not read": (
        lambda m, o, x: 1,
        lambda i, m, o: set_on(m[0].weight, mult=1.0 + i), 1,
    ),
}  # fmt: skip


#: The others read what these read, elsewhere.
QUICK = {"of a parameter", "of a buffer", "of a setting", "of a state that comes",
         "that is listed", "that is not read", "a tensor"}  # fmt: skip


@pytest.mark.parametrize("what", long_but(QUICK, CASES))
def test_attributes_of_state(what: str) -> None:
    weight, between, expected = CASES[what]
    assert captures(weight, between) == expected


def test_a_module_s_table_of_hooks_may_be_replaced() -> None:
    def between(i: int, model: Any, _optimizer: Any) -> None:
        if i == 0:
            model[0].register_forward_hook(lambda _module, _inputs, output: output * 2)
        elif i == 2:
            model[0]._forward_hooks = OrderedDict()

    captures(lambda m, o, x: 1, between)


def test_attributes_of_a_batch() -> None:
    def given(i: int) -> torch.Tensor:
        mask = torch.arange(20.0).view(5, 4) + i
        return set_on(torch.full((5, 4), 1.0 + i), flag=i == 1, mask=mask)

    assert captures(lambda m, o, x: (x * x.mask).sum() * (2 if x.flag else 1), x=given) == 2


def test_a_batch_with_and_without_an_attribute() -> None:
    def given(i: int) -> torch.Tensor:
        return set_on(torch.full((5, 4), 1.0 + i), **({"flag": True} if i % 2 else {}))

    assert captures(lambda m, o, x: 2 if hasattr(x, "flag") else 1, x=given) == 2


def trained_apart(where: str) -> tuple[Any, tuple[Any, ...], Any]:
    """Return a step that trains a tensor of no module, which is found as `where` says."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4).double()
    scale = torch.ones(4, dtype=torch.float64, requires_grad=where != "not yet")
    held = types.SimpleNamespace(scale=scale, listed=[nn.Parameter(scale.detach())])
    apart = held.listed[0] if where == "listed" else scale
    optimizer = torch.optim.AdamW([*model.parameters(), apart], lr=0.1)
    found: dict[str, Callable[[], torch.Tensor]] = {
        "closure": lambda: scale,
        "attribute": lambda: held.scale,
        "listed": lambda: held.listed[0],
        "not yet": lambda: optimizer.param_groups[0]["params"][-1],
    }

    def step(model, optimizer, x):
        optimizer.zero_grad()
        loss = model(x * found[where]()).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return step, (model, optimizer, torch.randn(3, 4).double()), [optimizer, apart]


@pytest.mark.parametrize("where", ["closure", "attribute", "listed", "not yet"])
@pytest.mark.parametrize("change", ["requires_grad", "grad"])
def test_a_trained_tensor_of_no_module_may_change(where: str, change: str) -> None:
    def between(i: int, args: tuple[Any, ...]) -> None:
        apart = args[1].param_groups[0]["params"][-1]
        if change == "requires_grad" and i:
            apart.requires_grad_(i % 2 == 0)
        if change == "grad" and i == 2:
            apart.requires_grad_(False)
            apart.grad = torch.ones_like(apart)  # reset by the next call

    num = assert_leaves_as_eager(lambda: trained_apart(where), steps=5, between=between)
    assert num <= 3
