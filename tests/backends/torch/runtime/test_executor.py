"""Ranks that run a plan give the bits of the user's own step on one device."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import pytest
import torch
from torch import nn

from pardnn.backends.torch.runtime.executor import LONG_OP_S
from pardnn.backends.torch.runtime.memory.meter import live_bytes
from pardnn.backends.torch.runtime.program import Program
from pardnn.plan.actions import Compute
from pardnn.plan.memory import memory_profiles
from pardnn.plan.plan import plan_arrays
from tests.backends.torch import models
from tests.backends.torch.executors import (
    assert_equal,
    branches,
    captured,
    executor_of,
    on_ranks,
    perceptron,
    reordered,
)
from tests.backends.torch.plans import random_plan
from tests.backends.torch.ranks import run_ranks
from tests.long_cases import long_but


@pytest.mark.parametrize("num_devices", [1, 2, 3, 4])
def test_scattered_ops_give_the_bits_of_one_device(num_devices: int) -> None:
    graph = captured(perceptron)
    plan = random_plan(graph, num_devices, seed=num_devices)
    outcomes = assert_equal(perceptron, plan)
    made = [t for op in graph.ops for t in op.outputs]
    tensors = {t.name for t in made if not (t.dtype or "").startswith("host")}
    for rank, (*_, arrived, counted) in enumerate(outcome.value for outcome in outcomes):
        taken = {m.tensor for m in plan.messages if m.target == rank} & tensors
        assert arrived == sorted(taken), "messages arrive in their places"
        assert counted == [0] * len(plan.order[rank]), "kernels' code is counted in the first step"


#: Of different shape and training: rotary attention, batch norm, tied weights with dropout, two
#: optimizers in a step, gradient accumulation with clipping.
MODELS = ["accumulation", "gan", "gpt2", "inception", "llama", "lstm", "mixture", "resnet",
          "two_tower"]  # fmt: skip


@pytest.mark.parametrize("name", long_but({"accumulation", "gpt2", "lstm", "resnet"}, MODELS))
def test_models_give_the_bits_of_one_device(name: str) -> None:
    factory = models.MODELS[name]
    graph = captured(factory)
    num_devices = 2 + len(name) % 3
    plan = random_plan(graph, num_devices, seed=1, num_clumps=40)
    for outcome in assert_equal(factory, plan):
        _, _, measured, predicted, *_ = outcome.value
        host = sum(8 for op in graph.ops for t in op.outputs if (t.dtype or "").startswith("host"))
        # Some ops allocate a few elements more than their result has.
        assert predicted - host <= measured <= 1.01 * predicted


def test_scattered_gpt2_gives_the_bits_of_one_device() -> None:
    factory = models.MODELS["gpt2"]
    assert_equal(factory, random_plan(captured(factory), 2, seed=5))


def test_a_schedule_between_steps_is_followed() -> None:
    def decay(args: tuple[Any, ...], i: int) -> None:
        for group in args[1].param_groups:
            group["lr"] *= 0.5 + 0.1 * i

    plan = random_plan(captured(perceptron), 3, seed=7)
    changed = assert_equal(perceptron, plan, between=decay)
    assert changed[0].value[0] != on_ranks(perceptron, plan)[0].value[0]


def test_random_ops_out_of_the_order_of_the_step_draw_the_same_numbers() -> None:
    """A plan may run two dropouts of independent branches in either order."""
    graph = captured(branches)
    drawing = [op.name for op in graph.ops if "bernoulli" in op.kind or "dropout" in op.kind]
    assert len(drawing) == 2
    plan = random_plan(graph, 1)
    (order,) = plan.order
    swapped = reordered(graph, order, late=drawing[0], early=drawing[1])
    assert_equal(branches, random_plan(graph, 2, seed=3))
    # An idle second rank, so that the generator is followed at all.
    plan = dataclasses.replace(plan, order=(swapped, ()))
    assert_equal(branches, plan)


@pytest.mark.parametrize("steps", [300, pytest.param(1000, marks=pytest.mark.long)])
def test_many_steps_with_buffers_in_use(steps: int) -> None:
    """In-place updates of parameters that are being sent, a thousand times (case 63)."""
    outcomes = assert_equal(tiny, random_plan(captured(tiny), 2, seed=2, num_clumps=5), steps=steps)
    assert len(outcomes[0].value[0]) == steps


def tiny() -> models.Entry:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)

    def step(model: Any, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step, (model, torch.optim.SGD(model.parameters(), lr=1e-3), torch.randn(2, 3))


def test_memory_is_released_where_the_plan_says() -> None:
    """The environment holds, at every action, exactly what the curve of the plan counts."""
    factory = models.MODELS["resnet"]
    graph = captured(factory)
    plan = random_plan(graph, 2, seed=4, num_clumps=12)
    program = Program(graph, plan)
    curves = memory_profiles(graph, plan_arrays(graph, plan))

    def body(rank: int, store: str) -> list[Any]:
        executor, binding, _ = executor_of(factory, program, rank, store)
        held: list[int] = []
        names = {op.name: op for op in graph.ops}

        def noting(call: Any, action: Any) -> Any:
            def run(env: dict[str, Any]) -> None:
                call(env)
                if type(action).__name__ == "Compute":
                    held.append(live_bytes(env) + names[action.op].workspace)

            return run

        executor._calls = [
            noting(call, action)
            for call, action in zip(executor._calls, executor._actions, strict=True)
        ]
        executor.step(binding.batch_inputs(binding.example()))
        return held

    host = {op.name for op in graph.ops for t in op.outputs if (t.dtype or "").startswith("host")}
    for outcome in run_ranks(2, body):
        assert outcome.status == 0, outcome.error
        assert len(outcome.value) == len(curves[outcome.rank])
        for measured, predicted in zip(outcome.value, curves[outcome.rank], strict=True):
            assert predicted - 8 * len(host) <= measured <= predicted


def test_messages_move_beside_ops_that_took_long_in_the_first_step() -> None:
    program = Program(captured(perceptron), random_plan(captured(perceptron), 2, seed=1))

    def body(rank: int, store: str) -> list[bool]:
        executor, binding, _ = executor_of(perceptron, program, rank, store)
        assert executor.world.channel is not None
        ops = [i for i, each in enumerate(executor._actions) if isinstance(each, Compute)]
        long, short = ops[-2:]
        call = executor._calls[long]

        def slow(env: dict[str, Any]) -> None:
            time.sleep(2 * LONG_OP_S)
            call(env)

        executor._calls[long] = slow
        before = list(executor._calls)
        executor.step(binding.batch_inputs(binding.example()))
        return [executor._calls[i] is before[i] for i in (long, short)]

    for outcome in run_ranks(2, body):
        assert outcome.value == [False, True], outcome.error


def test_a_changed_setting_is_refused() -> None:
    plan = random_plan(captured(perceptron), 2, seed=1)

    def decay(args: tuple[Any, ...], i: int) -> None:
        args[1].param_groups[0]["amsgrad"] = True

    for outcome in on_ranks(perceptron, plan, between=decay):
        assert outcome.status == 5
        assert outcome.code == "E509"
        assert "amsgrad" in outcome.error["message"]
