"""Names that a terminal would act on: no command prints one as it is, no picture has one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pardnn.api.draw import draw_plan
from pardnn.errors import PardnnError, printable, shown
from pardnn.graph.file import read_graph
from pardnn.plan.file import read_plan
from pardnn.planner.costs import costs_for
from tests.fuzz.targets import DATA, UNSAFE, built_once, command

HOSTILE = "\x1b[2Jx\x07\u202ey\u2066\x9b\x00\x85\u2028<b>\r\n!"
FIELDS = {"name", "source", "module", "group", "backward_of", "alias_of", "tensor", "from", "to"}
LISTS = {"inputs", "after", "returns"}


def hostile(data: Any, key: str = "") -> Any:
    """Return JSON data in which every name has characters that act on a terminal."""
    if isinstance(data, dict):
        return {k: hostile(v, k) for k, v in data.items()}
    if isinstance(data, list):
        return [hostile(item, key if key in LISTS else "") for item in data]
    return HOSTILE + data if key in FIELDS | LISTS and isinstance(data, str) else data


@pytest.fixture
def files(tmp_path: Path) -> Iterator[Path]:
    for name, path in (
        ("g", DATA / "fuzz/graph.json"),
        ("t", DATA / "tiny/graph.json"),
        ("c", DATA / "tiny/cluster.json"),
    ):
        data = json.loads(path.read_text())
        data.pop("checksum", None)
        (tmp_path / f"{name}.json").write_text(json.dumps(hostile(data)))
    with built_once():
        yield tmp_path


def test_what_acts_on_a_terminal_is_escaped() -> None:
    assert printable("a b\u00a0é中") == "a b\u00a0é中"
    assert printable("\x1b\u202e\n") == r"\x1b\u202e\n"
    assert printable("a\tb\n\r", lines=True) == "a\tb\n\\r"
    assert UNSAFE.search(printable(HOSTILE, lines=True)) is None
    assert "\n" not in printable(HOSTILE)
    assert UNSAFE.search(str(PardnnError(HOSTILE))) is None
    assert UNSAFE.search(shown(HOSTILE)) is None


@pytest.mark.jit
@pytest.mark.parametrize("algorithm", ["heft", "tofu"])
def test_no_command_prints_a_name_as_it_is(files: Path, algorithm: str) -> None:
    graph, plan, on = files / "g.json", files / "p.json", ("--cluster", files / "c.json")
    of = (plan, "--graph", graph)
    for form in ((), ("--json",)):
        assert command("plan", graph, *on, "--algorithm", algorithm, "-o", plan, *form) == 0
        assert command("check", *of, *form) == 0
        assert command("simulate", *of, *form) == 0
        command("convert", plan, files / "out", "--graph", graph, *form)
        assert command("layout", *of, "-o", files / "l.svg", *form) in (0, 2)
        assert command("report", *of, "-o", files / "r.html", *form) == 0
    for what in (HOSTILE + "addmm", HOSTILE, "--layers"):  # there is no op of the second name
        command("explain", *of, what)
    written = [files / "r.html", *([files / "l.svg"] if algorithm == "tofu" else [])]
    found, decision = read_graph(graph), read_plan(plan)
    assert decision.cluster is not None
    (files / "p.svg").write_text(draw_plan(found, decision, costs_for(found, decision.cluster)))
    for path in (*written, files / "p.svg"):
        text = path.read_text(encoding="utf-8")
        assert UNSAFE.search(text) is None, path
        assert HOSTILE[-3:] not in text, path


@pytest.mark.jit
def test_nor_does_an_error(files: Path) -> None:
    graph, on = files / "t.json", ("--cluster", files / "c.json")
    assert command("estimate", graph, *on) == 0
    assert command("compare", graph, *on, "--algorithms", "heft,single") == 3  # neither fits
    assert command("plan", graph, *on, "--algorithm", HOSTILE) == 2
    assert command("plan", HOSTILE.replace("\0", ""), *on) in (2, 4)
    data = json.loads(graph.read_text())
    data["ops"][-1]["inputs"] = [HOSTILE + "none"]
    graph.write_text(json.dumps(data))
    assert command("plan", graph, *on) == 4
    data[HOSTILE] = 1
    graph.write_text(json.dumps(data))
    assert command("plan", graph, *on) == 4


@pytest.mark.parametrize(
    "words",
    [
        ("--seed", 2**31), ("--seed", 10**30), ("--seed", -1), ("--time-limit", "nan"),
        ("--time-limit", "inf"), ("--time-limit", "1e300"), ("--reserve", "nan"),
        ("--latency", "1e400s"), ("--bandwidth", "1e-400GB/s"),
    ],
)  # fmt: skip
def test_numbers_that_make_no_sense_are_usage_errors(files: Path, words: tuple[Any, ...]) -> None:
    graph = DATA / "tiny" / "graph.json"
    assert command("plan", graph, "--devices", 2, *words) == 2


@pytest.mark.parametrize("timeout", ["nan", "inf", "0", "-1", "1e300"])
def test_so_is_a_timeout(tmp_path: Path, timeout: str) -> None:
    (tmp_path / "s.py").write_text("def make():\n    raise ValueError\n")
    target = f"{tmp_path / 's.py'}:make"
    assert command("run", target, "--devices", 1, "--timeout", timeout) == 2
