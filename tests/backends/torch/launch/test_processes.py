"""A rank that cannot say why it does not move is ended, and named for it."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from pardnn.backends.torch.launch import processes
from pardnn.backends.torch.launch.job import Job, read_result


def test_a_stopped_rank_is_ended_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may hold the lock of the store's file, and then no other rank can tell of it."""
    monkeypatch.setattr(processes, "SHUTDOWN_S", 0)
    monkeypatch.setattr(processes, "_WATCH_S", 0.05)
    job = Job(target="", steps=1, threads=1, timeout_s=0.2, device="cpu", limits=(None, None),
              batch_size=None, seed=0, parent=os.getpid())  # fmt: skip
    children = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
    for rank, child in enumerate(children):
        (tmp_path / f"pid-{rank}").write_text(str(child.pid))
    children[1].send_signal(signal.SIGSTOP)
    with processes._none_left(tmp_path, job):
        statuses = [child.wait(20) for child in reversed(children)]
    assert statuses == [-signal.SIGKILL] * 2  # the other one wrote nothing in its time either
    assert read_result(tmp_path, 0) is None
    error = (read_result(tmp_path, 1) or {})["error"]
    assert error["code"] == "E702"
    assert error["details"]["first_failing_rank"] == 1
    assert "SIGSTOP" in error["message"]
