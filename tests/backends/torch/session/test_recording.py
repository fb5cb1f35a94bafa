"""What ranks measure of each op while they train, and the file that it goes to."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pardnn
from pardnn.backends.torch.capture.capture import capture
from pardnn.backends.torch.parallelize import parallelize
from pardnn.backends.torch.profile.recorder import Recorder
from pardnn.errors import FileError
from pardnn.plan.actions import Compute, Free
from pardnn.plan.run_record import read_run
from tests.backends.torch.plans import random_plan
from tests.backends.torch.ranks import connect, run_ranks


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss


def made() -> tuple[nn.Module, torch.optim.Optimizer, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    return model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(4, 6)


def test_two_ranks_write_one_record(tmp_path: Path) -> None:
    graph = capture(step, *made())
    plan = random_plan(graph, 2, seed=1)
    path = tmp_path / "run.json"

    def body(rank: int, store: str) -> Any:
        connect(rank, 2, store, 20)
        model, optimizer, x = made()
        fast = parallelize(step, model, optimizer, x, plan=plan, record=path)
        there = []
        for _ in range(4):
            fast(x).item()
            there.append(path.exists())
        fast.close()
        return there

    outcomes = run_ranks(2, body)
    assert [outcome.status for outcome in outcomes] == [0, 0], outcomes
    assert outcomes[0].value == [False, True, True, True]  # the first step is not recorded
    record = read_run(path, plan)
    assert [rank.op for rank in record.ranks] == list(plan.order)
    assert [len(rank.step_s) for rank in record.ranks] == [2, 2]
    moved = sorted(message.tensor for message in plan.messages)  # each waits for both of its ends
    assert [sorted(rank.tensor) for rank in record.ranks] == [moved, moved]
    assert json.loads(path.read_text())["graph_fingerprint"] == plan.graph_fingerprint


def test_a_record_that_cannot_be_written_is_refused_at_the_start(tmp_path: Path) -> None:
    def body(rank: int, store: str) -> Any:
        with pytest.raises(FileError, match="cannot write"):
            pardnn.parallelize(step, *made(), record=tmp_path / "nowhere" / "run.json")
        return True

    assert run_ranks(1, body)[0].value is True


def test_medians_leave_out_what_is_no_op() -> None:
    recorder = Recorder([Compute("a"), Free(("x",)), Compute("b")], [])
    assert recorder.times(7)["op"] == []
    for took in (1.0, 9.0, 2.0):
        recorder.end([10.0, 10.0 + took, 20.0, 25.0])
    assert recorder.times(7) == {
        "step_s": [15.0] * 3, "peak_bytes": 7, "op": ["a", "b"], "start_s": [0.0, 10.0],
        "seconds": [2.0, 5.0], "tensor": [], "wait_start_s": [], "wait_s": [],
    }  # fmt: skip


def test_a_stamp_costs_little() -> None:
    """2 % of an op of 10 us, were it all of an action."""
    stamps = Recorder([], []).begin()
    begin = time.process_time()
    for _ in range(100_000):
        stamps.append(time.perf_counter())
    assert time.process_time() - begin < 100_000 * 0.5e-6
