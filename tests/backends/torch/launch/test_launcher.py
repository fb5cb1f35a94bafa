"""`run`, and `parallelize` in a script under torchrun."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch

import pardnn
from pardnn.api.run import run_checked
from pardnn.backends.torch.capture.capture import capture
from pardnn.backends.torch.launch.launcher import run_plan
from pardnn.errors import PardnnError, RankError, StuckError
from pardnn.graph.file import write_graph
from pardnn.graph.ir import Graph
from pardnn.plan.file import write_plan
from pardnn.plan.memory import peak_bytes
from pardnn.plan.plan import Plan, plan_arrays
from tests.backends.torch import entry_points
from tests.backends.torch.listening import watched
from tests.backends.torch.plans import random_plan

ENTRY = str(Path(entry_points.__file__).resolve())
ROOT = Path(pardnn.__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def _ranks_find_pardnn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))


def graph_of(function: str) -> Graph:
    step, args = getattr(entry_points, function)()
    return capture(step, *args)


def ranks_of(launcher: int) -> set[int]:
    """Process ids of the ranks that a launcher has started; others may run on this machine."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            stat = (path.parent / "stat").read_text(errors="replace")
            is_child = int(stat.rpartition(")")[2].split()[1]) == launcher
            if is_child and b"launch.worker" in path.read_bytes():
                found.add(int(path.parent.name))
    return found


