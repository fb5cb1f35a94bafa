"""Ranks go on to the next step before the loss has come; reading it waits."""

from __future__ import annotations

import copy
import dataclasses
import io
import os
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from pardnn.backends.torch.runtime.program import Program
from pardnn.plan.check import check_plan
from pardnn.plan.file import stamped
from pardnn.plan.plan import Plan, plan_from_arrays
from tests.backends.torch.executors import captured, executor_of
from tests.backends.torch.plans import machine
from tests.backends.torch.ranks import run_ranks
from tests.place.machines import schedule


def frozen_encoder() -> Any:
    """A model of which rank 0 has the part that is not trained, and rank 1 all else."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 2))

    def step(model: Any, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    return step, (model, optimizer, torch.randn(3, 4))


def encoder_first() -> Plan:
    """Return the plan that places the encoder, and what it reads, on device 0."""
    graph = captured(frozen_encoder)
    names = [op.name for op in graph.ops]
    first = {"model.0.weight", "model.0.bias", "x"}
    first |= {op.name for op in graph.ops if op.module == "model.0"}
    place = np.array([0 if name in first else 1 for name in names])
    plan = plan_from_arrays(graph, schedule(graph, machine(len(names), 2), place))
    plan = stamped(dataclasses.replace(plan), graph)
    check_plan(graph, plan)
    return plan


def wait_for(path: Path) -> None:
    end = time.monotonic() + 20.0
    while not path.exists() and time.monotonic() < end:
        time.sleep(0.01)
    assert path.exists()


def slow_end(executor: Any, path: Path) -> None:
    """Let the last action of a rank's list wait for a file."""
    last = executor._calls[-1]

    def late(env: Any) -> None:
        wait_for(path)
        last(env)
        path.with_name("ended").touch()

    executor._calls[-1] = late


def test_a_rank_goes_on_while_another_one_is_in_its_step(tmp_path: Path) -> None:
    program = Program(captured(frozen_encoder), encoder_first())

    def body(rank: int, store: str) -> Any:
        executor, binding, _ = executor_of(frozen_encoder, program, rank, store)
        if rank == 1:
            slow_end(executor, tmp_path / "go")
        loss = executor.step(binding.batch_inputs(binding.example()))
        kept, is_pending = loss.detach(), type(loss) is not torch.Tensor
        (tmp_path / "go").touch()
        text = f"{loss}"
        if rank == 1:
            loss.zero_()  # the caller's own: what the others get is not changed
        return [is_pending, text, type(loss) is torch.Tensor, f"{kept}"]

    first, second = run_ranks(2, body)
    assert first.status == second.status == 0, (first.error, second.error)
    assert first.value[0]
    assert not second.value[0]
    assert first.value[1] == second.value[1] != "nan"
    assert first.value[2]
    assert first.value[3] == first.value[1]


def saved(loss: torch.Tensor) -> float:
    file = io.BytesIO()
    torch.save({"loss": loss}, file)
    file.seek(0)
    return torch.load(file)["loss"].item()


READ = {
    "copied": lambda loss: copy.deepcopy([loss])[0].item(),
    "saved": saved,
    "by a factory": lambda loss: torch.tensor(loss).item(),
    "as a number of a factory": lambda loss: torch.full((1,), loss).item(),
    "as a number of an op": lambda loss: torch.zeros(1).add(torch.ones(1), alpha=loss).item(),
}


def test_a_loss_is_waited_for_however_it_is_read() -> None:
    """Some of torch's own code reads a tensor past `__torch_function__`: NaN, without a word."""
    program = Program(captured(frozen_encoder), encoder_first())

    def body(rank: int, store: str) -> Any:
        executor, binding, _ = executor_of(frozen_encoder, program, rank, store)
        found = []
        for read in READ.values():
            loss = executor.step(binding.batch_inputs(binding.example()))
            with warnings.catch_warnings(action="ignore"):  # what `detach` and `clone` would do
                found.append([type(loss) is torch.Tensor, read(loss), loss.item()])
        return found

    first, second = run_ranks(2, body)
    assert first.status == second.status == 0, (first.error, second.error)
    for way, (is_plain, value, loss), (_, _, expected) in zip(
        READ, first.value, second.value, strict=True
    ):
        assert not is_plain
        assert value == loss == expected, way


def test_no_rank_is_two_steps_ahead(tmp_path: Path) -> None:
    """The end of the second step waits for the loss of the first; unread losses come, too."""
    program = Program(captured(frozen_encoder), encoder_first())

    def body(rank: int, store: str) -> Any:
        executor, binding, _ = executor_of(frozen_encoder, program, rank, store)
        if rank == 1:
            slow_end(executor, tmp_path / "go")
        losses = []
        for i in range(3):
            if rank == 0 and i == 1:
                assert not (tmp_path / "ended").exists()
                (tmp_path / "go").touch()
            losses.append(executor.step(binding.batch_inputs(binding.example())))
            if rank == 0 and i == 1:
                assert (tmp_path / "ended").exists()
        return [loss.item() for loss in losses]

    first, second = run_ranks(2, body)
    assert first.status == second.status == 0, (first.error, second.error)
    assert first.value == second.value
    assert len(set(first.value)) == 3


def test_who_reads_the_loss_of_a_rank_that_has_ended_is_told(tmp_path: Path) -> None:
    program = Program(captured(frozen_encoder), encoder_first())

    def body(rank: int, store: str) -> Any:
        executor, binding, _ = executor_of(frozen_encoder, program, rank, store, timeout_s=3.0)
        if rank == 1:
            executor._calls[-1] = lambda _env: os._exit(3)
        loss = executor.step(binding.batch_inputs(binding.example()))
        return loss.item()

    first, second = run_ranks(2, body)
    assert second.status == 3
    assert first.code == "E602"
    assert "rank 1" in first.error["message"]
