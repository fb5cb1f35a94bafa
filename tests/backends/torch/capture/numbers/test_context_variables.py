"""Context variables and other state that no object holds: read, set, and left otherwise."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from pardnn.backends.torch.capture.capture import capture
from pardnn.backends.torch.parallelize import parallelize
from pardnn.errors import UnsupportedError
from tests.backends.torch.plans import random_plan
from tests.backends.torch.stepping import assert_leaves_as_eager, small

SCALE: ContextVar[float] = ContextVar("scale", default=1.0)
FIRST: ContextVar[float | None] = ContextVar("first", default=None)
LOCAL = SimpleNamespace(state=threading.local())


@pytest.fixture(autouse=True)
def _reset() -> Iterator[None]:
    tokens = SCALE.set(1.0), FIRST.set(None)
    LOCAL.state = threading.local()
    yield
    SCALE.reset(tokens[0])
    FIRST.reset(tokens[1])


def counted(x: torch.Tensor) -> torch.Tensor:
    SCALE.set(SCALE.get() + 1)
    return x * SCALE.get()


def set_at_first(x: torch.Tensor) -> torch.Tensor:
    if FIRST.get() is None:
        FIRST.set(2.0)
        x = x * 3
    return x * 2


def only_set(x: torch.Tensor) -> torch.Tensor:
    SCALE.set(7.0)
    return x


def read(x: torch.Tensor) -> torch.Tensor:
    return x * SCALE.get()


def put_back(x: torch.Tensor) -> torch.Tensor:
    token = SCALE.set(2.0)
    try:
        return read(x)
    finally:
        SCALE.reset(token)


def of_a_thread(x: torch.Tensor) -> torch.Tensor:
    if not hasattr(LOCAL.state, "scale"):
        LOCAL.state.scale = 2.0
        x = x * 3
    return x * LOCAL.state.scale


def made(change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    model, x, y = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)

    def step(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
        optimizer.zero_grad()
        loss = F.mse_loss(model(change(x)), y)
        loss.backward()
        optimizer.step()
        return loss

    return step, (model, optimizer, x, y), [model]


@pytest.mark.parametrize("change", [counted, set_at_first, only_set])
def test_a_context_variable_that_is_left_otherwise_is_refused_by_name(change: Any) -> None:
    step, args, _ = made(change)
    before = SCALE.get(), FIRST.get()
    with pytest.raises(UnsupportedError, match="context variable '(scale|first)'") as caught:
        capture(step, *args)
    assert caught.value.code == "E804"
    assert (SCALE.get(), FIRST.get()) == before


def test_the_advised_rewrites_are_followed() -> None:
    def make() -> Any:
        state = SimpleNamespace(scale=1.0)

        def in_an_object(x: torch.Tensor) -> torch.Tensor:
            state.scale = state.scale + 1
            return x * state.scale

        step, args, model = made(in_an_object)
        return step, args, [*model, state]

    assert assert_leaves_as_eager(make) == 1
    assert assert_leaves_as_eager(lambda: made(put_back)) == 1


def test_a_context_variable_that_changes_between_calls_is_noticed() -> None:
    def losses(call: Callable[..., Any], *batch: Any) -> list[str]:
        found = []
        for scale in (1.0, 1.0, 2.0, 2.0):
            SCALE.set(scale)
            found.append(call(*batch).item().hex())
        return found

    step, args, _ = made(read)
    expected = losses(step, *args)
    SCALE.set(1.0)
    step, args, _ = made(read)
    fast = parallelize(step, *args, device="cpu", decide=lambda g, n, _: random_plan(g, n))
    assert losses(fast, *args[2:]) == expected
    assert fast.captures == 2
    fast.close()


def test_a_first_step_that_leaves_what_no_walk_reaches_is_refused() -> None:
    """Its second trace begins with that, and is not the first step again."""
    step, args, _ = made(of_a_thread)
    with pytest.raises(UnsupportedError, match="the first step does something different") as caught:
        capture(step, *args)
    assert caught.value.code == "E806"
    LOCAL.state.scale = 2.0
    assert assert_leaves_as_eager(lambda: made(of_a_thread)) == 1