def is_rank(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return b"launch.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def test_two_ranks_train_as_the_users_own_step(capfd: pytest.CaptureFixture[str]) -> None:
    graph = graph_of("scheduled")
    plan = random_plan(graph, 2, seed=3)
    with watched() as addresses:
        result = run_plan(
            f"{ENTRY}:scheduled", graph, plan, steps=5, timeout=20, verify=True, record=True
        )
    # A schedule within the step warns of nothing.
    assert "lr_scheduler" not in capfd.readouterr().err
    assert addresses == {"127.0.0.1"}  # gloo's; no other machine reaches a rank
    assert len(result.losses) == len(result.step_s) == 5
    assert result.losses == result.reference_losses
    assert result.losses[-1] < result.losses[0]
    # Four parameters, and the step count and both moments of each.
    assert result.state == {
        "tensors": 16, "differing": 0, "largest_difference": 0.0, "worst": None,
    }  # fmt: skip
    assert result.record is not None
    assert [rank.op for rank in result.record.ranks] == list(plan.order)
    for rank, peak in zip(result.record.ranks, result.peak_bytes_measured, strict=True):
        assert len(rank.step_s) == 4  # without the first step
        assert min(rank.seconds) > 0
        assert sum(rank.seconds) + sum(rank.wait_s) < 2 * max(rank.step_s)
        assert list(rank.start_s) == sorted(rank.start_s)
        assert rank.peak_bytes == peak
    for measured, predicted in zip(
        result.peak_bytes_measured, result.peak_bytes_predicted, strict=True
    ):
        assert 0.9 * predicted <= measured <= predicted


@pytest.mark.long
def test_a_buffer_that_no_loss_depends_on_is_compared_too() -> None:
    """It counts from 1 on ranks and from 3 on one device: 6 and 8 after five steps."""
    graph = graph_of("other_buffer_on_ranks")
    plan = random_plan(graph, 2, seed=3)
    target = f"{ENTRY}:other_buffer_on_ranks"
    result = run_checked(target, graph, plan, None, steps=5, timeout=20, verify=True)
    assert result.losses == result.reference_losses
    assert result.verified is False
    assert result.state is not None
    assert (result.state.differing, result.state.worst) == (1, "model.seen")
    assert result.state.largest_difference == 0.25


@pytest.mark.parametrize(
    ("function", "kind", "says"),
    [
        pytest.param("killed_while_building", RankError, "SIGKILL", marks=pytest.mark.long),
        pytest.param(
            "leaving_while_building", (RankError, StuckError), "rank 1", marks=pytest.mark.long
        ),
    ],
)
def test_a_rank_that_ends_is_named(function: str, kind: type[PardnnError], says: str) -> None:
    graph = graph_of("training")
    start = time.monotonic()
    with pytest.raises(kind, match=says) as caught:
        run_plan(f"{ENTRY}:{function}", graph, random_plan(graph, 2), steps=2, timeout=5)
    assert time.monotonic() - start < 5 + 10 + 45  # starting the ranks has taken 20 s here
    assert caught.value.details["first_failing_rank"] == 1


def test_a_rank_that_is_killed_in_a_step_is_named_with_op_and_signal() -> None:
    graph = graph_of("training")
    plan = random_plan(graph, 2, seed=3)
    with pytest.raises(RankError, match="SIGKILL") as caught:
        run_plan(f"{ENTRY}:killed_while_training", graph, plan, steps=20, timeout=30)
    assert caught.value.code == "E602"
    assert caught.value.details["first_failing_rank"] == 1
    assert {"op", "tensor", "step"} <= caught.value.details.keys()


def large_plan(num_devices: int) -> tuple[Graph, Plan, list[int]]:
    graph = graph_of("large")
    plan = random_plan(graph, num_devices, seed=1, num_clumps=12)
    return graph, plan, peak_bytes(graph, plan_arrays(graph, plan))


@pytest.mark.long
def test_limits_hold() -> None:
    graph, plan, peaks = large_plan(2)
    limits = [int(1.1 * peak) for peak in peaks]
    result = run_plan(f"{ENTRY}:large", graph, plan, steps=2, timeout=30, limits=limits)
    assert result.limit_bytes == tuple(limits)
    assert all(m <= limit for m, limit in zip(result.peak_bytes_measured, limits, strict=True))


@pytest.mark.long
def test_a_rank_beyond_its_limit_is_stopped() -> None:
    graph, plan, peaks = large_plan(2)
    # 15 % of it must be more than what the allowance leaves free.
    assert max(peaks) > 300 << 20
    victim = peaks.index(max(peaks))
    limits = [int(1.1 * peak) for peak in peaks]
    limits[victim] = int(0.85 * peaks[victim])
    with pytest.raises(RankError) as caught:
        run_plan(f"{ENTRY}:large", graph, plan, steps=2, timeout=30, limits=limits)
    assert caught.value.code == "E603"
    assert caught.value.details["first_failing_rank"] == victim
    assert caught.value.details["predicted_peak_bytes"] == peaks[victim]


SCRIPT = """
    import json, sys
    import torch
    import torch.distributed as dist
    from pathlib import Path
    from pardnn.backends.torch.parallelize import parallelize
    from pardnn.plan.file import read_plan

    sys.path.insert(0, {folder!r})
    import entry_points

    def build():
        step, args = entry_points.training()
        schedule = torch.optim.lr_scheduler.StepLR(args[1], step_size=2, gamma=0.3)
        return step, args, schedule

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    step, args, schedule = build()
    fast = parallelize(step, *args, plan=read_plan({plan!r}), timeout=20, device="cpu")
    losses, expected = [], []
    for i in range(5):
        losses.append(fast(*args[2:]).item())
        schedule.step()
    whole = [not p.isnan().any().item() for p in args[0].parameters()]
    dist.barrier()
    step, args, schedule = build()
    for i in range(5):
        expected.append(step(*args).item())
        schedule.step()
    Path(f"{out}/{{dist.get_rank()}}.json").write_text(json.dumps([losses, expected, whole]))
    dist.destroy_process_group()
"""


@pytest.mark.long
def test_a_script_under_torchrun_follows_its_schedule(tmp_path: Path) -> None:
    graph = graph_of("training")
    plan = random_plan(graph, 2, seed=3)
    write_plan(plan, tmp_path / "plan.json")
    script = tmp_path / "train.py"
    text = textwrap.dedent(SCRIPT)
    folder, plan_file = str(Path(ENTRY).parent), str(tmp_path / "plan.json")
    script.write_text(text.format(folder=folder, plan=plan_file, out=tmp_path))
    command = [sys.executable, "-W", "error::UserWarning", "-m", "torch.distributed.run",
               "--nproc-per-node", "2", str(script)]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    results = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    parameters = [op.name for op in graph.ops if op.kind == "parameter"]
    for rank, (losses, expected, whole) in enumerate(results):
        assert losses == expected
        mine = [plan.placement[name] == rank for name in parameters]
        assert sorted(whole) == sorted(mine)  # the rest of the model takes no memory and reads NaN


RUNNER = """
    import sys
    from pardnn.backends.torch.launch.launcher import run_plan
    from pardnn.graph.file import read_graph
    from pardnn.plan.file import read_plan
    try:
        run_plan({entry!r}, read_graph({graph!r}), read_plan({plan!r}), steps=2, timeout=60,
                 progress=lambda text: print(text, flush=True))
    except KeyboardInterrupt:
        sys.exit(130)
"""


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.long)]
)
def test_no_rank_outlives_an_interrupted_run(number: int, tmp_path: Path) -> None:
    """Ctrl-C gives 130 (SIGTERM takes the same way); after SIGKILL the system ends the ranks."""
    graph = graph_of("training")
    write_graph(graph, tmp_path / "graph.json")
    write_plan(random_plan(graph, 2), tmp_path / "plan.json")
    text = textwrap.dedent(RUNNER).format(entry=f"{ENTRY}:sleeping_while_building",
        graph=str(tmp_path / "graph.json"), plan=str(tmp_path / "plan.json"))  # fmt: skip
    script = tmp_path / "runner.py"
    script.write_text(text)
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 30
        while len(ranks_of(process.pid)) < 2 and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(1.0)
        ranks = ranks_of(process.pid)
        process.send_signal(number)
        status = process.wait(timeout=20)
    assert len(ranks) == 2
    assert status == (130 if number != signal.SIGKILL else -9)
    deadline = time.monotonic() + 5
    while any(map(is_rank, ranks)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(is_rank, ranks))


def test_a_plan_for_more_gpus_than_there_are_is_refused_before_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    graph = graph_of("training")
    with pytest.raises(PardnnError, match="torch sees 1") as caught:
        run_plan(f"{ENTRY}:training", graph, random_plan(graph, 2), device="cuda")
    assert caught.value.code == "E513"
