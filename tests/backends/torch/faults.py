"""Ranks that fail on purpose, and what the others must report."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from pardnn.backends.torch.runtime.executor import Executor
from pardnn.backends.torch.runtime.program import Program
from pardnn.plan.plan import Plan
from tests.backends.torch import models
from tests.backends.torch.executors import captured, executor_of
from tests.backends.torch.plans import random_plan
from tests.backends.torch.ranks import Outcome, run_ranks

TIMEOUT_S = 1.5
#: What a failure may take on top of the timeout (promise: 10 s).
MARGIN_S = 8.0
Fault = Callable[[Executor], None]


def chain() -> models.Entry:
    """Layer after layer, so that ranks wait for each other in a chain."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return models.classify_step, (model, optimizer, torch.randn(4, 8), torch.randint(3, (4,)))


def a_plan(num_devices: int = 2, seed: int = 1) -> Plan:
    return random_plan(captured(chain), num_devices, seed=seed)


def run_with_faults(
    faults: dict[int, Fault],
    *,
    num_devices: int = 2,
    steps: int = 3,
    plan: Plan | None = None,
    programs: dict[int, Program] | None = None,
    timeout_s: float = TIMEOUT_S,
    headers: bool = False,
    checked: bool = True,
) -> list[Outcome]:
    """Run the chain; the fault of each rank that has one is planted once it is ready."""
    plan = plan or a_plan(num_devices)
    program = Program(captured(chain), plan)
    programs = programs or {}

    def body(rank: int, store: str) -> Any:
        mine = programs.get(rank, program)
        executor, binding, _ = executor_of(
            chain, mine, rank, store, timeout_s, checked=checked, headers=headers
        )
        faults.get(rank, lambda executor: None)(executor)
        for _ in range(steps):
            executor.step(binding.batch_inputs(binding.example()))
        executor.world.close()
        return executor.waits_s

    return run_ranks(num_devices, body, limit_s=timeout_s + 5)


def assert_blamed(outcomes: list[Outcome], rank: int, code: str, within_s: float) -> None:
    """All ranks but the dead one end non-zero, in time, and name `rank`."""
    for outcome in outcomes:
        assert outcome.status is not None, f"rank {outcome.rank} hung"
        assert outcome.seconds < within_s
        if outcome.rank == rank and not outcome.error:
            continue
        assert outcome.status != 0
        assert outcome.code == code, outcome.error
        assert outcome.error["details"]["first_failing_rank"] == rank, outcome.error["message"]
        assert f"rank {rank}" in outcome.error["message"].lower()


def at(fraction: float, action: Callable[[], Any], step: int = 1) -> Fault:
    """Do something at this fraction of a rank's action list, in one step."""

    def plant(executor: Executor) -> None:
        index = int(fraction * len(executor._calls))
        call = executor._calls[index]

        def failing(env: dict[str, Any]) -> None:
            if len(executor.step_s) == step:
                action()
            call(env)

        executor._calls[index] = failing

    return plant


def raising(error: Exception) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail
