"""Faults of whole runs: each starts its ranks, which takes seconds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import pardnn
from pardnn.backends.torch.capture.capture import capture
from pardnn.backends.torch.launch.launcher import run_plan
from pardnn.errors import PardnnError
from pardnn.graph.ir import Graph
from pardnn.plan.file import write_plan
from pardnn.plan.plan import Plan
from tests.backends.torch import entry_points
from tests.backends.torch.plans import random_plan

ENTRY = str(Path(entry_points.__file__).resolve())
ROOT = Path(pardnn.__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def _ranks_find_pardnn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))


@pytest.fixture(scope="module")
def planned() -> tuple[Graph, Plan]:
    step, args = entry_points.training()
    graph = capture(step, *args)
    return graph, random_plan(graph, 2, seed=3)


@pytest.mark.parametrize(
    ("function", "code", "says"),
    [
        ("sleeping_while_building", "E703", "rank 1 is still in the function that builds"),
        ("raising_while_building", "E110", "ValueError: no data for rank 1"),
        ("interrupted_while_building", "E602", "rank 1 was interrupted by SIGINT"),
    ],
)
def test_a_fault_while_building_names_its_rank(
    function: str, code: str, says: str, planned: tuple[Graph, Plan]
) -> None:
    with pytest.raises(PardnnError) as caught:
        run_plan(f"{ENTRY}:{function}", *planned, steps=2, timeout=5)
    assert caught.value.code == code
    assert caught.value.details["first_failing_rank"] == 1
    assert caught.value.message.startswith("rank 1")
    assert says in caught.value.message
    assert "internal error" not in caught.value.message
    if code == "E703":
        assert caught.value.details["where"].startswith(f"{ENTRY}:")
    records = Path(caught.value.details["flight_record"])
    assert sorted(path.name for path in records.iterdir()) == ["rank-0.txt", "rank-1.txt"]
    assert "in the function that builds the model" in (records / "rank-1.txt").read_text()


def test_a_thread_of_the_users_does_not_keep_a_run_alive(
    planned: tuple[Graph, Plan], tmp_path: Path
) -> None:
    """The command calls the function too, to capture the step."""
    write_plan(planned[1], tmp_path / "plan.json")
    target = f"{ENTRY}:training_beside_a_thread"
    arguments = ["run", target, "--plan", str(tmp_path / "plan.json"), "--steps", "2", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "pardnn", *arguments], capture_output=True, text=True, timeout=240,
        check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(json.loads(done.stdout)["losses"]) == 2
