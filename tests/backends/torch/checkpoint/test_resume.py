"""A run that was interrupted goes on as if it had not been, on other ranks and other plans."""

from __future__ import annotations

import functools
import json
import math
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import pardnn
from pardnn.backends.torch.checkpoint.python_values import decode, encode
from pardnn.backends.torch.parallelize import parallelize
from pardnn.checkpoint.directory import read_manifest, resolve
from pardnn.errors import FileError, UnsupportedError
from pardnn.graph.ir import Graph
from pardnn.plan.plan import Plan
from pardnn.planner.next_plan import next_plan
from pardnn.planner.options import PlanOptions
from testbed.counting_optimizers import AdaBelief
from tests.backends.torch import models
from tests.backends.torch.checkpoint.training import (
    Factory,
    Rank,
    in_double,
    on_ranks,
    plan_of,
    resumed,
    saved_at,
    uninterrupted,
    values,
)
from tests.backends.torch.executors import batches, bits, loss_of, perceptron
from tests.backends.torch.plans import random_plan
from tests.backends.torch.ranks import connect, run_ranks
from tests.long_cases import long_but

#: `make resume-matrix` runs all.
LONG = "MATRIX" in os.environ
SIZES = [1, 2, 3, 4, 8] if LONG else [2]


def double_lstm() -> models.Entry:
    return in_double(models.lstm)


def double_gpt2() -> models.Entry:
    return models.double_language_step, in_double(models.gpt2)[1]


def double_gan() -> models.Entry:
    return in_double(models.gan)


def double_resnet() -> models.Entry:
    return in_double(models.resnet)


def double(text: str) -> float:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.float64).item()


MODELS = [
    perceptron,
    models.gan,
    *([models.gpt2, models.lstm, models.resnet] if LONG else []),
]
DOUBLES = [double_lstm, *([double_gpt2, double_gan, double_resnet] if LONG else [])]


class Saved(NamedTuple):
    """A checkpoint, and the losses of each rank until it."""

    path: Path
    losses: list[Any]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Factory, str], Saved]:
    """Training on 3 ranks that stopped after 3 steps: once for all that go on from there."""

    @functools.cache
    def of(factory: Factory, algorithm: str) -> Saved:
        path = tmp_path_factory.mktemp("saved") / "runs" / "a"
        return Saved(path, saved_at(factory, plan_of(factory, 3, algorithm), path))

    return of


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("factory", MODELS, ids=lambda f: f.__name__)
def test_placed_to_placed_keeps_every_bit(factory: Factory, size: int, saved: Any) -> None:
    expected = uninterrupted(factory, 6)
    path, losses = saved(factory, "placed")
    assert losses == [expected[:3]] * 3
    found = resumed(factory, plan_of(factory, size, seed=4), path, (3, 6))
    assert found == [expected[3:]] * size


@pytest.mark.parametrize("size", [size for size in SIZES if size > 1])
@pytest.mark.parametrize("factory", DOUBLES, ids=lambda f: f.__name__)
@pytest.mark.parametrize(
    ("first", "then"), [("placed", "tofu"), *long_but((), [("tofu", "placed")])]
)
def test_placed_and_cut_read_each_other(
    first: str, then: str, factory: Factory, size: int, saved: Any
) -> None:
    expected = uninterrupted(factory, 6)
    path, _ = saved(factory, first)
    for losses in resumed(factory, plan_of(factory, size, then), path, (3, 6)):
        for found, wanted in zip(losses[:3], expected[3:6], strict=True):
            assert double(found) == pytest.approx(double(wanted), rel=1e-10)
        assert losses[3] == expected[6]


def test_a_checkpoint_tells_whether_all_steps_placed_whole_ops(tmp_path: Path) -> None:
    """Once a sum was cut, no later plan brings one device's bits back."""

    def train(algorithm: str) -> bool:
        def body(one: Rank) -> None:
            if (tmp_path / "latest").exists():
                one.load(tmp_path)
            one.train(1)
            one.fast.save(tmp_path, extra=one.extra())

        values(on_ranks(perceptron, plan_of(perceptron, 2, algorithm), body))
        return read_manifest(resolve(tmp_path)).kept_bits

    assert [train(each) for each in ("placed", "tofu", "placed")] == [True, False, False]


