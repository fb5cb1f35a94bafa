"""Steps that differ from the first to the following: what eager does, from the first step on."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from pardnn.backends.torch.capture.capture import capture
from pardnn.backends.torch.capture.rewrites.sgd import DAMPENED
from pardnn.errors import UnsupportedError
from tests.backends.torch import models
from tests.backends.torch.beside_eager import assert_equal
from tests.backends.torch.capture import test_capture_equal
from tests.backends.torch.capture.test_rewrites import scaled
from tests.backends.torch.models import small
from tests.reference.interpreter import Interpreter

SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ASGD = functools.partial(torch.optim.ASGD, lr=0.1, t0=2.0, alpha=0.9)
OPTIMIZERS: dict[str, Any] = {
    "asgd": ASGD,
    "asgd-foreach": functools.partial(ASGD, foreach=True),
    "asgd-never-averaged": functools.partial(torch.optim.ASGD, lr=0.1, weight_decay=0.1),
    "asgd-foreach-decay": functools.partial(ASGD, foreach=True, weight_decay=0.1, maximize=True),
    "fused": functools.partial(SGD, fused=True, nesterov=True),
    "dampening": functools.partial(SGD, dampening=0.5),
    "dampening-foreach": functools.partial(SGD, dampening=0.3, foreach=True, weight_decay=0.1),
    "dampening-fused": functools.partial(SGD, dampening=0.5, fused=True),
}


ON_RANKS = ("asgd", "fused", "dampening")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name: str) -> None:
    compare = assert_equal if name in ON_RANKS else test_capture_equal.assert_equal
    compare(functools.partial(small, OPTIMIZERS[name]))


def test_a_rate_that_changes_before_the_first_step() -> None:
    step, args = small(ASGD)
    graph = capture(step, *args)
    args[1].param_groups[0]["lr"] = 0.2
    running = Interpreter(graph, step, args)
    found = [running.run(*args[2:]).item() for _ in range(3)]
    assert found == [step(*args).item() for _ in range(3)]


def test_a_first_step_that_a_scaler_leaves_out() -> None:
    # Not fused: after such a step torch's own fused momentum is uninitialised memory.
    test_capture_equal.assert_equal(functools.partial(scaled, OPTIMIZERS["dampening"]))


def test_momentum_that_exists_is_dampened_at_once() -> None:
    def factory() -> models.Entry:
        step, args = small(OPTIMIZERS["dampening"])
        step(*args)
        return step, args

    graph = test_capture_equal.assert_equal(factory)
    assert not any(op.name.endswith(DAMPENED) for op in graph.ops)


class FirstGradient(torch.optim.SGD):
    """Divides by the size of the first gradient."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if "size" not in state:
                    state["size"] = parameter.grad.abs()
                parameter.grad /= state["size"] + 1
        return super().step(closure)


def test_state_that_starts_from_data_is_refused() -> None:
    step, args = small(functools.partial(FirstGradient, lr=0.1))
    with pytest.raises(UnsupportedError, match="is not filled with one number") as caught:
        capture(step, *args)
    assert caught.value.code == "E806"
