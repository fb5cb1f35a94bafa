"""Captured graphs, run naively, give the bits of the eager step."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from pardnn.backends.torch.capture.capture import capture
from pardnn.backends.torch.capture.result import loss_of
from pardnn.backends.torch.user_step.sources import batch_indices, sources
from pardnn.graph.ir import Graph
from tests.backends.torch import models
from tests.backends.torch.models import small
from tests.long_cases import long_but
from tests.reference.interpreter import PERSISTENT, Interpreter, unordered_writes

STEPS = 5
Between = Callable[[Any, tuple[Any, ...], int], None]


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def train_eagerly(factory, between: Between | None) -> tuple[list[bytes], Any, tuple[Any, ...]]:
    step, args = factory()
    batch = batch_indices(args)
    torch.manual_seed(99)
    losses = []
    for i in range(STEPS):
        state = torch.get_rng_state()
        now = [models.next_batch(a, i) if k in batch else a for k, a in enumerate(args)]
        torch.set_rng_state(state)
        losses.append(bits(loss_of(step(*now))))
        if between is not None:
            between(step, args, i)
    return losses, step, args


def train_captured(
    factory, between: Between | None, order: int | None
) -> tuple[list[bytes], Interpreter, Graph]:
    step, args = factory()
    graph = capture(step, *args)
    batch = batch_indices(args)
    running = Interpreter(graph, step, args, order)
    torch.manual_seed(99)
    losses = []
    for i in range(STEPS):
        state = torch.get_rng_state()
        now = [models.next_batch(args[k], i) for k in batch]
        torch.set_rng_state(state)
        losses.append(bits(running.run(*now, check=i == 0)))
        if between is not None:
            between(step, args, i)
    return losses, running, graph


def assert_equal(factory, between: Between | None = None, order: int | None = None) -> Graph:
    expected, step, args = train_eagerly(factory, between)
    losses, running, graph = train_captured(factory, between, order)
    assert losses == expected
    live = {source.name: source for source in sources(step, args, graph)}
    compared = 0
    for op in graph.ops:
        if op.kind in PERSISTENT:
            value = live[op.name].get()
            if value is not None:
                assert torch.equal(running.state[op.name], value.detach()), op.name
                compared += 1
    assert compared
    assert len(set(losses)) > 1
    assert unordered_writes(graph) == []
    return graph


#: Shapes of steps that no other shows: rotary attention, batch norm, recurrence, two optimizers.
QUICK = {"resnet", "mixture", "gan", "accumulation"}


@pytest.mark.parametrize("name", long_but(QUICK, models.MODELS))
def test_five_steps_are_bitwise_equal(name):
    assert_equal(models.MODELS[name])


@pytest.mark.parametrize("name", ["gpt2", *long_but((), ["resnet", "lstm", "gan", "accumulation"])])
def test_any_topological_order_gives_the_same_bits(name):
    assert_equal(models.MODELS[name], order=7)


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd-foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "sgd-maximize": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, maximize=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adam-foreach": lambda p: torch.optim.Adam(p, lr=0.01, foreach=True),
    "adam-amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, foreach=True),
    "adam-decay": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "rmsprop-foreach": lambda p: torch.optim.RMSprop(p, lr=0.01, foreach=True),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "tensor-lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01)),
    "groups": lambda p: torch.optim.AdamW(
        [{"params": p[:2], "weight_decay": 0.0}, {"params": p[2:], "lr": 0.02}],
        lr=0.01,
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name):
    assert_equal(lambda: small(OPTIMIZERS[name]))


def changing_rate(_step, args, i):
    for group in args[1].param_groups:
        group["lr"] = 0.01 * (i + 1) ** -0.5


@pytest.mark.parametrize("name", ["sgd-foreach", "adam", "adamw-foreach", "adamw-fused", "groups"])
def test_a_learning_rate_that_changes_stays_live(name):
    graph = assert_equal(lambda: small(OPTIMIZERS[name]), between=changing_rate)
    numbers = [op for op in graph.ops if op.name.endswith(".lr")]
    assert numbers
    assert all(op.kind == "input" and op.arguments["guard"] is None for op in numbers)


def test_a_learning_rate_may_start_from_zero():
    assert_equal(lambda: small(lambda p: torch.optim.Adam(p, lr=0.0)), between=changing_rate)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_one_cycle_changes_rate_and_betas():
    schedules = {}

    def factory():
        step, args = small(lambda p: torch.optim.Adam(p, lr=0.01))
        schedule = torch.optim.lr_scheduler.OneCycleLR(args[1], max_lr=0.1, total_steps=20)
        schedules[id(args[1])] = schedule
        return step, args

    def between(_step, args, _i):
        schedules[id(args[1])].step()

    graph = assert_equal(factory, between=between)
    assert any(op.name == "optimizer.param_groups.0.betas.0" for op in graph.ops)


def test_state_that_exists_already_is_continued():
    def factory():
        step, args = small(OPTIMIZERS["adam"])
        for _ in range(2):
            step(*args)
        return step, args

    graph = assert_equal(factory)
    assert not any(op.arguments for op in graph.ops if op.kind == "state")


def test_capture_twice_gives_the_same_bytes():
    from pardnn.graph.file import graph_from_json, graph_to_json

    step, args = models.gpt2()
    one = graph_to_json(capture(step, *args))
    step, args = models.gpt2()
    assert one == graph_to_json(capture(step, *args))
    assert graph_to_json(graph_from_json(one)) == one


def test_a_copied_model_gives_the_same_graph():
    step, args = models.resnet()
    assert capture(step, *copy.deepcopy(args)).ops == capture(step, *args).ops
