"""Commands about a plan find its graph among the files in the plan's folder."""

import gzip
import shutil
from pathlib import Path
from typing import Any

import pytest

Run = Any
pytestmark = pytest.mark.jit


@pytest.fixture
def plan(run: Run, tiny: Path, tmp_path: Path) -> Path:
    """A plan of the worked example, its graph beside it."""
    graph, path = tmp_path / "mine.json", tmp_path / "plan.json"
    shutil.copy(tiny / "graph.json", graph)
    cluster = ("--cluster", tiny / "cluster.json", "--reserve", 0, "--algorithm", "round-robin")
    assert run("plan", graph, *cluster, "-o", path)[0] == 0
    return path


def other_graph(tiny: Path, path: Path) -> None:
    """Write the example with another kind of op, which is another graph."""
    path.write_text((tiny / "graph.json").read_text().replace("aten.exp", "aten.sin"))


@pytest.mark.parametrize(
    "command",
    ["check {p}", "simulate {p}", "explain {p} 1", "diff {p} {p}", "report {p} -o {o}",
     "draw {p} -o {o}", "export {p} --to dot -o {o}"],
)  # fmt: skip
def test_it_is_found(run: Run, plan: Path, tmp_path: Path, command: str) -> None:
    written = tmp_path / "written"
    words = command.format(p=plan, o=written).split()
    status, out, err = run(*words)
    assert status == 0, err
    named = [*words[:2], "--graph", tmp_path / "mine.json", *words[2:]]
    assert run(*named)[1] == out


def test_the_one_that_fits_is_taken(run: Run, tiny: Path, plan: Path, tmp_path: Path) -> None:
    """Of several graphs, packed or not, beside files that are no graphs."""
    mine = tmp_path / "mine.json"
    with gzip.open(tmp_path / "z.json.gz", "wb") as packed:
        packed.write(mine.read_bytes())
    mine.unlink()
    other_graph(tiny, tmp_path / "a.json")
    (tmp_path / "b.json.gz").write_bytes(b"no gzip")
    (tmp_path / "c.json").mkdir()
    (tmp_path / "d.json").write_text('{"format": "pardnn.graph/1", "ops": [')
    assert run("check", plan)[1].split()[0] == "valid"
    (tmp_path / "z.json.gz").unlink()
    status, _, err = run("check", plan)  # it may be the damaged one
    assert (status, err.split()[0]) == (4, "E406")
    assert "d.json" in err


def test_none_fits(run: Run, tiny: Path, plan: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.json").unlink()
    other_graph(tiny, tmp_path / "a.json")
    status, _, err = run("check", plan)
    assert (status, err.split()[0]) == (2, "E215")
    assert "--graph" in err
    assert run("check", tmp_path / "absent.json")[2].split()[0] == "E403"


def test_it_is_not_written_over(run: Run, plan: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine.json"
    before = mine.read_bytes()
    status, _, err = run("report", plan, "-o", mine)
    assert (status, err.split()[0]) == (2, "E201")
    assert mine.read_bytes() == before
