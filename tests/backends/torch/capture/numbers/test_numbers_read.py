"""Numbers read out of tensors, by `.item()`, that feed arithmetic of tensors."""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from pardnn.backends.torch.capture.capture import capture
from pardnn.errors import UnsupportedError
from tests.backends.torch.capture.test_capture_equal import assert_equal
from tests.backends.torch.stepping import (
    Entry,
    assert_as_eager,
    assert_leaves_as_eager,
    cut_plan,
    eager,
    on_ranks,
    small,
)

Loss = Callable[..., torch.Tensor]

#: By name: a loss of the model, the batch and the targets.
LOSSES: dict[str, Loss] = {
    "float": lambda m, x, y: F.mse_loss(m(x), y) * float(x.mean()),
    "own": lambda m, x, y: (loss := F.mse_loss(m(x), y)) / (loss.item() + 1) + loss,
    "bfloat16": lambda m, x, y: (m(x).bfloat16() * x.std().item()).float().sum(),
    "double": lambda m, x, y: F.mse_loss(m(x), y) / x.double().std().item(),
    "int": lambda m, x, y: F.mse_loss(m(x), y) * ((x > 0).sum().item() / x.numel()),
    "ints": lambda m, x, y: (m(x) * (torch.arange(3) * x.argmax().item())).square().mean(),
    "bool": lambda m, x, y: (m(x) * (x[0, 0] > 0).item() - y).square().mean(),
    "math": lambda m, x, y: F.mse_loss(m(x), y) * math.exp(-x.std().item()) / np.sqrt(2),
    "list": lambda m, x, y: sum(v * m(x).sum() for v in x[0].tolist()).square(),
    "tensor": lambda m, x, y: (m(x) * torch.tensor([x[0, i].item() for i in range(3)])).exp().sum(),
    "filled": lambda m, x, y: F.mse_loss(m(x).masked_fill(y > 0, x.mean().item()), y),
    "clamped": lambda m, x, y: F.mse_loss(m(x).clamp(max=x.max().item() / 9), y),
    "noise": lambda m, x, y: F.mse_loss(m(x) + torch.randn_like(y) * x.std().item(), y),
    "larger": lambda m, x, y: F.mse_loss(m(x), y) * max(x[0, 0].item(), 0.5),
}  # fmt: skip


def entry(loss_of: Loss) -> Entry:
    model, x, y = small()

    def step(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, x, y)
        loss.backward()
        optimizer.step()
        return loss

    return step, (model, torch.optim.SGD(model.parameters(), lr=0.1), x, y)


@pytest.mark.parametrize("name", LOSSES)
def test_bits_are_those_of_eager(name: str) -> None:
    assert_equal(lambda: entry(LOSSES[name]))


def scaled() -> Entry:
    """Return a step that scales gradients, sets a rate and averages a loss by such numbers."""
    model, x, y = small()
    held = SimpleNamespace(average=1.0)

    def step(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor, held: Any) -> Any:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        held.average = 0.9 * held.average + 0.1 * loss.item()
        (loss / held.average).backward()
        gradients = [p.grad for p in model.parameters()]
        norm = torch.stack([each.norm() for each in gradients]).norm().item()
        for each in gradients:
            each.mul_(min(1.0, 0.5 / (norm + 1e-6)))
        optimizer.param_groups[0]["lr"] = 0.1 * x.std().item()
        optimizer.step()
        return loss

    return step, (model, torch.optim.Adam(model.parameters(), lr=0.1), x, y, held)


def given(i: int) -> dict[int, Any]:
    return {2: torch.randn(4, 5, generator=torch.Generator().manual_seed(i))}


def test_ranks_of_a_placed_plan_have_the_bits_of_eager() -> None:
    def state(args: tuple[Any, ...]) -> str:
        return args[4].average.hex()

    assert_as_eager(scaled, given, state, steps=4)


def test_ranks_of_a_cut_plan_have_one_number() -> None:
    def state(args: tuple[Any, ...]) -> float:
        return args[4].average

    expected = eager(scaled, given, state, steps=4)
    one, other = on_ranks(scaled, 2, given, state, steps=4, plan_of=cut_plan)
    assert one == other
    for found, (loss, average, _) in zip(one, expected, strict=True):
        assert float.fromhex(found[0]) == pytest.approx(float.fromhex(loss), rel=1e-5)
        assert float(found[1]) == pytest.approx(float(average), rel=1e-5)


def test_a_complex_number_is_refused() -> None:
    step, args = entry(lambda m, x, y: F.mse_loss(m(x), y) * abs((x * 1j).sum().item()))
    with pytest.raises(UnsupportedError, match=r"x\.abs\(\)\.item\(\)") as caught:
        capture(step, *args)
    assert caught.value.code == "E802"
    assert "test_numbers_read.py" in caught.value.details["source"]
    assert_equal(lambda: entry(lambda m, x, y: F.mse_loss(m(x), y) * (x * 1j).sum().abs().item()))


class _Normed(torch.optim.Optimizer):
    """Keeps the norm of each gradient, a number that only a run knows."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["norm"] = p.grad.norm().item()
                p.add_(p.grad, alpha=-group["lr"] / (1 + self.state[p]["norm"]))


def test_a_number_that_an_optimizer_reads_at_its_first_step_is_followed_after_it() -> None:
    def make(begin: bool) -> Any:
        model, x, y = small()
        optimizer: Any = _Normed(model.parameters())

        def step(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            return loss

        if begin:
            step(model, optimizer, x, y)
        return step, (model, optimizer, x, y), [model, optimizer.state]

    with pytest.raises(UnsupportedError, match="run one step\n.*of your own before") as caught:
        capture(make(False)[0], *make(False)[1])
    assert caught.value.code == "E804"
    assert_leaves_as_eager(lambda: make(True), 3)
