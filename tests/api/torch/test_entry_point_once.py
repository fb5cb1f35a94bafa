"""A command executes the user's file once, however often it captures the step."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from pardnn.cli import main
from tests.long_cases import long_but

#: Notes the process that executes it: ranks and the reference step are processes of their own.
FILE = """
import os
import torch

with open({log!r}, "a", encoding="utf-8") as log:
    log.write(f"{{os.getpid()}}\\n")


def training(batch_size=4):
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(model, optimizer, batch):
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return step, (model, optimizer, torch.ones(batch_size, 8))
"""
#: Less than the step needs on two devices, at its own batch size.
TIGHT = ["--devices", "2", "--max-memory", "400B", "--algorithm", "heft"]


@pytest.mark.parametrize(
    ("command", "status"),
    [
        *long_but((), [(["capture", "-o", "g.json"], 0)]),
        *long_but((), [(["plan", "--devices", "2", "--costs", "v100"], 0)]),
        (["plan", *TIGHT, "--costs", "v100"], 3),  # and looks for a batch that fits
        *long_but((), [(["estimate", "--devices", "2", "--costs", "v100"], 0)]),
        (["compare", "--devices", "2", "--costs", "v100", "--algorithms", "heft,single"], 0),
        (
            [
                "max-batch",
                "--algorithm",
                "heft",
                "--devices",
                "2",
                "--max-memory",
                "8KiB",
                "--costs",
                "v100",
            ],
            0,
        ),
        (["profile"], 0),
        (
            [
                "run",
                "--algorithm",
                "heft",
                "--devices",
                "1",
                "--costs",
                "v100",
                "--steps",
                "1",
                "--verify",
            ],
            0,
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_the_file_is_executed_once(
    command: list[str],
    status: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    log = tmp_path / "executed"
    Path("train.py").write_text(FILE.format(log=str(log)), encoding="utf-8")
    with pytest.raises(SystemExit) as end:
        main.main([command[0], "train.py:training", *command[1:], "--json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert end.value.code == status, found
    assert log.read_text(encoding="utf-8").split().count(str(os.getpid())) == 1
