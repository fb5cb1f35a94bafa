"""First steps that build what later ones find, and compute something else besides."""

from __future__ import annotations

import enum
import math
import random
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from pardnn.backends.torch.capture.capture import capture
from pardnn.backends.torch.capture.first_step.numbering import Numbering
from pardnn.backends.torch.capture.first_step.value_numbers import NumberedTrace
from pardnn.backends.torch.capture.source_location import Locator
from pardnn.backends.torch.capture.step_trace import StepTrace
from pardnn.backends.torch.capture.tracer import Tracer
from pardnn.errors import UnsupportedError
from tests.backends.torch import stepping
from tests.backends.torch.stepping import assert_leaves_as_eager, small


def mask() -> torch.Tensor:
    return torch.tril(torch.ones(5, 5))


def and_scale(trainer: Any, x: torch.Tensor) -> torch.Tensor:
    if trainer.mask is None:
        trainer.mask = mask()
        x = x * 2
    return x @ trainer.mask


def in_another_order(trainer: Any, x: torch.Tensor) -> torch.Tensor:
    if trainer.mask is None:
        trainer.mask = mask()
        return (x + 1) * 2 @ trainer.mask
    return (x * 2 + 1) @ trainer.mask


def swapped(trainer: Any, x: torch.Tensor) -> torch.Tensor:
    if trainer.mask is None:
        trainer.mask = mask()
        return trainer.mask.sum() - x
    return x - trainer.mask.sum()


def with_noise(trainer: Any, x: torch.Tensor) -> torch.Tensor:
    if trainer.mask is None:
        trainer.mask = mask()
        x = x + torch.randn_like(x)
    return x @ trainer.mask


def drawing_for_nothing(trainer: Any, x: torch.Tensor) -> torch.Tensor:
    if trainer.mask is None:
        trainer.mask = mask()
        torch.randn(3)
    return F.dropout(x @ trainer.mask)


def writing_a_weight(trainer: Any, x: torch.Tensor) -> torch.Tensor:
    if trainer.mask is None:
        trainer.mask = mask()
        with torch.no_grad():
            trainer.model[0].weight.mul_(0.5)
    return x @ trainer.mask


def printing(trainer: Any, x: torch.Tensor) -> torch.Tensor:
    if trainer.mask is None:
        trainer.mask = mask()
        print("made")
    return x @ trainer.mask


def logging_more(trainer: Any, x: torch.Tensor) -> torch.Tensor:
    size = x.abs().sum().item()
    if trainer.mask is None:
        trainer.mask, size = mask(), size * 100
    trainer.log.append(size)
    return x @ trainer.mask


def counting_once(trainer: Any, x: torch.Tensor) -> torch.Tensor:
    if trainer.mask is None:
        trainer.mask = mask()
        trainer.n += 1
    return x @ trainer.mask


CHANGES = [
    and_scale, in_another_order, swapped, with_noise, drawing_for_nothing, writing_a_weight,
    printing, logging_more, counting_once,
]  # fmt: skip


def _made(change: Callable[[Any, torch.Tensor], torch.Tensor]) -> Any:
    model, x, y = small()
    trainer = types.SimpleNamespace(model=model, mask=None, log=[], n=0)
    trainer.optimizer = torch.optim.SGD(model.parameters(), lr=0.3)

    def step(trainer: Any, x: Any, y: Any) -> Any:
        x = change(trainer, x)
        trainer.optimizer.zero_grad()
        loss = F.mse_loss(trainer.model(x), y)
        loss.backward()
        trainer.optimizer.step()
        return loss

    return step, (trainer, x, y), trainer


@pytest.mark.parametrize("change", CHANGES)
def test_a_first_step_that_computes_more(change: Any) -> None:
    assert assert_leaves_as_eager(lambda: _made(change), 4) == 2


