"""How a command ends that cannot tell its result, and what it says beside it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytest

import pardnn
from pardnn.api.doctor import examine
from pardnn.cost.table import CostCacheWarning
from pardnn.graph.file import read_graph

Run = Any
ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(pardnn.__file__).resolve().parents[1])}


def command(tiny: Path, *words: str) -> list[str]:
    plan = str(tiny / "plan.json"), "--graph", str(tiny / "graph.json")
    return [sys.executable, "-m", "pardnn", "check", *plan, *words]


@pytest.mark.parametrize("form", [(), pytest.param(("--json",), marks=pytest.mark.long)])
def test_a_full_disk_below_standard_output_is_said(form: tuple[str, ...], tiny: Path) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            command(tiny, *form), env=ENVIRONMENT, stdout=full, stderr=subprocess.PIPE, text=True,
            check=False,
        )  # fmt: skip
    assert done.returncode == 4
    assert done.stderr.startswith("E413 the system has too little room: ")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("form", [pytest.param((), marks=pytest.mark.long), ("--json",)])
def test_a_reader_that_has_seen_enough_is_no_failure_of_ours(
    form: tuple[str, ...], tiny: Path
) -> None:
    """The status 1 would say that the user's code raised."""
    with subprocess.Popen(
        command(tiny, *form), env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.wait(60) == -signal.SIGPIPE
        assert process.stderr.read() == b""


def test_a_warning_of_ours_is_told_without_a_line_of_source(
    run: Run, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def warn(path: Path) -> Any:
        warnings.warn("costs of \x1b are not kept", CostCacheWarning, stacklevel=1)
        return read_graph(path)

    monkeypatch.setattr("pardnn.graph.file.read_graph", warn)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        monkeypatch.setattr(warnings, "showwarning", shown)
        _, _, err = run("check", tiny / "plan.json", "--graph", tiny / "graph.json")
    assert err == "costs of \\x1b are not kept\n"
    others = warnings.formatwarning("of others", UserWarning, "their.py", 3, "line")
    assert others == "their.py:3: UserWarning: of others\n  line\n"


def shown(message: Any, category: type[Warning], *place: Any, **_: Any) -> None:
    """Show a warning as Python does, which pytest replaces."""
    sys.stderr.write(warnings.formatwarning(message, category, place[0], place[1]))


def test_the_doctor_sees_that_no_temporary_folder_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not any("temporary" in problem for problem in examine().problems)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    (problem,) = [each for each in examine().problems if "temporary" in each]
    assert "No such file or directory" in problem
    assert "TMPDIR" in problem
