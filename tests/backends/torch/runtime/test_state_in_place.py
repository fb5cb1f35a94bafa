"""Training goes on under a second plan, on the state that the first one left where it is."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import pardnn
from pardnn.backends.torch.capture.result import loss_of
from pardnn.backends.torch.runtime.binding import Binding
from pardnn.backends.torch.runtime.program import Program
from pardnn.backends.torch.runtime.start_rank import start
from pardnn.graph.ir import Graph
from pardnn.plan.plan import Plan
from pardnn.plan.state_layout import state_layout
from tests.backends.torch import models
from tests.backends.torch.executors import bits, captured
from tests.backends.torch.ranks import connect, run_ranks

STEPS = 2
#: Residents of each rank by name: dtype, shape and bytes in hex.
Handed = list[dict[str, tuple[str, list[int], str]]]


def gpt2(length: int) -> models.Entry:
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=1, n_head=2, n_embd=16, vocab_size=64, n_positions=16, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config).train()
    tokens = torch.arange(2 * length).reshape(2, length)
    return models.language_step, (model, torch.optim.AdamW(model.parameters()), tokens)


def perceptron(batch: int, drop: float = 0.0, step: Any = models.classify_step) -> models.Entry:
    torch.manual_seed(0)
    layers = [nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 8)]
    model = nn.Sequential(*layers, *([nn.Dropout(drop)] if drop else [])).double()
    x, y = torch.linspace(-1, 1, batch * 16).reshape(batch, 16).double(), torch.arange(batch) % 8
    return step, (model, torch.optim.Adam(model.parameters(), lr=1e-2), x, y)


def halved_step(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Another step function of the same model."""
    return models.train(model, optimizer, nn.functional.cross_entropy(model(x), y) / 2)


gpt2_8, gpt2_6, gpt2_12 = (functools.partial(gpt2, n) for n in (8, 6, 12))
perceptron_8, perceptron_4 = (functools.partial(perceptron, n) for n in (8, 4))
dropping_8, dropping_4 = (functools.partial(perceptron, n, 0.3) for n in (8, 4))
halved_8 = functools.partial(perceptron, 8, 0.3, halved_step)
Factory = Callable[[], models.Entry]


def plan_of(graph: Graph, algorithm: str, ranks: int, state: Any = None) -> Plan:
    cluster = pardnn.Cluster.uniform(ranks)
    options: Any = {"costs": "cpu", "state": state}
    if algorithm == "tofu":
        options["objective"] = "bytes"
    return pardnn.plan(graph, cluster, algorithm, **options)


def eager(factories: list[Factory]) -> list[list[float]]:
    """Losses of one model under one step after the other."""

    def body(_rank: int, _store: str) -> list[Any]:
        first, found = factories[0](), []
        for phase, factory in enumerate(factories):
            step, args = factory()
            args = (*first[1][: len(first[1]) - _batch(args)], *args[len(args) - _batch(args) :])
            torch.manual_seed(phase)
            found.append([loss_of(step(*args)).item() for _ in range(STEPS)])
        return found

    (outcome,) = run_ranks(1, body)
    assert outcome.status == 0, outcome.error
    return outcome.value


def _batch(args: tuple[Any, ...]) -> int:
    return sum(isinstance(arg, torch.Tensor) for arg in args)


def on_ranks(
    factory: Factory, plan: Plan, phase: int, handed: Handed | None
) -> tuple[list[float], Handed]:
    """Losses of some steps, and what each rank is left with; it starts with what it was left."""
    program = Program(captured(factory), plan)

    def body(rank: int, store: str) -> Any:
        step, args = factory()
        world = connect(rank, plan.num_devices, store, 10.0)
        binding = Binding(step, args, program.whole, torch.device("cpu"))
        mine = program.residents(rank)
        values = binding.live_values(mine)
        if handed is not None:
            assert {op.name for op in mine} <= handed[rank].keys()
            values = {op.name: _tensor(*handed[rank][op.name]) for op in mine}
        executor = start(program, world, lambda: values)
        torch.manual_seed(phase)
        batch = binding.batch_inputs(binding.example())
        losses = [executor.step(batch).item() for _ in range(STEPS)]
        left = {op.name: executor.live_values[op.outputs[0].name] for op in mine}
        executor.world.close()
        return losses, {
            name: (str(value.dtype).removeprefix("torch."), list(value.shape), bits(value))
            for name, value in left.items()
        }

    outcomes = run_ranks(plan.num_devices, body)
    for outcome in outcomes:
        assert outcome.status == 0, outcome.error
    assert len({tuple(outcome.value[0]) for outcome in outcomes}) == 1
    return outcomes[0].value[0], [outcome.value[1] for outcome in outcomes]


def _tensor(dtype: str, shape: list[int], data: str) -> torch.Tensor:
    raw = torch.frombuffer(bytearray.fromhex(data), dtype=torch.uint8)
    return raw.view(getattr(torch, dtype)).reshape(shape).clone()


def assert_goes_on(factories: list[Factory], algorithm: str, ranks: int, within: float) -> None:
    first = captured(factories[0])
    plan = plan_of(first, algorithm, ranks)
    state, handed, found = None, None, []
    for phase, factory in enumerate(factories):
        graph = captured(factory)
        if state is not None:
            plan = plan_of(graph, "tofu" if algorithm == "tofu" else "pardnn", ranks, state)
            pardnn.check_state_kept(graph, plan, state)
        state = pardnn.state_in_place(graph, plan, before=state)
        losses, left = on_ranks(factory, plan, phase, handed)
        handed = [{**old, **new} for old, new in zip(handed or left, left, strict=True)]
        found.append(losses)
    for here, expected in zip(found, eager(factories), strict=True):
        assert here == pytest.approx(expected, rel=0, abs=within)


def test_whole_tensors_stay_and_keep_every_bit() -> None:
    assert_goes_on([dropping_8, dropping_4, halved_8], "round-robin", 2, 0.0)


def test_cut_tensors_stay() -> None:
    assert_goes_on([perceptron_8, perceptron_4, perceptron_8], "tofu", 4, 1e-10)


@pytest.mark.parametrize("algorithm", ["pardnn", "tofu"])
def test_plans_of_other_lengths_and_steps(algorithm: str) -> None:
    """All have each tensor where the first has it."""
    graph = captured(gpt2_8)
    plan = plan_of(graph, algorithm, 4)
    state = pardnn.state_in_place(graph, plan)
    for factory in (gpt2_6, gpt2_12):
        other = captured(factory)
        kept = plan_of(other, algorithm, 4, state)
        layout = state_layout(other, kept)
        assert layout.items() <= state.layout.items()
        assert len(layout) > 40


def test_what_is_kept_is_not_what_another_plan_does() -> None:
    """The plan for another length that is made freely has tensors elsewhere."""
    graph, other = captured(gpt2_8), captured(gpt2_6)
    state = pardnn.state_in_place(graph, plan_of(graph, "round-robin", 2))
    free = dataclasses.replace(plan_of(other, "heft", 2), cluster=None)
    with pytest.raises(pardnn.PardnnError, match="moves state"):
        pardnn.check_state_kept(other, free, state)