class Opening(torch.optim.SGD):
    """Its first step only looks at the gradients, as ADOPT's does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            if not self.state[p]:
                self.state[p]["v"] = p.grad.square()
                continue
            self.state[p]["v"].lerp_(p.grad.square(), 0.1)
            p.sub_(0.1 * p.grad / self.state[p]["v"].sqrt())


class Biased(torch.nn.Linear):
    """Fills a buffer that is None when it first runs, as ALiBi's distances are kept."""

    slopes: torch.Tensor
    distances: torch.Tensor

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.register_buffer("slopes", torch.tensor([0.5, 0.25, 2.0]))
        self.register_buffer("distances", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.distances is None:
            self.register_buffer("distances", torch.arange(3.0) * self.slopes)
        return super().forward(x) + self.distances


def test_a_buffer_that_is_none_before_the_first_step() -> None:
    def make() -> Any:
        model, x, y = small()
        model.append(Biased())

        def step(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            return loss

        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return step, (model, optimizer, x, y), [model, optimizer]

    assert assert_leaves_as_eager(make, 3) == 2


class Norm(enum.IntEnum):
    SIGN = 1


class Counting(torch.optim.SGD):
    """Counts for all parameters together, as MADGRAD does, and keeps a mean as EmoNavi does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        state: Any = self.state
        if "k" not in state:
            state["k"] = torch.tensor([0])
        state["mean"] = 0.5 * state.setdefault("mean", 1.0)
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad, alpha=0.1 * math.pow(state["k"] + 1, 0.5) * (1 - state["mean"]))
        state["k"] += 1


def test_a_state_of_all_parameters_together() -> None:
    def make() -> Any:
        model, x, y = small()

        def step(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            return loss

        optimizer = Counting(model.parameters(), lr=0.1)
        optimizer.param_groups[0]["norm"] = Norm.SIGN  # a graph has it as 1
        return step, (model, optimizer, x, y)

    stepping.assert_as_eager(make, sizes=(2,), is_followed=True)


@pytest.mark.parametrize("how", ["replaced", "filled"])
def test_a_tensor_that_the_first_step_changes_and_does_not_read(how: str) -> None:
    """Only the graph after it reads what it leaves there."""

    def make() -> Any:
        model, x, y = small()
        model.factor, model.is_new = torch.ones(3), True

        def step(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
            factor = 1.0 if model.is_new else model.factor
            if model.is_new and how == "replaced":
                model.factor = torch.full((3,), 2.0)
            elif model.is_new:
                model.factor.fill_(2.0)
            model.is_new = False
            optimizer.zero_grad()
            loss = F.mse_loss(model(x) * factor, y)
            loss.backward()
            optimizer.step()
            return loss

        optimizer = Opening(model.parameters(), lr=0.1)
        return step, (model, optimizer, x, y), [model, optimizer]

    assert assert_leaves_as_eager(make, 5) == 2


def test_parts_of_a_tuple_that_such_a_step_makes_have_no_place_on_ranks() -> None:
    """It ended in E505, as if the graph were of another step."""
    model, x, y = small()
    model.carried = None

    def step(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
        if model.carried is not None:
            x = x + model.carried[0]
        model.carried = (0.1 * x, x.sin())
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    args = model, Opening(model.parameters(), lr=0.1), x, y
    with pytest.raises(UnsupportedError, match="is not filled with one number") as caught:
        capture(step, *args)
    assert caught.value.code == "E806"


def test_on_two_ranks() -> None:
    stepping.assert_as_eager(lambda: _made(with_noise)[:2], steps=4, is_followed=True)


def test_what_cannot_be_followed_is_refused() -> None:
    def in_a_list(trainer: Any, x: torch.Tensor) -> torch.Tensor:
        if not trainer.log:
            trainer.log.append(mask())
            x = x * 3
        return x @ trainer.log[0]

    step, args, _ = _made(in_a_list)
    with pytest.raises(UnsupportedError, match="the first step does something different") as caught:
        capture(step, *args)
    assert caught.value.code == "E806"


def _program(draw: random.Random) -> Callable[[torch.Tensor], list[torch.Tensor]]:
    """Return random calls on tensors, most of them in place, on views or of known numbers."""
    ops: list[Callable[[Any, Any], Any]] = [
        lambda a, b: a + b,
        lambda a, b: a.add_(b.clone()),
        lambda a, b: a.add(b, alpha=2),
        lambda a, b: a.mul_(0.5),
        lambda a, b: a.mul_(-1.0),
        lambda a, b: a.copy_(b.clone()),
        lambda a, b: a.t().copy_(b.clone()),
        lambda a, b: a.clone(),
        lambda a, b: a.double().float(),
        lambda a, b: a.t(),
        lambda a, b: a[0].zero_(),
        lambda a, b: a[1].copy_(b[0].clone()),
        lambda a, b: a.as_strided((a.numel(),), (1,)).add_(b.clone().reshape(-1)),
        lambda a, b: a.zero_(),
        lambda a, b: torch.zeros_like(a),
        lambda a, b: torch.full_like(a, 2.0),
        lambda a, b: torch.add(a, b, out=torch.empty(a.shape)),
    ]
    chosen = [(draw.choice(ops), draw.random(), draw.random()) for _ in range(25)]

    def run(x: torch.Tensor) -> list[torch.Tensor]:
        size = x.shape[0]
        held = [x, torch.zeros(size, size), torch.ones(size, size), torch.eye(size)]
        for op, i, j in chosen:
            made = op(held[int(i * len(held))], held[int(j * len(held))])
            held += [made] if made.shape == x.shape else []
        return held

    return run


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("size", [2, 5])
def test_equal_numbers_stand_for_equal_tensors(seed: int, size: int) -> None:
    run = _program(random.Random(seed))
    x = torch.randn(size, size, generator=torch.Generator().manual_seed(seed))
    mode = FakeTensorMode()
    tracer = Tracer(mode, Locator({}, is_silent=True))
    fake = mode.from_tensor(x)
    tracer.add_source("input", fake, None).call.name = "x"
    with mode, tracer:
        traced = run(fake)
    trace = StepTrace(tracer, {}, {}, {}, {}, None, length=len(tracer.calls))
    numbered = NumberedTrace(trace, Numbering(), {})
    by_number: dict[Any, torch.Tensor] = {}
    for tensor, real in zip(traced, run(x.clone()), strict=True):
        assert torch.equal(by_number.setdefault(numbered.of(tensor), real), real)
    assert len(by_number) > 1


class Flagged(torch.optim.Optimizer):
    """Notes in its state that a buffer of zeros is there, by a value that stays as it is."""

    def __init__(self, parameters: Any, flag: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.flag = flag

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if "flag" not in state:
                    state["flag"], state["sum"] = self.flag, torch.zeros_like(p)
                state["sum"].mul_(0.9).add_(p.grad)
                p.sub_(state["sum"], alpha=group["lr"])


def _flagged(flag: Any) -> Any:
    model, x, y = small()
    optimizer = Flagged(model.parameters(), flag)

    def step(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    def held() -> Any:
        return [model, [dict(sorted(each.items())) for each in optimizer.state.values()]]

    return step, (model, optimizer, x, y), held


@pytest.mark.parametrize("flag", [True, 0.5, "momentum", None, ("a", 2, None), torch.Size([2])])
def test_a_value_that_the_first_step_alone_leaves_is_there_for_later_captures(flag: Any) -> None:
    def shorter(i: int) -> dict[int, Any]:
        _, x, y = small()
        return {2: x[: 4 - i // 2], 3: y[: 4 - i // 2]}

    assert assert_leaves_as_eager(lambda: _flagged(flag), 3, given=shorter) == 3


@pytest.mark.parametrize("flag", [{1}, torch.float64, len, b"a"])
def test_what_ranks_could_not_make_for_them_is_refused(flag: Any) -> None:
    step, args, _ = _flagged(flag)
    with pytest.raises(UnsupportedError, match="'optimizer.state.model.0.bias.flag'") as caught:
        capture(step, *args)
    assert caught.value.code == "E806"
    step(*args)
    assert capture(step, *args).ops


def test_a_list_of_a_tensor_that_each_step_replaces() -> None:
    """RAFT's pyramid of correlations: the item of the old list is no item of the new one."""

    def make() -> Any:
        model, x, y = small()
        model.levels = [torch.tensor(0)]

        def step(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
            optimizer.zero_grad()
            model.levels = [model(x)]
            model.levels.append(0.5 * model.levels[0])
            loss = F.mse_loss(sum(model.levels), y)
            loss.backward()
            optimizer.step()
            return loss

        return step, (model, torch.optim.SGD(model.parameters(), lr=0.1), x, y), [model]

    assert stepping.assert_leaves_as_eager(make) == 1