def scheduled() -> models.Entry:
    """The step reads its schedule, so that the schedule is found; Python numbers everywhere."""
    step, (model, _, x, y) = models.small()
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.1), betas=(0.8, 0.9))
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3], gamma=0.5)

    def read(model, optimizer, x, y):
        assert schedule.optimizer is optimizer
        return step(model, optimizer, x, y)

    read.schedule = schedule
    return read, (model, optimizer, x, y)


def test_a_schedule_that_the_step_reaches_is_found(tmp_path: Path) -> None:
    plan = plan_of(scheduled, 2)

    def body(one: Rank, *, is_second: bool) -> list[str]:
        schedule = one.user_step.schedule
        if is_second:
            one.fast.load(tmp_path)
            assert schedule.last_epoch == 2
        losses = []
        for i in range(2, 4) if is_second else range(4):
            losses.append(one.step(i))
            schedule.step()
            if i == 1:
                one.fast.save(tmp_path)
        return losses

    whole = values(on_ranks(scheduled, plan, lambda one: body(one, is_second=False)))
    rest = values(on_ranks(scheduled, plan, lambda one: body(one, is_second=True), other=True))
    assert rest == [losses[2:] for losses in whole]


def test_values_come_back_as_they_were() -> None:
    given = {
        "betas": (0.9, 0.999),
        "best": float("inf"),
        "milestones": Counter({1: 2}),
        "by step": {3: [None, True, "x"]},
        "$": 1,
        "lr": torch.tensor(0.5, dtype=torch.float64),
    }
    found = decode(json.loads(json.dumps(encode(given, "extra"), allow_nan=False)))
    assert found == given
    assert isinstance(found["betas"], tuple)
    assert isinstance(found["milestones"], Counter)
    assert found["lr"].dtype == torch.float64
    assert math.isnan(decode(encode(float("nan"), "x")))
    with pytest.raises(UnsupportedError, match=r"extra\.loader is a object"):
        encode({"loader": object()}, "extra")
    for bad in ({"$": "eval"}, {"$": "tensor", "dtype": "load", "items": 1}, {"$": "float"}):
        with pytest.raises(FileError):
            decode(bad)


class Trainer:
    """Holds a count of the step's, as a trainer object does."""

    def __init__(self) -> None:
        self.calls = 0


def counting() -> models.Entry:
    """The step counts in Python, its optimizer too, and it steps its schedule."""
    _, (model, _, x, y) = models.small()
    optimizer = AdaBelief(model.parameters())
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
    trainer = Trainer()

    def step(model, optimizer, x, y):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y) * (1 + 0.1 * trainer.calls)
        loss.backward()
        optimizer.step()
        trainer.calls += 1
        schedule.step()
        return loss

    step.found = (trainer, schedule)
    return step, (model, optimizer, x, y)


@pytest.mark.parametrize("size", long_but([2], [1, 2]))
def test_what_a_step_counts_in_python_goes_on(size: int, tmp_path: Path) -> None:
    def body(one: Rank, *, is_second: bool) -> list[str]:
        trainer, schedule = one.user_step.found
        if is_second:
            one.fast.load(tmp_path)
            assert (trainer.calls, schedule.last_epoch) == (3, 3)
        losses = []
        for i in range(3, 5) if is_second else range(5):
            losses.append(bits(loss_of(one.fast(*batches(one.args, one.indices, i)))))
            if i == 2:
                one.fast.save(tmp_path)
        return losses

    first, then = plan_of(counting, 3), plan_of(counting, size, seed=2)
    whole = values(on_ranks(counting, first, lambda one: body(one, is_second=False)))
    rest = values(on_ranks(counting, then, lambda one: body(one, is_second=True), other=True))
    assert rest == [whole[0][3:]] * size


def evaluating() -> models.Entry:
    """One step that trains or evaluates, by the mode of the model."""
    _, (model, _, x, y) = models.small()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def step(model, optimizer, x, y):
        loss = nn.functional.cross_entropy(model(x), y)
        if model.training:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return loss

    return step, (model, optimizer, x, y)


