"""No rank holds more than its share and a little beside it while it saves, loads or exports."""

from __future__ import annotations

import ctypes
import dataclasses
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import pardnn
from pardnn.backends.torch.checkpoint.phases import Phases
from pardnn.backends.torch.comm.world import World
from pardnn.checkpoint.directory import committed
from pardnn.errors import RankError
from pardnn.graph.ir import Graph
from pardnn.plan.plan import Plan
from pardnn.plan.state_in_place import StateInPlace
from tests.backends.torch import models
from tests.backends.torch.checkpoint.training import Rank, on_ranks, plan_of, values
from tests.backends.torch.executors import captured, perceptron

WIDTH, LAYERS = 2048, 4
LAYER_BYTES = 4 * WIDTH * WIDTH


def wide() -> models.Entry:
    """64 MiB of weights in four layers."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(model, optimizer, x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return step, (model, optimizer, torch.randn(2, WIDTH))


def memory(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(key))


def growth(call: Callable[[], object]) -> int:
    """Bytes by which the process was larger during a call than before it."""
    ctypes.CDLL(None).malloc_trim(0)  # or freed memory that is still there hides what a call takes
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    before = memory("VmRSS:")
    call()
    return memory("VmHWM:") - before


def test_saving_loading_and_exporting_take_a_chunk_or_a_tensor(tmp_path: Path) -> None:
    def body(one: Rank) -> list[int]:
        one.fast(one.args[2])
        one.fast.save(tmp_path / "warm")
        return [
            growth(lambda: one.fast.save(tmp_path / "run")),
            growth(lambda: one.fast.load(tmp_path / "run")),
            growth(lambda: one.fast.export(tmp_path / "model.safetensors")),
            growth(lambda: one.fast.save(tmp_path / "run", wait=False)),
        ]

    for saved, loaded, exported, staged in values(on_ranks(wide, plan_of(wide, 2), body)):
        assert saved < LAYER_BYTES
        assert loaded < 8 * 2**20 + LAYER_BYTES
        assert exported < 1.5 * LAYER_BYTES
        assert staged < LAYERS * LAYER_BYTES


@pytest.mark.parametrize("spare", [1 << 10, 1 << 30])
def test_a_copy_that_would_exceed_the_limit_is_not_made(spare: int, tmp_path: Path) -> None:
    """`save(wait=False)` is durable on return then, and says so."""
    cluster = pardnn.Cluster.uniform(2)
    plan = pardnn.plan(captured(perceptron), cluster, "round-robin", reserve=0.0, costs="v100")
    assert plan.predicted is not None
    memory = max(plan.predicted.peak_bytes) + spare
    plan = dataclasses.replace(plan, cluster=pardnn.Cluster.uniform(2, memory=memory))

    def body(one: Rank) -> tuple[list[str], int]:
        one.step(0)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            one.fast.save(tmp_path, wait=False)
        return [str(each.message) for each in caught], len(committed(tmp_path))

    found = values(on_ranks(perceptron, plan, body))
    told = [text for texts, _ in found for text in texts]
    assert bool(told) == (spare < 1 << 20)
    assert all("before it continues: with a copy of what it writes" in text for text in told)
    assert all(steps == 1 for texts, steps in found if texts)


def test_room_for_a_copy_is_what_the_largest_graph_on_the_state_leaves(tmp_path: Path) -> None:
    """The batch before was larger, and one as large may come while the copy is there."""
    one_device = pardnn.Cluster.uniform(1)
    plan = pardnn.plan(captured(perceptron), one_device, "single", costs="v100")

    def decide(graph: Graph, _: int, state: StateInPlace | None) -> Plan:
        return pardnn.plan(graph, one_device, "single", costs="v100", state=state)

    def body(one: Rank) -> list[int]:
        one.step(0)
        one.fast(torch.zeros(4096, 16), torch.zeros(4096, dtype=torch.int64))
        peak = one.fast._executor.program.peaks[0]
        one.step(1)
        assert one.fast._executor.program.peaks[0] < peak // 2
        limit = pardnn.Cluster.uniform(1, memory=peak + 64)
        program = one.fast._executor.program
        program.plan = dataclasses.replace(program.plan, cluster=limit)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            one.fast.save(tmp_path, wait=False)
        return [len(caught)]

    assert values(on_ranks(perceptron, plan, body, decide=decide)) == [[1]]


@pytest.mark.parametrize(
    ("error", "code"),
    [(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "E603"),
     (MemoryError(), "E603"), (RuntimeError("else"), "E601")],
)  # fmt: skip
def test_a_phase_that_runs_out_of_memory_is_told_as_such(error: Exception, code: str) -> None:
    def phase() -> None:
        raise error

    phases = Phases(World(0, 1, torch.device("cpu"), 1.0), "load/1", "loading 'runs/a'")
    with pytest.raises(RankError, match="loading 'runs/a'") as caught:
        phases.run(phase)
    assert caught.value.code == code
    assert ("more memory" in caught.value.message) == (code == "E603")
