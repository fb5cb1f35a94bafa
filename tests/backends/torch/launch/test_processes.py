"""A rank that cannot say why it does not move is ended, and named for it."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from pardnn.backends.torch.launch import processes
from pardnn.backends.torch.launch.job import Job, read_progress, read_result, write_result
from pardnn.backends.torch.launch.rank import TOLD_S, _Progress


def test_the_first_rank_tells_now_and_then_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [10.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    tell = _Progress(tmp_path, 10)
    assert read_progress(tmp_path) is None
    tell([3.4123456789], [2.0])
    assert read_progress(tmp_path) == "step 1 of 10: loss 3.41235; 18 s left"
    now[0] += TOLD_S / 2
    tell([3.4, 3.2], [2.0, 1.0])
    assert (read_progress(tmp_path) or "").startswith("step 1 ")
    now[0] += TOLD_S
    tell([3.4, 3.2, 3.0], [9.0, 1.0, 1.0])
    assert read_progress(tmp_path) == "step 3 of 10: loss 3; 7 s left"


def test_the_launcher_passes_on_each_line_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines, told = [None, "step 1", "step 1", "step 2"], list[str]()

    class Ranks:
        """Ends once all lines are written."""

        def wait(self, timeout: float, period: float) -> SimpleNamespace | None:
            if not lines:
                return SimpleNamespace(failures={})
            line = lines.pop(0)
            if line is not None:
                (tmp_path / "progress").write_text(line)
            return None

        def close(self, *_: object, **__: object) -> None: ...

    monkeypatch.setattr(processes, "start_processes", lambda *_: Ranks())
    job = Job(target="", steps=1, threads=1, timeout_s=0.2, device="cpu", limits=(None, None),
              batch_size=None, seed=0, parent=os.getpid())  # fmt: skip
    assert processes.run_processes(tmp_path, job, progress=told.append) == {}
    assert told == ["step 1", "step 2"]


@pytest.fixture
def children(tmp_path: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Two ranks; the second one is stopped."""
    found = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
    for rank, child in enumerate(found):
        (tmp_path / f"pid-{rank}").write_text(str(child.pid))
    found[1].send_signal(signal.SIGSTOP)
    wait_for_state(found[1], "T")
    yield found
    for child in found:
        child.kill()
        child.wait()


def wait_for_state(child: subprocess.Popen[bytes], state: str) -> None:
    """Wait until a signal sent to it has arrived."""
    deadline = time.monotonic() + 20
    while processes._state(child.pid) != state and time.monotonic() < deadline:
        time.sleep(0.01)


def job_of_two(timeout_s: float) -> Job:
    return Job(target="", steps=1, threads=1, timeout_s=timeout_s, device="cpu",
               limits=(None, None), batch_size=None, seed=0, parent=os.getpid())  # fmt: skip


def test_a_stopped_rank_is_ended_and_named(
    tmp_path: Path, children: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may hold the lock of the store's file, and then no other rank can tell of it."""
    monkeypatch.setattr(processes, "SHUTDOWN_S", 0)
    monkeypatch.setattr(processes, "_WATCH_S", 0.05)
    with processes._none_left(tmp_path, job_of_two(0.2)):
        statuses = [child.wait(20) for child in reversed(children)]
    assert statuses == [-signal.SIGKILL] * 2  # the other one wrote nothing in its time either
    assert read_result(tmp_path, 0) is None
    error = (read_result(tmp_path, 1) or {})["error"]
    assert error["code"] == "E702"
    assert error["details"]["first_failing_rank"] == 1
    assert "SIGSTOP" in error["message"]


@pytest.mark.parametrize("stopped_at_once", [True, False])
def test_a_stopped_rank_has_no_time_to_end_once_another_one_has_failed(
    tmp_path: Path,
    children: list[subprocess.Popen[bytes]],
    monkeypatch: pytest.MonkeyPatch,
    *,
    stopped_at_once: bool,
) -> None:
    """A signal takes a while to arrive, so it may be stopped after the failure was seen."""
    monkeypatch.setattr(processes, "SHUTDOWN_S", 1000)
    write_result(tmp_path, 0, {"error": {"code": "E701", "message": "m", "details": {}}})
    if not stopped_at_once:
        children[1].send_signal(signal.SIGCONT)
        wait_for_state(children[1], "S")
    with processes._none_left(tmp_path, job_of_two(1000)):
        time.sleep(2 * processes._WATCH_S)
        children[1].send_signal(signal.SIGSTOP)
        assert children[1].wait(20) == -signal.SIGKILL
    assert children[0].poll() is None
