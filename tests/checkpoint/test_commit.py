"""The commit protocol: whatever fails, the last complete step stays and `latest` names it."""

from __future__ import annotations

import errno
import itertools
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pardnn.checkpoint import directory
from pardnn.checkpoint.directory import Lock, committed, read_manifest, resolve
from pardnn.checkpoint.verify import verify
from pardnn.errors import FileError, MismatchError, UsageError
from tests.checkpoint.steps import write_step

CALLS = ("open", "write", "fsync", "rename", "replace", "mkdir", "close")


def loadable(root: Path) -> int:
    """The step that `latest` leads to, every byte of it verified."""
    path = resolve(root)
    manifest = read_manifest(path)
    verify(path, manifest)
    return manifest.step


class Faults:
    """Counts calls of the system below a directory's writer, and lets one of them fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, self.at, self.kind = 0, -1, ""
        for name in CALLS:
            monkeypatch.setattr(os, name, self._faulty(name, getattr(os, name)))

    def _faulty(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def faulty(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            if self.count - 1 != self.at:
                return call(*args, **kwargs)
            if self.kind == "short":
                return call(args[0], args[1][:3]) if name == "write" else call(*args, **kwargs)
            if name == "close":
                call(*args, **kwargs)  # a failed close has closed
            raise OSError(getattr(errno, self.kind), os.strerror(getattr(errno, self.kind)))

        return faulty


def failure(write: Callable[[], None]) -> Exception | None:
    try:
        write()
    except (FileError, OSError) as error:
        return error
    return None


@pytest.mark.parametrize("kind", ["ENOSPC", "EIO", "short"])
def test_each_call_of_the_system_may_fail_once(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_step(tmp_path, 1)
    with monkeypatch.context() as patch:
        faults = Faults(patch)
        write_step(tmp_path, 2)
        total = faults.count
    assert total > 20
    raised = 0
    for at in range(total):
        step = 3 + at
        before = loadable(tmp_path)
        with monkeypatch.context() as patch:
            faults = Faults(patch)
            faults.at, faults.kind = at, kind
            error = failure(lambda step=step: write_step(tmp_path, step, keep=2))
        if isinstance(error, FileError):
            assert error.code == "E433"
            assert "The last complete step is still there" in str(error)
            assert loadable(tmp_path) in (before, step)
            raised += 1
            continue
        assert error is None or at >= total - 1  # the release of the lock comes last
        assert loadable(tmp_path) == step
        assert not list(tmp_path.glob("*.tmp-*")), "something was left over"
    assert raised == 0 if kind == "short" else raised >= total - 4


def test_a_failed_save_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_step(tmp_path, 1)
    before = sorted(tmp_path.rglob("*"))
    faults = Faults(monkeypatch)
    faults.at, faults.kind = 7, "ENOSPC"
    with pytest.raises(FileError, match=r"No space left on device \(errno 28\)"):
        write_step(tmp_path, 2)
    assert sorted(tmp_path.rglob("*")) == before


def test_old_steps_go_once_the_new_one_is_durable(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        write_step(tmp_path, step, keep=2)
    assert [each.step for each in committed(tmp_path)] == [2, 3]
    write_step(tmp_path, 1, keep=1)  # after a return to an older step: the newest written stays
    assert [each.step for each in committed(tmp_path)] == [1]
    assert loadable(tmp_path) == 1
    with pytest.raises(UsageError, match="keep is 0"):
        directory.check_steps("keep", 0)


def test_a_step_that_is_written_again_replaces_the_first(tmp_path: Path) -> None:
    write_step(tmp_path, 1)
    write_step(tmp_path, 1)
    (only,) = committed(tmp_path)
    assert only.path.name == "step-00000001.2"
    assert resolve(tmp_path, 1) == resolve(tmp_path) == only.path


def test_what_a_killed_run_left_is_not_taken_and_goes(tmp_path: Path) -> None:
    write_step(tmp_path, 1)
    left = tmp_path / "step-00000009.tmp-0123456789ab"
    left.mkdir()
    (left / "manifest.json").write_text("{}")
    (tmp_path / "latest.tmp-0123456789ab").write_text("step-00000009")
    assert loadable(tmp_path) == 1
    write_step(tmp_path, 2)
    assert not list(tmp_path.glob("*.tmp-*"))


def test_without_latest_the_newest_complete_step_counts(tmp_path: Path) -> None:
    write_step(tmp_path, 1)
    (tmp_path / "latest").unlink()  # killed between the first commit and its `latest`
    assert loadable(tmp_path) == 1


def test_two_runs_do_not_save_in_one_directory(tmp_path: Path) -> None:
    lock = Lock(tmp_path / "a")
    with pytest.raises(MismatchError, match="another run saves") as caught:
        Lock(tmp_path / "a")
    assert caught.value.code == "E522"
    lock.release()
    Lock(tmp_path / "a").release()


def test_kills_at_random_moments_leave_a_step_that_loads(tmp_path: Path) -> None:
    """`KILLS=200` for the long form (`make kills`)."""
    kills, rng = int(os.environ.get("KILLS", "6")), random.Random(0)
    write_step(tmp_path, 1)
    last = 1
    for _ in range(kills):
        pid = os.fork()
        if pid == 0:
            for step in itertools.count(last + 1):
                write_step(tmp_path, step, keep=2)
        time.sleep(rng.uniform(0, 0.03))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        found = loadable(tmp_path)
        assert found >= last
        assert all(loadable_step(each.path) for each in committed(tmp_path))
        last = found
    write_step(tmp_path, last + 1)
    assert not list(tmp_path.glob("*.tmp-*"))


def loadable_step(path: Path) -> bool:
    verify(path, read_manifest(path))
    return True
