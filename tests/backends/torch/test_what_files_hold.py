"""What is written for others holds neither paths nor variables of the user's."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pardnn.cli.main import app

STEP = """
import os, torch

def training():
    token = os.environ["TOKEN"]
    model = torch.nn.Linear(4, 2)

    def step(model, optimizer, x):
        optimizer.zero_grad()
        loss = model(x).square().mean() if token else x.sum()
        loss.backward()
        optimizer.step()
        return loss

    return step, (model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(3, 4))
"""


@pytest.mark.parametrize("where", ["source", "elsewhere"])
def test_no_path_and_no_variable_of_the_users_is_written(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 50: also where the step's file is outside of the working directory."""
    monkeypatch.setenv("TOKEN", "a-secret-of-mine")
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # Python would write where the step is
    for folder in ("source", "elsewhere"):
        (tmp_path / folder).mkdir()
    (tmp_path / "source" / "train.py").write_text(STEP)
    monkeypatch.chdir(tmp_path / where)
    target, of = f"{tmp_path}/source/train.py:training", ("--graph", "graph.json")
    two = ("--devices", "2", "--algorithm", "heft", "--costs", "a100")
    for words in (
        ("capture", target, "-o", "graph.json"), ("plan", target, *two, "-o", "other.json"),
        ("plan", "graph.json", *two, "-o", "plan.json"),
        ("report", "plan.json", *of, "-o", "report.html"),
        ("export", "plan.json", *of, "-o", "trace.json", "--to", "perfetto"),
        ("export", "plan.json", *of, "-o", "explorer.json", "--to", "model-explorer"),
        ("code", "plan.json", *of, "-o", "code"),
    ):  # fmt: skip
        assert CliRunner().invoke(app, list(words)).exit_code == 0, words
    written = [each for each in Path.cwd().rglob("*.*") if each.name != "train.py"]
    assert len([each for each in written if each.suffix in (".json", ".html", ".py")]) == 8
    for each in written:
        content = each.read_bytes()
        for private in ("a-secret-of-mine", str(tmp_path), str(Path.home()) + "/"):
            assert private.encode() not in content, (each, private)
