"""What each rank did last is on disk after a run that ended badly, and not after others."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from pathlib import Path

import pytest

from pardnn.backends.torch.comm import flight_record
from pardnn.backends.torch.comm.flight_record import FlightRecord, folder_named, make_folder
from tests.backends.torch.faults import TIMEOUT_S, at, run_with_faults

#: In which every rank writes its record at least once, seconds.
WRITTEN_S = 0.7


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The system's temporary folder, of ranks too."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(flight_record, "EVERY_S", 0.0)
    monkeypatch.delenv(flight_record.VARIABLE, raising=False)
    return tmp_path


def test_after_a_timeout_each_rank_has_told_what_it_did(temporary: Path) -> None:
    (late, hung) = run_with_faults({1: at(0.5, lambda: time.sleep(TIMEOUT_S + 3))})
    (folder,) = temporary.glob(f"{flight_record.PREFIX}*")
    assert folder.stat().st_mode & 0o777 == 0o700
    assert late.code == "E701"
    assert hung.error["details"]["first_failing_rank"] == 1
    for outcome in (late, hung):
        assert outcome.error["details"]["flight_record"] == str(folder)
    assert str(folder) in late.error["message"]
    texts = [(folder / f"rank-{rank}.txt").read_text() for rank in range(2)]
    assert "waiting for message" in texts[0]
    assert "E701 rank 0 waited" in texts[0]
    # Which of its actions ran, which messages, and where its script was.
    assert "in step 1" in texts[1]
    assert "last actions:\n" in texts[1]
    assert "compute op " in texts[1]
    assert "step 1: " in texts[1]
    assert "time.sleep(" in texts[1]
    assert all(len(text) < flight_record.MAX_CHARACTERS for text in texts)


def test_a_rank_that_was_killed_has_left_its_record(temporary: Path) -> None:
    def die() -> None:
        time.sleep(WRITTEN_S)
        os.kill(os.getpid(), signal.SIGKILL)

    run_with_faults({1: at(0.5, die)})
    (record,) = temporary.glob(f"{flight_record.PREFIX}*/rank-1.txt")
    actions = record.read_text().partition("last actions:\n")[2].splitlines()
    assert "in step 1" in record.read_text()
    assert actions.index("") > 8


def test_a_run_that_ends_well_leaves_nothing(temporary: Path) -> None:
    seen = temporary / "seen"

    def look() -> None:
        time.sleep(WRITTEN_S)
        (record,) = temporary.glob(f"{flight_record.PREFIX}*/rank-1.txt")
        seen.write_text(record.read_text())

    outcomes = run_with_faults({1: at(0.5, look)})
    assert [outcome.status for outcome in outcomes] == [0, 0]
    assert "in step 1" in seen.read_text()
    assert [path.name for path in temporary.iterdir()] == ["seen"]


def test_a_record_is_written_seldom(tmp_path: Path) -> None:
    record = FlightRecord(tmp_path, 0)
    assert record.is_due
    record.write(["now"])
    assert not record.is_due


def test_the_newest_folders_stay(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight_record, "KEPT", 3)
    made = []
    for number in range(5):
        folder = make_folder()
        assert folder is not None
        os.utime(folder, (number, number))
        made.append(folder)
    assert [folder for folder in made if folder.exists()] == made[2:]


def test_a_record_is_short_and_shows_no_control_characters(temporary: Path) -> None:
    record = FlightRecord(temporary, 0)
    record.write(["\x1b[2J op", "x" * (1 << 17)], weight=flight_record.FAILED)
    record.write(["later"])
    text = (temporary / "rank-0.txt").read_text()
    assert "\\x1b[2J op" in text
    assert len(text) <= flight_record.MAX_CHARACTERS + 1
    assert "later" not in text
    record.write(["E601"], weight=flight_record.WITH_ERROR)
    record.write(["the other thread"], weight=flight_record.FAILED)
    assert "E601" in (temporary / "rank-0.txt").read_text()
    record.write(["E601 and its end"], weight=flight_record.WITH_ERROR)
    assert "its end" in (temporary / "rank-0.txt").read_text()


def test_where_nothing_can_be_written_there_is_none(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FlightRecord(temporary / "gone", 0).write(["nothing is raised"])
    monkeypatch.setattr(tempfile, "tempdir", str(temporary / "gone"))
    assert make_folder() is None


@pytest.mark.parametrize("name", ["../elsewhere", "elsewhere", "pardnn-flight-gone", ""])
def test_another_rank_names_a_folder_of_records_or_none(name: str, temporary: Path) -> None:
    (temporary / "elsewhere").mkdir()
    made = make_folder()
    assert made is not None
    assert folder_named(name) is None
    assert folder_named(made.name) == made
