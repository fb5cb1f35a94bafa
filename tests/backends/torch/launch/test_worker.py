"""The guards of a process of `run`, seen from outside."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pardnn.backends.torch.launch import worker
from pardnn.backends.torch.launch.job import Job, read_result, write_job

FAILING = """
import sys
from pathlib import Path
sys.modules["torch"] = None  # an import of it raises
from pardnn.backends.torch.launch.worker import main
sys.exit(main(Path(sys.argv[1]), 1))
"""
REFERENCE = """
import sys
import pardnn.backends.torch.launch.reference
rooms = tuple(f"pardnn.backends.torch.{name}" for name in ("comm", "runtime", "deferred_init"))
print([name for name in sys.modules if name.startswith(rooms)])
"""


def test_a_failed_import_is_reported_as_the_ranks_own_error(tmp_path: Path) -> None:
    job = Job(
        target="x.py:f", steps=1, threads=1, timeout_s=1.0, device="cpu", limits=(None, None),
        batch_size=None, seed=0, parent=os.getpid(),
    )  # fmt: skip
    write_job(tmp_path, job)
    done = subprocess.run(
        [sys.executable, "-c", FAILING, str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    result = read_result(tmp_path, 1)
    assert result is not None, done.stderr
    assert done.returncode == 1
    assert result["error"]["code"] == "E101"
    assert result["error"]["details"]["first_failing_rank"] == 1
    assert "import torch" in result["error"]["traceback"]


@pytest.mark.long
def test_the_reference_loads_nothing_that_only_ranks_need() -> None:
    done = subprocess.run(
        [sys.executable, "-c", REFERENCE], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "error", [RuntimeError("[enforce fail] socket: Too many open files."), OSError(24, "Too many")]
)
def test_too_few_open_files_are_no_bug_of_ours(error: Exception, tmp_path: Path) -> None:
    """torch's store and gloo raise a RuntimeError without a number."""
    found = worker._error(error, 1)
    assert found["code"] == "E413"
    assert found["message"].startswith("rank 1: the system has too little room: ")
    assert found["details"]["first_failing_rank"] == 1
    assert worker._error(RuntimeError("else"), 1)["code"] == "E101"


def test_a_rank_whose_run_is_gone_ends_without_a_word(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The launcher was killed while its ranks were starting, and a later run cleaned up."""
    assert worker.main(tmp_path / "gone", 0) == worker.UNWRITTEN
    assert capfd.readouterr() == ("", "")
