"""What a run is told about its checkpoints, before ranks start."""

from __future__ import annotations

from pathlib import Path

import pytest

from pardnn.checkpoint.directory import LOCK, Lock
from pardnn.checkpoint.options import save_options
from pardnn.errors import FileError, MismatchError
from tests.checkpoint.steps import write_step


@pytest.mark.parametrize("resume", [False, True])
def test_a_directory_in_which_another_run_saves_is_refused(resume: bool, tmp_path: Path) -> None:
    """What a second run would resume from, the first one may remove before it is read."""
    write_step(tmp_path, 3)
    other = Lock(tmp_path)
    with pytest.raises(MismatchError, match="E522"):
        save_options(tmp_path, 1, None, resume=resume)
    other.release()
    found = save_options(tmp_path, 1, None, resume=resume)
    assert found is not None
    assert found.first_step == (3 if resume else None)
    Lock(tmp_path).release()


def test_a_directory_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / LOCK).mkdir()
    with pytest.raises(FileError, match="E433"):
        save_options(tmp_path, 1, None, resume=False)


def test_a_directory_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    assert save_options(tmp_path / "run", 1, None, resume=False) is not None
    assert not (tmp_path / "run").exists()


def test_a_file_is_no_directory_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "graph.json").write_text("precious")
    with pytest.raises(FileError, match="E433 .*graph.json': it is a file"):
        save_options(tmp_path / "graph.json", 1, None, resume=False)
