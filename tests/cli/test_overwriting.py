"""A command never writes over what it reads, whatever name it is given."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., tuple[int, Any, Any]]

#: Each command with a file that it reads named as its output; {g} a graph, {p} a plan, {s} a step.
TWICE = (
    "capture {s}:step -o {s}", "plan {s}:step --devices 2 -o {s}", "plan {g} --devices 2 -o {g}",
    "plan {g} --devices 2 --keep-state {g} {p} -o {p}", "plan {g} --cluster {p} -o {p}",
    "layout {p} --graph {g} -o {p}", "report {p} --graph {g} -o {g}",
    "report {p} --graph {g} --run {s} -o {s}", "export {p} --graph {g} --to dot -o {p}",
    "draw {p} --graph {g} -o {g}", "code {p} --graph {g} --rank 0 -o {g}",
    "code {p} --graph {g} --run {s}:step -o {s}", "convert {g} {g}",
    "convert {p} --graph {g} -o {g}",
    "convert {g} {p} --write-cluster {p}", "plan {g} --devices 2 -o {link}",
    "run {s}:step --plan {p} --record {p}",
)  # fmt: skip


@pytest.mark.parametrize("command", TWICE)
def test_what_is_read_is_not_overwritten(run: Run, tmp_path: Path, command: str) -> None:
    files = {name: tmp_path / name for name in ("g", "p", "s")}
    for name, path in files.items():
        path.write_text(f"precious {name}")
    link = tmp_path / "link"
    link.symlink_to(files["g"])
    status, _, err = run(*command.format(**files, link=link).split())
    assert (status, err.split()[0]) == (2, "E201")
    assert "twice" in err
    assert all(path.read_text() == f"precious {name}" for name, path in files.items())


def test_an_output_that_is_no_file_may_be_named_twice(run: Run, tmp_path: Path) -> None:
    status, _, err = run("convert", "/dev/null", "/dev/null", "--graph", tmp_path / "absent")
    assert status == 4
    assert "twice" not in err


def test_a_plan_takes_the_place_of_the_one_that_it_starts_from(
    run: Run, tiny: Path, tmp_path: Path
) -> None:
    plan = tmp_path / "plan.json"
    given = ("plan", tiny / "graph.json", "--devices", 2, "-o", plan)
    assert run(*given, "--algorithm", "heft")[0] == 0
    assert run(*given, "--start", plan)[0] == 0
