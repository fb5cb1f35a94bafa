"""Questions on the command line: three that users ask, each answered by one command."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from pardnn.report.explained import Alternative
from pardnn.report.explained_text import _answer

Run = Any
pytestmark = pytest.mark.jit


@pytest.fixture
def plan(run: Run, tiny: Path, tmp_path: Path) -> Path:
    """A plan of the worked example on two devices of 3000 bytes."""
    path = tmp_path / "plan.json"
    cluster = ("--cluster", tiny / "cluster.json", "--reserve", 0, "--algorithm", "round-robin")
    assert run("plan", tiny / "graph.json", *cluster, "-o", path)[0] == 0
    return path


def test_why_does_device_1_idle(run: Run, run_json: Run, tiny: Path, plan: Path) -> None:
    ask = ("explain", plan, "--graph", tiny / "graph.json")
    status, found = run_json(*ask, 1)
    assert status == 0
    assert (found["subject"], found["name"]) == ("device", "d1")
    waits = sum(wait["seconds"] for wait in found["waits"])
    assert waits == pytest.approx(found["idle_s"])
    _, judged = run_json("simulate", plan, "--graph", tiny / "graph.json")
    assert found["busy_s"] == judged["busy_s"][1]
    assert found["memory"]["peak_bytes"] == judged["peak_bytes"][1]
    text = run(*ask, "d1")[1]
    assert "it idles while: d0 computes" in text


def test_lines_in_a_pipe_are_whole(
    run: Run, tiny: Path, plan: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cells were wrapped in the middle of a name at 80 columns, for `grep` to miss."""
    ask = ("explain", plan, "--graph", tiny / "graph.json", "1")
    monkeypatch.delenv("COLUMNS", raising=False)
    wide = run(*ask)[1]
    monkeypatch.setenv("COLUMNS", "30")
    assert len(run(*ask)[1].splitlines()) > len(wide.splitlines())
    assert all(line == line.rstrip() for line in wide.splitlines())


