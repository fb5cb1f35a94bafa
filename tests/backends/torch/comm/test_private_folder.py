"""Folders of processes that were killed go; those of processes that live stay."""

from __future__ import annotations

import os
import signal
import stat
import tempfile
from pathlib import Path

import pytest

from pardnn.backends.torch.comm.private_folder import private_folder


def test_a_killed_process_leaves_a_folder_until_the_next_one_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    other = tmp_path / "pardnn-run-of-mine"  # not made here: it has no lock
    other.mkdir()
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        with private_folder() as folder:
            (folder / "s").touch()
            os.write(write, b".")
            signal.pause()
    os.read(read, 1)
    (left,) = set(tmp_path.iterdir()) - {other}
    with private_folder() as mine:
        assert stat.S_IMODE(mine.stat().st_mode) == 0o700
        assert set(tmp_path.iterdir()) == {other, left, mine}
    assert set(tmp_path.iterdir()) == {other, left}
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert left.exists()
    with private_folder() as mine:
        assert set(tmp_path.iterdir()) == {other, mine}
    assert set(tmp_path.iterdir()) == {other}
