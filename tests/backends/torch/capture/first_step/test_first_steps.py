"""Steps that differ from the first to the following: what eager does, from the first step on."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

from pardnn.backends.torch.capture.capture import capture
from pardnn.backends.torch.capture.rewrites.sgd import DAMPENED
from pardnn.backends.torch.make_step import make_step
from pardnn.backends.torch.parallelize import parallelize
from pardnn.backends.torch.runtime.binding import Binding
from pardnn.errors import UnsupportedError
from tests.backends.torch import executors, models, stepping
from tests.backends.torch.beside_eager import assert_equal
from tests.backends.torch.capture import test_capture_equal
from tests.backends.torch.capture.test_rewrites import scaled
from tests.backends.torch.models import small
from tests.backends.torch.plans import random_plan
from tests.long_cases import long_but
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


@pytest.mark.parametrize("name", long_but(ON_RANKS, OPTIMIZERS))
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


class Anchored(torch.optim.Optimizer):
    """Keeps the first weights, an average in double precision, and moves towards both."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["first"] = parameter.detach().clone()
                    state["slow"] = parameter.clone().double()
                    state["last"] = torch.empty_like(parameter).copy_(parameter)
                parameter.add_(parameter.grad, alpha=-group["lr"])
                state["slow"].lerp_(parameter.double(), 0.5)
                parameter.add_(0.1 * (state["first"] - parameter) + 0.01 * state["last"])
                parameter.lerp_(state["slow"].float(), 0.2)
                state["last"].copy_(parameter)


def test_state_that_starts_as_a_copy() -> None:
    graph = assert_equal(functools.partial(small, Anchored))
    copies = {op.name: (op.arguments or {})["initial"] for op in graph.ops if op.kind == "state"}
    assert copies["optimizer.state.model.0.weight.slow"] == {"copy_of": "model.0.weight"}


def test_a_rank_copies_its_part_of_a_recorded_construction() -> None:
    graph = executors.captured(functools.partial(small, Anchored))
    step, args, recording = make_step(functools.partial(small, Anchored))
    binding = Binding(step, args, graph, torch.device("cpu"))
    names = ["model.0.weight", *(f"optimizer.state.model.0.weight.{k}" for k in ("first", "slow"))]
    values = binding.replayed([op for op in graph.ops if op.name in names], recording)
    weight = small(Anchored)[1][0][0].weight.detach()
    assert len({value.data_ptr() for value in values.values()}) == 3
    for value in values.values():
        assert torch.equal(value.float(), weight)
    assert values[names[2]].dtype == torch.float64


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


class AfterTheStep(torch.optim.SGD):
    """Keeps what the first update made of the weights."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                kept = self.state[parameter].setdefault("kept", parameter.clone())
                parameter.lerp_(kept, 0.1)


class WrittenAgain(torch.optim.SGD):
    """Keeps the first weights in a tensor that it has filled with zeros before."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if "slow" not in state:
                    state["slow"] = torch.zeros_like(parameter)
                    state["slow"].copy_(parameter)
                state["slow"].lerp_(parameter, 0.5)
                parameter.copy_(state["slow"])


class SquaredFirst(torch.optim.Optimizer):
    """Takes only the square of the first gradient, as ADOPT does."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["square"] = torch.zeros_like(parameter)
                    state["square"].addcmul_(parameter.grad, parameter.grad)
                    continue
                parameter.addcdiv_(parameter.grad, state["square"].sqrt() + 1, value=-group["lr"])
                state["square"].mul_(0.9).addcmul_(parameter.grad, parameter.grad)


class PulledFirst(torch.optim.SGD):
    """Halves the weights at first."""

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            if "seen" not in self.state[parameter]:
                self.state[parameter]["seen"] = torch.zeros(())
                parameter.data.mul_(0.5)
            parameter.data.add_(self.state[parameter]["seen"])
        return super().step(closure)


class FullFirst(torch.optim.SGD):
    """Takes the first gradient whole into its average."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            rate = 0.1 if state else 1.0
            if not state:
                state["mean"] = torch.zeros_like(parameter)
            state["mean"].add_(parameter.grad, alpha=rate)
            parameter.add_(state["mean"], alpha=-0.1)


class ByCount(torch.optim.SGD):
    """Keeps a gradient at its first step, which a count decides, and reads it at all others."""

    def step(self, closure: Any = None) -> Any:
        group = self.param_groups[0]
        group["count"] = group.get("count", 0) + 1
        for parameter in group["params"]:
            state = self.state[parameter]
            if group["count"] == 1:
                state["before"], state["is_kept"] = -parameter.grad, True
            parameter.data.add_(state["before"], alpha=0.1)
            state["before"] = -parameter.grad
        return super().step(closure)


def of(make: Any) -> Any:
    def entry() -> Any:
        model, x, y = stepping.small()
        return train, (model, make(model.parameters(), lr=0.1), x, y)

    return entry


