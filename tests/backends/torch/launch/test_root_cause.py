"""From what ranks wrote to the one error of their run."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path
from typing import Any, NoReturn

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from pardnn import files
from pardnn.backends.torch.launch import worker
from pardnn.backends.torch.launch.job import (
    BUILDING,
    Job,
    stack_path,
    write_job,
    write_result,
    write_stage,
)
from pardnn.backends.torch.launch.launcher import run_plan
from pardnn.backends.torch.launch.root_cause import root_cause
from pardnn.errors import FileError, PardnnError, UserCodeError
from pardnn.graph.file import read_graph
from pardnn.plan.file import read_plan

JOB = Job(target="m.py:f", steps=1, threads=1, timeout_s=5.0, device="cpu", limits=(None, None),
          batch_size=None, seed=0, parent=os.getpid())  # fmt: skip
#: As faulthandler writes it: the main thread comes last, its innermost call first.
STACK = """\
Current thread 0x00007fe601 (most recent call first):
  File "/x/lib/threading.py", line 9 in run

Thread 0x00007fe60a (most recent call first):
  File "{torch}", line 7 in wait
  File "/home/me/m.py", line 20 in f
  File "/home/me/m.py", line 3 in main
"""


def error(code: str, rank: int, message: str, **details: Any) -> dict[str, Any]:
    found = {"code": code, "message": message, "details": {"rank": rank, **details}}
    return {"error": {**found, "traceback": f"Traceback of rank {rank}"}}


def cause(directory: Path, *results: dict[str, Any] | None) -> PardnnError:
    for rank, result in enumerate(results):
        if result is not None:
            write_result(directory, rank, result)
    return root_cause(directory, JOB, {}, None)


def test_the_rank_that_a_signal_ended_first_is_named_where_none_told_an_error(
    tmp_path: Path,
) -> None:
    failures = {rank: ProcessFailure(rank, 1, -9, str(tmp_path / "none")) for rank in (0, 1)}
    failures[0].timestamp, failures[1].timestamp = 20, 10
    found = root_cause(tmp_path, JOB, failures, None)
    assert found.code == "E602"
    assert found.message.startswith("rank 1 ended by SIGKILL, and wrote no result.")
    assert found.details["first_failing_rank"] == 1


def test_an_exception_while_building_names_its_rank(tmp_path: Path) -> None:
    found = cause(tmp_path, None, error("E110", 1, "the function raised at m.py:3: rank 1"))
    assert isinstance(found, UserCodeError)
    assert found.details["first_failing_rank"] == 1
    assert found.message.startswith("rank 1: the function raised at m.py:3")
    assert "Traceback of rank 1" in found.message


def test_the_rank_that_failed_itself_counts_before_those_that_lost_it(tmp_path: Path) -> None:
    lost = error("E602", 0, "rank 1 ended: rank 0 lost it", first_failing_rank=1)
    found = cause(tmp_path, lost, error("E602", 1, "rank 1 was interrupted by SIGINT"))
    assert found.message.splitlines()[0] == "rank 1 was interrupted by SIGINT"
    assert "rank 0 lost it" in found.message


def test_a_rank_that_hangs_in_the_users_function_is_said_to_hang_there(tmp_path: Path) -> None:
    write_stage(tmp_path, 1, BUILDING)
    stack_path(tmp_path, 1).write_text(STACK.format(torch=pytest.__file__))
    late = error("E605", 0, "rank 0 waited 5 s for rank 1 to come.\nIt", first_failing_rank=1)
    found = cause(tmp_path, late)
    assert (found.code, found.exit_status) == ("E703", 7)
    assert found.details["first_failing_rank"] == 1
    assert found.details["where"] == "/home/me/m.py:20"
    assert "rank 1 is still in the function that builds the model, at /home/me/m.py:20" in str(
        found
    )


def test_a_rank_that_is_gone_does_not_hang(tmp_path: Path) -> None:
    """It left no stack: nobody found it alive."""
    write_stage(tmp_path, 1, BUILDING)
    found = cause(tmp_path, error("E605", 0, "rank 0 waited 5 s", first_failing_rank=1))
    assert found.code == "E605"
    assert found.message.startswith("rank 1 ended before its work was done")


def test_a_folder_that_is_full_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing can be written there, so the exit status alone tells."""

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(worker, "write_result", full)
    status = worker._written(tmp_path, 1, {"losses": []})
    assert "rank 1 cannot write its result" in capsys.readouterr().err
    failure = ProcessFailure(local_rank=1, pid=1, exitcode=status, error_file="none")
    write_result(tmp_path, 0, {"losses": []})
    found = root_cause(tmp_path, JOB, {1: failure}, None)
    assert (found.code, found.details["first_failing_rank"]) == ("E405", 1)
    assert "the folder of the run is full" in found.message


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
def test_too_few_open_files_for_a_result_are_no_full_folder(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def short(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(worker, "write_result", short)
    failure = ProcessFailure(
        local_rank=1, pid=1, exitcode=worker._written(tmp_path, 1, {}), error_file="none"
    )
    write_result(tmp_path, 0, {"losses": []})
    found = root_cause(tmp_path, JOB, {1: failure}, None)
    assert (found.code, found.details["first_failing_rank"]) == ("E413", 1)
    assert "ulimit -n" in found.message


def test_a_run_without_a_temporary_folder_is_an_error_of_the_file(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    graph, plan = read_graph(tiny / "graph.json"), read_plan(tiny / "plan.json")
    with pytest.raises(FileError, match="the ranks cannot be started") as caught:
        run_plan("m.py:f", graph, plan, device="cpu")
    assert caught.value.code == "E405"
    assert "TMPDIR" in caught.value.message


def test_a_run_without_room_in_the_temporary_folder_says_where_it_is_looked_for(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> NoReturn:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    graph, plan = read_graph(tiny / "graph.json"), read_plan(tiny / "plan.json")
    monkeypatch.setattr(files, "_replace", full)
    with pytest.raises(FileError, match="No space left on device") as caught:
        run_plan("m.py:f", graph, plan, device="cpu")
    assert caught.value.code == "E405"
    assert "TMPDIR" in caught.value.message


def test_a_damaged_checkpoint_is_an_error_of_the_file(tmp_path: Path) -> None:
    found = cause(tmp_path, {"losses": []}, error("E432", 1, "damaged"))
    assert isinstance(found, FileError)
    assert found.exit_status == 4


def test_ranks_that_wrote_no_flight_record_get_one(tmp_path: Path) -> None:
    run, records = tmp_path / "run", tmp_path / "records"
    run.mkdir()
    records.mkdir()
    (records / "rank-0.txt").write_text("its own")
    write_stage(run, 1, BUILDING)
    write_result(run, 1, error("E110", 1, "the function raised"))
    found = root_cause(run, JOB, {}, records)
    assert found.details["flight_record"] == str(records)
    assert str(records) in found.message
    assert (records / "rank-0.txt").read_text() == "its own"
    text = (records / "rank-1.txt").read_text()
    assert BUILDING in text
    assert "Traceback of rank 1" in text


def test_an_interrupt_of_one_rank_is_no_internal_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor has what it does a rank that it does not name."""
    write_job(tmp_path, JOB)
    for name in ("_end_with_parent", "_delay_sigterm"):
        monkeypatch.setattr(worker, name, lambda *_: None)
    monkeypatch.setattr(os, "dup2", lambda *_: None)

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(worker, "_run", interrupted)
    before = {key: os.environ.get(key, "") for key in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    for key, value in before.items():
        monkeypatch.setenv(key, value)
    assert worker.main(tmp_path, 1) == 6
    found = root_cause(tmp_path, JOB, {}, None)
    assert found.code == "E602"
    assert "rank 1 was interrupted by SIGINT" in found.message
    assert "internal error" not in found.message