def scattered(graph: Graph, size: int, _state: Any) -> Plan:
    return random_plan(graph, size, seed=len(graph.ops))


def in_place(graph: Graph, size: int, state: Any) -> Plan:
    options = PlanOptions(algorithm="layer-round-robin", costs="v100")
    return next_plan(graph, pardnn.Cluster.uniform(size), options, None, state)


@pytest.mark.parametrize("decide", [in_place, scattered])
def test_a_checkpoint_after_an_evaluation_holds_the_optimizer_too(
    decide: Any, tmp_path: Path
) -> None:
    """The state stays where it is for the second graph, or moves with it."""

    def run(rank: int, store: str) -> bool:
        connect(rank, 2, store, 20).close()
        step, args = evaluating()
        fast = parallelize(step, *args, decide=decide, timeout=20, device="cpu")
        fast(*args[2:])
        args[0].eval()
        fast(*args[2:])
        fast.save(tmp_path)
        args[0].train()
        losses = [bits(fast(*args[2:])) for _ in range(2)]
        fast.load(tmp_path)
        again = [bits(fast(*args[2:])) for _ in range(2)]
        fast.close()
        return losses == again

    assert values(run_ranks(2, run)) == [True, True]
    names = [tensor.name for tensor in read_manifest(resolve(tmp_path)).tensors]
    assert "optimizer.state.model.0.weight.exp_avg" in names


def adding() -> models.Entry:
    """A step that updates at every other call."""
    _, (model, _, x, y) = models.small()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def step(model, optimizer, x, y, i):
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        if i % 2:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    return step, (model, optimizer, x, y, 0)


def test_a_checkpoint_after_a_call_whose_graph_has_moved_state(tmp_path: Path) -> None:
    """The graph of the first call reads no optimizer state, and wants what it reads elsewhere."""

    def run(rank: int, store: str) -> list[Any]:
        connect(rank, 2, store, 20).close()
        step, args = adding()
        fast = parallelize(step, *args, decide=scattered, timeout=20, device="cpu")
        before = [bits(fast(*args[2:4], i)) for i in range(3)]
        fast.save(tmp_path)
        after = [bits(fast(*args[2:4], i)) for i in (3, 4)]
        fast.load(tmp_path)
        again = [bits(fast(*args[2:4], i)) for i in (3, 4)]
        moved = fast.moved
        fast.close()
        return [before + after, again == after, moved > 0]

    step, (model, optimizer, x, y, _) = adding()
    expected = [bits(step(model, optimizer, x, y, i)) for i in range(5)]
    assert values(run_ranks(2, run)) == [[expected, True, True]] * 2


def unfreezing() -> models.Entry:
    """A step whose optimizer has the last layer at first; gradients of the other add up."""
    _, (model, _, x, y) = models.small()
    optimizer = torch.optim.Adam(list(model.children())[-1].parameters(), lr=1e-2)

    def step(model, optimizer, x, y):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return step, (model, optimizer, x, y)


def test_a_checkpoint_after_a_call_that_drops_gradients_of_those_before(tmp_path: Path) -> None:
    def trained(call: Any, model: Any, optimizer: Any) -> list[str]:
        losses = [call()]
        optimizer.add_param_group({"params": list(next(model.children()).parameters())})
        return [bits(loss) for loss in (*losses, call(), call())]

    def run(rank: int, store: str) -> list[Any]:
        connect(rank, 2, store, 20).close()
        step, args = unfreezing()
        fast = parallelize(step, *args, decide=scattered, timeout=20, device="cpu")
        losses = trained(lambda: fast(*args[2:]), *args[:2])
        fast.save(tmp_path)
        after = bits(fast(*args[2:]))
        fast.load(tmp_path)
        again = bits(fast(*args[2:]))
        fast.close()
        return [losses, again == after]

    step, args = unfreezing()
    expected = trained(lambda: step(*args), *args[:2])
    assert values(run_ranks(2, run)) == [[expected, True]] * 2