def train(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    return loss


def numbers(args: tuple[Any, ...]) -> Any:
    states = args[1].state.values()
    kept = [{k: v for k, v in each.items() if not isinstance(v, torch.Tensor)} for each in states]
    return kept, args[1].param_groups[0].get("count")


OPENINGS = [
    FirstGradient, AfterTheStep, WrittenAgain, SquaredFirst, PulledFirst, FullFirst, ByCount
]  # fmt: skip


@pytest.mark.parametrize(
    "make", long_but({"FirstGradient", "WrittenAgain", "FullFirst", "ByCount"}, OPENINGS)
)
def test_a_first_step_that_does_something_else_is_a_graph_of_its_own(make: Any) -> None:
    stepping.assert_as_eager(of(make), state=numbers, steps=4, sizes=(1,), is_followed=True)


def test_ranks_open_together() -> None:
    stepping.assert_as_eager(of(ByCount), state=numbers, steps=4, is_followed=True)


def test_a_cut_first_step() -> None:
    expected = stepping.eager(of(SquaredFirst), steps=4)
    cut = stepping.on_ranks(
        of(SquaredFirst), 2, steps=4, plan_of=stepping.cut_plan, is_followed=True
    )
    for found in cut:
        for (loss, *_), (known, *_) in zip(found, expected, strict=True):
            assert float.fromhex(loss) == pytest.approx(float.fromhex(known), rel=1e-5)


def started(**options: Any) -> Any:
    step, args = of(SquaredFirst)()
    decide = lambda graph, size, _: random_plan(graph, size)  # noqa: E731
    return parallelize(step, *args, decide=decide, device="cpu", **options), args


def test_nothing_may_change_before_the_first_step() -> None:
    fast, args = started()
    with pytest.raises(UnsupportedError, match="the state is to be loaded") as caught:
        fast.load_state_dict({})
    assert caught.value.code == "E806"
    with pytest.raises(UnsupportedError, match="'y' is"):
        fast(args[2], args[3][:2])
    fast.close()
    other = torch.randn(2, 5), torch.randn(2, 3)
    with pytest.raises(UnsupportedError, match="other shapes"):
        started(shapes=[other])


class InAList(torch.optim.SGD):
    """Keeps the first gradient where no name leads."""

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            parameter.grad += self.state[parameter].setdefault("all", [parameter.grad.clone()])[0]
        return super().step(closure)


def test_state_in_objects_of_the_first_step_is_refused() -> None:
    step, args = of(InAList)()
    with pytest.raises(UnsupportedError, match=r"state\.model\.0\.weight") as caught:
        capture(step, *args)
    assert caught.value.code == "E806"


def cumulative() -> models.Entry:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4, momentum=None), nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return models.classify_step, (model, optimizer, torch.randn(8, 6), torch.randint(3, (8,)))


def test_batch_norm_averages_over_all_batches() -> None:
    assert_equal(cumulative)


def test_views_of_known_numbers_that_were_expanded() -> None:
    def step(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
        spread = torch.eye(3)[:, None].expand(3, 4, 3).contiguous().view(12, 3)
        loss = torch.nn.functional.cross_entropy(model(x), y) + spread.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    test_capture_equal.assert_equal(lambda: (step, small(SGD)[1]))


class Aggregated(torch.optim.SGD):
    """Keeps several averages of a gradient in a container, as AggMo does."""

    make: Any = staticmethod(lambda p: [torch.zeros_like(p), torch.zeros_like(p)])

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                state["averages"] = self.make(p)
            held = state["averages"]
            for average in held.values() if isinstance(held, dict) else held:
                p.sub_(average.mul_(0.5).add_(p.grad), alpha=0.1)


@pytest.mark.parametrize(
    "make",
    [
        Aggregated.make,
        lambda p: {0.5: torch.zeros_like(p)},
        lambda p: (torch.zeros_like(p), torch.ones_like(p)),
    ],
)
def test_containers_that_the_first_step_makes_in_a_state_have_no_place_on_ranks(make: Any) -> None:
    """Ranks kept what they hold under keys of its own, `averages.0`."""

    class Kept(Aggregated): ...

    Kept.make = staticmethod(make)
    entry = functools.partial(small, functools.partial(Kept, lr=0.1))
    step, args = entry()
    with pytest.raises(
        UnsupportedError, match="in a container that the first step makes"
    ) as caught:
        capture(step, *args)
    assert caught.value.code == "E806"

    def taken() -> Any:
        step, args = entry()
        step(*args)
        return step, args, args[:2]

    stepping.assert_leaves_as_eager(taken)


@pytest.mark.parametrize("is_shared", [True, False])
def test_so_do_numbers_in_such_containers(*, is_shared: bool) -> None:
    class Counting(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for p in self.param_groups[0]["params"]:
                state = self.state if is_shared else self.state[p]
                held = state.setdefault("counts", {})
                held["t"] = held.get("t", 0) + 1
                p.sub_(p.grad, alpha=0.1 / held["t"])

    step, args = small(functools.partial(Counting, lr=0.1))
    with pytest.raises(UnsupportedError, match=r"counts\.t"):
        capture(step, *args)
