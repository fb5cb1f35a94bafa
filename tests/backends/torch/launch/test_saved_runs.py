"""`pardnn run --save` and `--resume`: a run goes on under another plan."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import pardnn
from pardnn.api.run import run_checked
from pardnn.backends.torch.capture.capture import capture
from pardnn.backends.torch.launch.launcher import _root_cause
from pardnn.checkpoint.directory import committed
from pardnn.checkpoint.options import SaveOptions, save_options
from pardnn.errors import FileError
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


def test_a_damaged_checkpoint_is_an_error_of_the_file() -> None:
    error = {"code": "E432", "message": "damaged", "details": {"rank": 1}}
    found = _root_cause([{"losses": []}, {"error": error}], None)
    assert isinstance(found, FileError)
    assert found.exit_status == 4
