"""`pardnn export` and `pardnn draw`: files for other tools."""

from pathlib import Path
from typing import Any

from pardnn.graph.file import write_graph
from pardnn.plan.file import write_plan
from tests.report.steps import hostile_step, planned


def test_export_and_draw_on_the_command_line(run_json: Any, tmp_path: Path) -> None:
    graph = hostile_step()
    plan = planned(graph)
    graph_file, plan_file = tmp_path / "g.json", tmp_path / "p.json"
    write_graph(graph, graph_file)
    write_plan(plan, plan_file)
    out = tmp_path / "out"
    status, found = run_json("export", plan_file, "--graph", graph_file, "--to", "dot", "-o", out)
    assert (status, found["bytes"]) == (0, out.stat().st_size)
    assert found["format"] == "dot"
    status, found = run_json("export", plan_file, "--graph", graph_file, "--to", "png", "-o", out)
    assert (status, found["error"]["code"]) == (2, "E243")
    status, _ = run_json("draw", plan_file, "--graph", graph_file, "-o", tmp_path / "p.svg")
    assert status == 0
    picture = (tmp_path / "p.svg").read_text()
    assert picture.startswith("<svg")
    assert "<script" not in picture
