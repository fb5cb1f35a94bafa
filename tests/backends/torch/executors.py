"""Executors for tests: entry points as graphs, steps on forked ranks, the same steps eager."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from pardnn.backends.torch.capture.capture import capture
from pardnn.backends.torch.capture.result import loss_of
from pardnn.backends.torch.comm.channel import Channel
from pardnn.backends.torch.comm.wire_format import MessageSpec
from pardnn.backends.torch.ops import out_forms
from pardnn.backends.torch.runtime.binding import Binding
from pardnn.backends.torch.runtime.executor import Executor
from pardnn.backends.torch.runtime.memory.fixed_places import choose_memory
from pardnn.backends.torch.runtime.memory.limits import KernelCode
from pardnn.backends.torch.runtime.program import Program
from pardnn.backends.torch.runtime.start_rank import start
from pardnn.backends.torch.user_step.sources import batch_indices
from pardnn.graph.ir import Graph
from pardnn.plan.plan import Plan
from tests.backends.torch import models
from tests.backends.torch.ranks import Outcome, connect, run_ranks

STEPS = 5
Factory = Callable[[], models.Entry]
Between = Callable[[tuple[Any, ...], int], None]


def bits(tensor: torch.Tensor) -> str:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes().hex()


def batches(args: tuple[Any, ...], indices: tuple[int, ...], i: int) -> list[Any]:
    """The batch of step i; drawing it leaves the generator as it was."""
    state = torch.get_rng_state()
    values = [models.next_batch(args[k], i) for k in indices]
    torch.set_rng_state(state)
    return values


@functools.cache
def captured(factory: Factory) -> Graph:
    step, args = factory()
    return capture(step, *args)


def eager(factory: Factory, between: Between | None, steps: int) -> list[Any]:
    """Losses of the user's own step, and the generator's last state; in a process of its own."""

    def body(_rank: int, _store: str) -> list[Any]:
        step, args = factory()
        indices = batch_indices(args)
        torch.manual_seed(99)
        losses = []
        for i in range(steps):
            given = dict(zip(indices, batches(args, indices, i), strict=True))
            now = [given.get(k, arg) for k, arg in enumerate(args)]
            losses.append(bits(loss_of(step(*now))))
            if between is not None:
                between(args, i)
        return [losses, bits(torch.get_rng_state())]

    (outcome,) = run_ranks(1, body)
    assert outcome.status == 0, outcome.error
    return outcome.value


def executor_of(
    factory: Factory,
    program: Program,
    rank: int,
    store: str,
    timeout_s: float = 10.0,
    headers: bool = False,
    **kw: Any,
) -> tuple[Executor, Binding, tuple[Any, ...]]:
    step, args = factory()
    world = connect(rank, program.plan.num_devices, store, timeout_s, headers=headers)
    binding = Binding(step, args, program.whole, torch.device("cpu"))
    mine = program.residents(rank)
    executor = start(program, world, lambda: binding.live_values(mine), **kw)
    return executor, binding, args


def on_ranks(
    factory: Factory, plan: Plan, between: Between | None = None, steps: int = STEPS
) -> list[Outcome]:
    program = Program(captured(factory), plan)

    def body(rank: int, store: str) -> list[Any]:
        out_forms.LEAST_BYTES = 1  # all that can have a place have one
        allocate, arrived, counted = Channel.allocate, list[str](), list[int]()

        def allocating(self: Channel, spec: MessageSpec, place: Any = None) -> Any:
            arrived.extend([spec.tensor] if place is not None else [])
            return allocate(self, spec, place)

        Channel.allocate = allocating
        KernelCode.count = lambda _self: counted.append(len(losses))
        executor, binding, args = executor_of(factory, program, rank, store)
        executor.layout = choose_memory(program, rank, None, torch.device("cpu"))
        indices = tuple(k for k, arg in enumerate(args) if any(arg is e for e in binding.example()))
        torch.manual_seed(99)
        losses = list[Any]()
        for i in range(steps):
            losses.append(bits(executor.step(binding.batch_inputs(batches(args, indices, i)))))
            binding.end_step()
            if between is not None:
                between(args, i)
        executor.world.close()
        peaks = [executor.peak_bytes, program.peaks[rank]]
        return [losses, bits(torch.get_rng_state()), *peaks, sorted({*arrived}), counted]

    return run_ranks(plan.num_devices, body)


def assert_equal(
    factory: Factory, plan: Plan, between: Between | None = None, steps: int = STEPS
) -> list[Outcome]:
    expected = eager(factory, between, steps)
    outcomes = on_ranks(factory, plan, between, steps)
    for outcome in outcomes:
        assert outcome.status == 0, outcome.error
        assert outcome.value[0] == expected[0], "losses differ"
        assert outcome.value[1] == expected[1], "the generator ends elsewhere"
    return outcomes


def perceptron(**settings: Any) -> models.Entry:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.3), nn.ReLU(), nn.Linear(32, 8))
    optimizer = torch.optim.Adam(model.parameters(), **{"lr": 1e-2} | settings)
    x, y = torch.randn(4, 16), torch.randint(8, (4,))
    return models.classify_step, (model, optimizer, x, y)


def misaligned() -> models.Entry:
    """Products with matrices that begin between multiples of 64 bytes: their last bits tell."""
    torch.manual_seed(0)
    model = nn.Linear(8, 41)

    def step(model: Any, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        rows = model(x)  # 38, 41
        loss = (rows[1:, 1:] @ rows[0, 1:]).square().mean() + (rows[2:, 3:] @ rows[1, 3:]).mean()
        loss.backward()
        optimizer.step()
        return loss

    return step, (model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(38, 8))


def branches() -> models.Entry:
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])

    def step(model: Any, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        a = nn.functional.dropout(model[0](x), 0.4)
        b = nn.functional.dropout(model[1](x), 0.2)
        loss = (a * b).sum()
        loss.backward()
        optimizer.step()
        return loss

    return step, (model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(5, 6))


def reordered(graph: Graph, order: tuple[str, ...], late: str, early: str) -> tuple[str, ...]:
    """Move `early`, with what it needs, before `late`."""
    ops = {op.name: op for op in graph.ops}
    made_by = {tensor.name: op.name for op in graph.ops for tensor in op.outputs}
    needed: set[str] = set()
    stack = [early]
    while stack:
        name = stack.pop()
        needed.add(name)
        stack += [*(made_by[t] for t in ops[name].inputs), *ops[name].after]
    assert late not in needed
    at = order.index(late)
    moved = [name for name in order[at:] if name in needed]
    rest = [name for name in order[at:] if name not in needed]
    return (*order[:at], *moved, *rest)
