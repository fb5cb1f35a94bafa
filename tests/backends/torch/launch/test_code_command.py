"""`pardnn code`: files of ranks, run as they were written and as they were edited."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pardnn.cli.main import app
from pardnn.errors import PardnnError

STEP = """
import torch

def training():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))

    def step(model, optimizer, x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return step, (model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(3, 4))
"""


def run(*arguments: object) -> str:
    found = CliRunner().invoke(app, [str(each) for each in arguments])
    if found.exception is not None and not isinstance(found.exception, SystemExit):
        raise found.exception
    return found.stdout


@pytest.mark.long  # starts seven processes that load torch
def test_code_is_printed_written_run_and_edited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # sources are told from here
    train, graph, plan = tmp_path / "train.py", tmp_path / "g.json", tmp_path / "p.json"
    train.write_text(STEP, encoding="utf-8")
    target = f"{train}:training"
    run("capture", target, "-o", graph)
    run("plan", graph, "--devices", 2, "--algorithm", "round-robin", "-o", plan)
    given = ("code", plan, "--graph", graph)
    printed = run(*given, "--rank", 1)
    assert "#     loss = model(x).square().mean()" in printed
    with pytest.raises(PardnnError, match="E247"):
        run(*given)
    with pytest.raises(PardnnError, match="E248"):
        run(*given, "--rank", 2)

    told = run(*given, "--rank", 1, "-o", tmp_path / "one.py")
    assert told == f"code written to {tmp_path / 'one.py'}\n"
    assert (tmp_path / "one.py").read_text(encoding="utf-8") == printed

    folder = tmp_path / "program"
    text = run(*given, "-o", folder, "--run", target, "--steps", 3, "--verify", "--json")
    result = json.loads(text)
    assert result["verified"] is True
    assert result["losses"] == result["reference_losses"]
    assert len(set(result["losses"])) == 3
    edited = folder / "rank1.py"
    assert edited.read_text(encoding="utf-8") == printed

    run_again = (*given, "--run", target, "--edited", folder)
    edited.write_text(printed.replace("    loss = None\n", "    raise RuntimeError('here')\n"),
                      encoding="utf-8")  # fmt: skip
    with pytest.raises(PardnnError, match="rank 1 failed at a line of its generated code.*here"):
        run(*run_again)
    edited.write_text("def step(*given): ...\n", encoding="utf-8")
    with pytest.raises(PardnnError, match="E503 .*was not written for this plan"):
        run(*run_again)
    edited.unlink()
    with pytest.raises(PardnnError, match=r"E403 cannot read .*rank1.py'"):
        run(*run_again)
