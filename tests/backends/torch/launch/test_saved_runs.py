"""`pardnn run --save` and `--resume`: a run goes on under another plan."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import pardnn
from pardnn.api.run import run_checked
from pardnn.backends.torch.capture.capture import capture
from pardnn.checkpoint.directory import committed, read_manifest, resolve
from pardnn.checkpoint.options import SaveOptions, save_options
from pardnn.errors import UsageError
from pardnn.report.results import RunResult
from tests.backends.torch import entry_points
from tests.backends.torch.plans import random_plan

ENTRY = str(Path(entry_points.__file__).resolve())
ROOT = Path(pardnn.__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def _ranks_find_pardnn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))


def test_a_run_goes_on_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    graph = capture(*entry_points.training()[:1], *entry_points.training()[1])

    def run(size: int, saving: SaveOptions | None, *, verify: bool) -> RunResult:
        plan = random_plan(graph, size, seed=3)
        return run_checked(
            f"{ENTRY}:training",
            graph,
            plan,
            None,
            steps=3,
            timeout=20,
            verify=verify,
            saving=saving,
        )

    first = run(2, save_options(tmp_path, 2, 2, resume=False), verify=False)
    assert first.saved_steps == (2, 3)
    then = run(1, save_options(tmp_path, None, 1, resume=True), verify=True)
    assert (then.first_step, then.saved_steps, then.verified) == (3, (6,), True)
    assert then.losses[0] != first.losses[0]
    assert [each.step for each in committed(tmp_path)] == [6]


def ranks_of(launcher: int) -> list[int]:
    """Process ids of the ranks that a launcher has started."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            is_rank = b"launch.worker" in (path.parent / "cmdline").read_bytes()
        except OSError:
            continue
        if parent == launcher and is_rank:
            found.append(int(path.parent.name))
    return sorted(found)


def started(path: Path, *options: str) -> subprocess.Popen[str]:
    """`pardnn run` that has saved once; it would go on for hours."""
    process = subprocess.Popen(
        [sys.executable, "-m", "pardnn", "run", f"{ENTRY}:training", "--devices", "2", "--costs",
         "cpu", "--algorithm", "layer-round-robin", "--steps", "1000000", "--timeout", "20",
         "--save", str(path), "--every", "1", "--keep", "2", *options],
        text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    end = time.monotonic() + 120
    while not (path / "latest").exists() and process.poll() is None and time.monotonic() < end:
        time.sleep(0.1)
    return process


@pytest.mark.parametrize("whom", ["launcher", "one rank"])
def test_a_signal_saves_on_all_ranks_and_ends_the_run(whom: str, tmp_path: Path) -> None:
    process = started(tmp_path, "--on-signal", "save", "--json")
    if whom == "launcher":
        process.send_signal(signal.SIGINT)
    else:
        os.kill(ranks_of(process.pid)[1], signal.SIGTERM)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors[-3000:]
    result = json.loads(output)
    assert result["stopped_by"] == ("SIGINT" if whom == "launcher" else "SIGTERM")
    assert result["saved_steps"][-1] == len(result["losses"])
    assert read_manifest(resolve(tmp_path)).step == len(result["losses"])


def test_a_stopped_rank_is_named_and_the_run_ends_in_time(tmp_path: Path) -> None:
    process = started(tmp_path, "--timeout", "5", "--json")
    begin = time.monotonic()
    os.kill(ranks_of(process.pid)[1], signal.SIGSTOP)
    output, errors = process.communicate(timeout=60)
    assert time.monotonic() - begin < 5 + 10
    assert process.returncode == 7, errors[-3000:]
    assert json.loads(output)["error"]["details"]["first_failing_rank"] == 1


def test_saving_at_a_signal_needs_a_directory() -> None:
    with pytest.raises(UsageError, match="go with --save DIR"):
        save_options(None, None, None, resume=False, on_signal="save")
