"""Flags and settings that torch takes as plain values: what refusals advise is followed."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from pardnn.backends.torch.capture.capture import capture
from pardnn.backends.torch.parallelize import parallelize
from pardnn.errors import PardnnError, UnsupportedError
from tests.backends.torch.plans import random_plan
from tests.backends.torch.stepping import assert_leaves_as_eager, small
from tests.long_cases import long_but

Use = Callable[[Any, torch.Tensor, Any], torch.Tensor]


def frozen(state: Any, x: torch.Tensor, flag: Any) -> torch.Tensor:
    state.model[0].requires_grad_(flag)
    return state.model(x)


def frozen_by_attribute(state: Any, x: torch.Tensor, flag: Any) -> torch.Tensor:
    state.model[0].weight.requires_grad = flag
    return state.model(x)


def mixed(state: Any, x: torch.Tensor, flag: Any) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=flag):
        return state.model(x).float()


def dropped(state: Any, x: torch.Tensor, flag: Any) -> torch.Tensor:
    return F.dropout(state.model(x), 0.5, training=flag)


def inferred(state: Any, x: torch.Tensor, flag: Any) -> torch.Tensor:
    with torch.inference_mode(flag):
        width = state.model(x).shape[1]
    return state.model(x) * width


USES = [frozen, frozen_by_attribute, mixed, dropped, inferred]


def made(use: Use, flag_of: Callable[[Any], Any]) -> Any:
    model, x, y = small()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    state = SimpleNamespace(model=model, n=0, optimizer=optimizer)

    def step(state: Any, x: Any, y: Any) -> Any:
        state.n += 1
        loss = F.mse_loss(use(state, x, flag_of(state)), y)
        state.optimizer.zero_grad()
        loss.backward()
        state.optimizer.step()
        return loss

    return step, (state, x, y), state


@pytest.mark.parametrize("use", long_but({"frozen", "inferred"}, USES))
def test_a_comparison_of_a_count_is_a_flag_with_bool_around_it(use: Use) -> None:
    step, args, _ = made(use, lambda state: state.n > 2)
    with pytest.raises(UnsupportedError, match=r"Write bool\(n > 2\)") as caught:
        capture(step, *args)
    assert caught.value.code == "E802"
    assert "test_advised_flags.py" in caught.value.details["source"]
    assert assert_leaves_as_eager(lambda: made(use, lambda state: bool(state.n > 2)), 4) > 1


def test_a_flag_of_data_is_refused_and_a_flag_among_the_arguments_followed() -> None:
    def by_data(state: Any, x: torch.Tensor, flag: Any) -> torch.Tensor:
        return frozen(state, x, x.sum().item() > flag)

    step, args, _ = made(by_data, lambda _: 2.0)
    with pytest.raises(UnsupportedError, match="as an argument") as caught:
        capture(step, *args)
    assert caught.value.code == "E802"

    def given(model: Any, optimizer: Any, x: Any, y: Any, flag: bool) -> Any:
        loss = F.mse_loss(mixed(SimpleNamespace(model=model), x, flag), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    def make() -> Any:
        model, x, y = small()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        return given, (model, optimizer, x, y, False), [*model]

    assert assert_leaves_as_eager(make, 4, lambda i: {4: i > 1}) == 2


def test_the_mode_of_a_model_by_a_count_is_set_between_calls() -> None:
    def trained(state: Any, x: torch.Tensor, flag: Any) -> torch.Tensor:
        return state.model.train(flag)(x)

    step, args, _ = made(trained, lambda state: state.n > 2)
    with pytest.raises(UnsupportedError, match=r"model\.train\(n > 2\) between two calls"):
        capture(step, *args)

    def losses(is_parallel: bool) -> list[float]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x, found = torch.ones(3, 4), list[float]()

        def plain(model: Any, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(x).pow(2).mean()
            loss.backward()
            optimizer.step()
            return loss

        call: Any = None
        if is_parallel:
            call = parallelize(
                plain, model, optimizer, x, device="cpu",
                decide=lambda graph, size, _: random_plan(graph, size),
            )  # fmt: skip
        torch.manual_seed(1)
        for n in range(4):
            model.train(n > 2)
            loss = call(x) if is_parallel else plain(model, optimizer, x)
            found.append(loss.item())
        if is_parallel:
            call.close()
        return found

    assert losses(True) == losses(False)


def test_a_step_with_a_flag_that_is_no_bool_is_the_users_error() -> None:
    step, args, _ = made(frozen_by_attribute, lambda _: "yes")
    with pytest.raises(PardnnError, match="requires_grad must be a bool") as caught:
        capture(step, *args)
    assert caught.value.code == "E110"


def betas_of(i: Any) -> tuple[float, float]:
    return (0.5 + i / 10, 0.9)


def test_several_numbers_of_a_group_are_set_between_calls() -> None:
    def inside(state: Any, x: torch.Tensor, flag: Any) -> torch.Tensor:
        for group in state.optimizer.param_groups:
            group["betas"] = betas_of(flag)
        return state.model(x)

    for flag_of in (lambda state: state.n, lambda _: 0):
        step, args, _ = made(inside, flag_of)
        with pytest.raises(UnsupportedError, match="between two calls") as caught:
            capture(step, *args)
        assert caught.value.code == "E804"
        assert caught.value.details["changed"] == ["state.optimizer.param_groups.0.betas"]
        assert "test_advised_flags.py" in caught.value.details["source"]

    def losses(call: Callable[..., Any], state: Any, *batch: Any) -> list[str]:
        found = []
        for i in range(4):
            state.optimizer.param_groups[0]["betas"] = betas_of(i)
            found.append(call(*batch).item().hex())
        return found

    step, args, state = made(lambda state, x, _: state.model(x), lambda _: None)
    expected = losses(lambda x, y: step(state, x, y), *args)
    step, args, state = made(lambda state, x, _: state.model(x), lambda _: None)
    fast = parallelize(step, *args, device="cpu", decide=lambda g, n, _: random_plan(g, n))
    assert losses(fast, *args) == expected
    assert fast.captures == 1
    fast.close()
