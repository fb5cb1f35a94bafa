"""`pardnn checkpoint`: what is there, whether it is whole, the model in one file."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from pardnn.checkpoint.directory import piece_path, resolve
from tests.checkpoint.steps import array, write_step

Run = Any


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for step in (3, 6):
        write_step(tmp_path / "run", step)
    return tmp_path / "run"


def test_show_verify_export(run: Run, run_json: Run, root: Path, tmp_path: Path) -> None:
    status, found = run_json("checkpoint show", root)
    assert status == 0
    assert (found["step"], found["steps"], found["models"]) == (6, [3, 6], ["model"])
    assert found["extra"] == {"epoch": 6}
    status, found = run_json("checkpoint verify", root, "--step", 3)
    assert (status, found["step"], found["num_tensors"]) == (0, 3, 2)
    status, found = run_json("checkpoint export", root, "-o", tmp_path / "m.safetensors")
    assert (status, found["num_tensors"]) == (0, 1)
    assert np.array_equal(load_file(tmp_path / "m.safetensors")["w"], array(6))
    status, out, _ = run("checkpoint", "show", root)
    assert status == 0
    assert "{'epoch': 6}" in out
    shown = [line.split() for line in out.splitlines()]
    at = next(i for i, words in enumerate(shown) if words[:1] == ["steps"])
    assert (shown[at][1:], shown[at + 1]) == (["3"], ["6"])  # a line each
    at = next(i for i, words in enumerate(shown) if words[:1] == ["file"])
    sizes = [piece_path(resolve(root), i).stat().st_size for i in range(2)]
    assert [shown[at][1:], shown[at + 1]] == [[str(size), "B"] for size in sizes]


def test_what_is_not_whole_exits_4(run_json: Run, root: Path, tmp_path: Path) -> None:
    for command in ("checkpoint show", "checkpoint verify"):
        status, found = run_json(command, tmp_path / "none")
        assert (status, found["error"]["code"]) == (4, "E430")
    path = piece_path(resolve(root), 0)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    status, found = run_json("checkpoint verify", root)
    assert (status, found["error"]["code"]) == (4, "E432")
    assert found["error"]["details"]["tensor"] == "model.w"
    status, found = run_json("checkpoint export", root, "-o", tmp_path / "m.safetensors")
    assert (status, found["error"]["code"]) == (4, "E432")
    assert [each.name for each in tmp_path.iterdir()] == ["run"]
    os.truncate(path, 10)
    status, found = run_json("checkpoint show", root)
    assert (status, found["error"]["code"]) == (4, "E431")
    status, found = run_json("checkpoint show", root, "--step", 4)
    assert (status, found["error"]["code"]) == (4, "E430")


def test_wrong_options_exit_2(run_json: Run, root: Path, tmp_path: Path) -> None:
    status, found = run_json("run", "x.py:f", "--devices", 2, "--resume")
    assert (status, found["error"]["code"]) == (2, "E233")
    status, found = run_json("run", "x.py:f", "--devices", 2, "--save", root, "--keep", 0)
    assert (status, found["error"]["code"]) == (2, "E233")
    status, found = run_json("run", "x.py:f", "--devices", 2, "--save", tmp_path / "a", "--resume")
    assert (status, found["error"]["code"]) == (4, "E430")
    status, found = run_json("checkpoint export", root, "-o", tmp_path / "m", "--model", "critic")
    assert (status, found["error"]["code"]) == (2, "E234")