def test_a_sentence_stands_at_the_left(run: Run, tiny: Path, plan: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    shown = run("report", plan, "--graph", tiny / "graph.json", "-o", page)[1].splitlines()
    at = shown[0].index(str(page))
    assert all(line[at - 1] == " " and line[at] != " " for line in shown[:4])
    assert shown[1].endswith(" KiB")


def test_what_would_more_memory_bring(run: Run, run_json: Run, tiny: Path, plan: Path) -> None:
    ask = ("explain", plan, "--graph", tiny / "graph.json", "--memory")
    status, found = run_json(*ask)
    assert (status, found["anew"]) == (0, [])
    assert [sum(h["bytes"] for h in d["held"]) for d in found["devices"]] == [
        d["peak_bytes"] for d in found["devices"]
    ]
    for change in ("+1KiB", "-200B"):
        status, found = run_json(*ask, change, "--algorithm", "pardnn")
        assert status == 0
        assert [each["fits"] for each in found["anew"]] == [True, True]
    status, found = run_json(*ask, "-2000B", "--algorithm", "pardnn")
    assert [each["fits"] for each in found["anew"]] == [True, False]
    status, found = run_json(*ask, "+1XiB")
    assert (status, found["error"]["code"]) == (2, "E202")
    first = run(*ask, "+1KiB", "--algorithm", "pardnn")[1].splitlines()[0]
    assert first.startswith("with +1KiB (limit ")
    assert "no change, a step takes" in first
    first = run(*ask, "-2000B", "--algorithm", "pardnn")[1].splitlines()[0]
    assert first.endswith(": no plan was found that fits")


def test_the_answer_stands_first() -> None:
    now = Alternative(
        what="planned again, unchanged, by heft", judged=True, fits=True, makespan_s=0.02,
        change_s=0.0, peak_bytes=(1,), transfer_bytes=0,
    )  # fmt: skip
    what = "planned again, with +1 device (3 in all), by pardnn"
    faster = dataclasses.replace(now, what=what, makespan_s=0.01)
    (said,) = _answer((now, faster))
    assert said == (
        "with +1 device (3 in all): a step takes 10 ms instead of 20 ms, -10 ms (-50.0 %), both "
        "planned again (predicted)"
    )
    assert list(_answer((dataclasses.replace(now, makespan_s=None), faster))) == [
        "with +1 device (3 in all): no plan was found that fits without this change"
    ]
    assert list(_answer(())) == []


def test_which_layer_should_be_smaller(run: Run, run_json: Run, tiny: Path, plan: Path,
                                       tmp_path: Path) -> None:  # fmt: skip
    data = json.loads((tiny / "graph.json").read_text())
    for op in data["ops"]:
        op["module"] = "net.0" if op["name"] in ("h", "v", "w") else "net.1"
    graph = tmp_path / "g.json"
    graph.write_text(json.dumps(data))
    assert run("plan", graph, "--devices", 2, "--algorithm", "heft", "-o", plan)[0] == 0
    ask = ("explain", plan, "--graph", graph)
    status, found = run_json(*ask, "--layers")
    assert status == 0
    assert {row["name"] for row in found["rows"]} == {"net.0", "net.1"}
    gains = [row["half_change_s"] for row in found["rows"]]
    assert gains == sorted(gains)
    text = run(*ask, "--layers")[1]
    assert "half: step" in text
    assert f"for time, make {found['rows'][0]['name']} smaller: halving it changes" in text
    assert re.search(r"for memory, net\.[01]: halving it changes the largest peak by -", text)
    status, one = run_json(*ask, "net.1")
    assert one["rows"][0] in found["rows"]
    assert one["subject"] == "layer"


def test_no_costs_are_not_costs_that_are_empty(run: Run, tiny: Path, plan: Path) -> None:
    of = (plan, "--graph", tiny / "graph.json", "--costs", "")
    wrong = (("simulate", *of), ("report", *of, "-o", plan.with_name("r.html")),
             ("draw", *of, "-o", plan.with_name("p.svg")), ("explain", *of, "--time"),
             ("diff", plan, *of))  # fmt: skip
    for words in wrong:
        status, _, err = run(*words)
        assert (status, "E231" in err) == (2, True), words


def test_other_questions(run: Run, run_json: Run, tiny: Path, plan: Path) -> None:
    ask = ("explain", plan, "--graph", tiny / "graph.json")
    status, found = run_json(*ask, "--time")
    assert status == 0
    assert sum(each["seconds"] for each in found["path"]) == pytest.approx(found["makespan_s"])
    status, found = run_json(*ask, "--time", "+1", "--algorithm", "heft")
    assert [each["fits"] for each in found["anew"]] == [True, True]
    assert len(found["anew"][1]["peak_bytes"]) == 3
    status, found = run_json(*ask, "b")
    assert (found["subject"], found["memory"][0]["last_reader"]) == ("op", "c")
    assert [each["what"] for each in found["alternatives"]]
    status, found = run_json(*ask, "w1")
    assert (found["subject"], found["made_by"]) == ("tensor", "u")
    for name in ("b", "w1", "--time"):
        assert run(*ask, name)[0] == 0


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ((), "E240"),
        (("--memory", "--time"), "E240"),
        (("--layers", "b"), "E240"),
        (("bb",), "E241"),
        (("--timee",), "E200"),
        (("--time", "many"), "E242"),
        (("--memory", "--algorithm", "none"), "E210"),
    ],
)
def test_questions_that_are_none(run_json: Run, tiny: Path, plan: Path, arguments, code) -> None:
    status, found = run_json("explain", plan, "--graph", tiny / "graph.json", *arguments)
    assert (status, found["error"]["code"]) == (2, code)


def test_plans_are_compared(run: Run, run_json: Run, tiny: Path, plan: Path,
                            tmp_path: Path) -> None:  # fmt: skip
    other, graph = tmp_path / "other.json", tiny / "graph.json"
    cluster = ("--cluster", tiny / "cluster.json", "--reserve", 0)
    assert run("plan", graph, *cluster, "--algorithm", "single", "-o", other)[0] == 0
    status, found = run_json("diff", plan, other, "--graph", graph)
    assert (status, found["same"], found["after"]["transfer_bytes"]) == (0, False, 0)
    assert found["moved"]
    assert "moved: layer" in run("diff", plan, other, "--graph", graph)[1]
    status, out, _ = run("diff", plan, plan, "--graph", graph)
    assert (status, out) == (0, "same\n")
    status, found = run_json("diff", plan, other, "--graph", graph, "--other-graph", graph)
    assert (status, found["only_before"], found["only_after"]) == (0, [], [])
    two, of_two = tmp_path / "two.json", tmp_path / "plan-of-two.json"
    content = json.loads(graph.read_text())
    content["ops"][0]["outputs"][0]["bytes"] += 4
    two.write_text(json.dumps(content))
    assert run("plan", two, *cluster, "--algorithm", "single", "-o", of_two)[0] == 0
    status, _, err = run("diff", plan, of_two, "--graph", graph)
    assert status == 5
    assert "--graph GRAPH_OF_A --other-graph GRAPH_OF_B" in err
    assert run("diff", plan, of_two, "--graph", graph, "--other-graph", two)[0] == 0
