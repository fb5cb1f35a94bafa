"""The report of a plan: its figures are those of the plan, and its names are only text."""

import dataclasses
import json
import math
import os
import re
import subprocess
import sys

import pytest
from pydantic import TypeAdapter

import pardnn
from pardnn.api.report import report
from pardnn.api.simulate import simulate
from pardnn.cluster import Cluster
from pardnn.errors import MismatchError, printable
from pardnn.graph.build import build_graph
from pardnn.graph.file import write_graph
from pardnn.graph.ir import Op, Tensor
from pardnn.plan.file import write_plan
from pardnn.plan.plan import Plan
from pardnn.plan.run_record import RankTimes, RunRecord, write_run
from pardnn.report.page import bars
from pardnn.report.page.contents import Report
from pardnn.report.page.html import data_text, page_html
from testbed import hand_graphs
from testbed.families import training_step
from tests.report.steps import HOSTILE, LAYERS, hostile_step, planned
from tests.strategies import random_graph


@pytest.fixture(scope="module")
def step():
    graph = hostile_step()
    return graph, planned(graph, memory="4KiB")


def data_of(page: str) -> dict:
    """The data in a page, read as a browser does: up to the first end of a script."""
    found = re.search(r'<script type="application/json" id="report">(.*?)</script>', page, re.S)
    assert found is not None
    return json.loads(found[1])


@pytest.mark.jit
def test_times_are_those_of_the_preset_that_the_plan_was_made_with():
    ops = [dataclasses.replace(op, seconds=None) for op in training_step(8).ops]
    graph = build_graph("of a preset", ops)
    cluster = Cluster.uniform(2, memory="16GiB", bandwidth=25e9, latency=25e-6)
    slow, fast = (pardnn.plan(graph, cluster, costs=name) for name in ("k80", "v100"))
    assert slow.predicted.makespan_s != fast.predicted.makespan_s
    for plan in slow, fast:
        assert report(graph, plan).times.makespan_s == plan.predicted.makespan_s
        assert simulate(graph, plan).makespan_s == plan.predicted.makespan_s
    assert report(graph, slow, costs="v100").times.makespan_s != slow.predicted.makespan_s


def test_figures_are_those_of_the_simulation(step):
    graph, plan = step
    found, judged = report(graph, plan), simulate(graph, plan)
    assert found.times.makespan_s == judged.makespan_s == plan.predicted.makespan_s
    assert found.times.period_s == judged.period_s
    assert tuple(row.peak_bytes for row in found.devices) == judged.peak_bytes
    assert sum(link.bytes for link in found.links) == judged.transfer_bytes
    assert [row.busy_s for row in found.devices] == pytest.approx(judged.busy_s)
    assert dict(zip(found.bars.name, found.bars.device, strict=True)) == plan.placement
    assert sum(found.messages.bytes) == judged.transfer_bytes
    for row, chart in zip(found.devices, found.memory, strict=True):
        totals = [sum(column) for column in zip(*chart.held, strict=True)]
        assert max(totals) == totals[chart.peak_at] == row.peak_bytes
        live = sum(held.bytes for held in chart.live) + chart.others_bytes
        workspace = chart.held[-1][chart.peak_at]
        assert live + workspace == row.peak_bytes
    whole = found.modules[0]
    assert whole.path == ""
    assert sum(whole.phase_s) == pytest.approx(sum(judged.busy_s))
    assert sum(whole.device_s.values()) == pytest.approx(sum(judged.busy_s))


def test_the_critical_path_fills_the_step_and_idle_time_is_explained(step):
    found = report(*step)
    assert found.times.critical_compute_s + found.times.critical_messages_s == pytest.approx(
        found.times.makespan_s
    )
    for row in found.devices:
        waited = sum(seconds for _, seconds in row.waits)
        assert waited == pytest.approx(found.times.makespan_s - row.busy_s)


def test_idle_time_of_many_reasons_is_told_whole():
    graph = random_graph(1, 60)
    found = report(graph, pardnn.plan(graph, pardnn.Cluster.uniform(4), "round-robin"))
    many = [row for row in found.devices if len(row.waits) > 4]
    assert many
    for row in many:
        assert row.waits[-1][0] == "other waits"
        waited = sum(seconds for _, seconds in row.waits)
        assert waited == pytest.approx(found.times.makespan_s - row.busy_s)


def test_stages_run_an_op_on_one_device_for_all_pieces():
    graph, cluster = hand_graphs.mlp(64, 64, 64, 64), pardnn.Cluster.uniform(2)
    for algorithm, how in (("1f1b", "on one device for all"), ("round-robin", "placed separately")):
        plan = pardnn.plan(graph, cluster, algorithm, microbatches=2, costs="v100")
        assert how in report(graph, plan).decided[0]


def test_constraints_that_a_plan_meets_are_listed():
    graph, cluster = random_graph(1, 20), pardnn.Cluster.uniform(2)
    names = [op.name for op in graph.ops][:9]
    pins = [pardnn.pin(f"op:{name}", i % 2) for i, name in enumerate(names)]
    wish = pardnn.prefer(pardnn.pin(f"op:{names[0]}", 0), price_s=1.0)
    said = " ".join(report(graph, pardnn.plan(graph, cluster, "heft", constraints=pins)).decided)
    assert f"Constraints, all met: pin op:{names[0]} to 0; pin op:{names[1]} to 1; " in said
    assert "and 1 more." in said
    wished = report(graph, pardnn.plan(graph, cluster, "heft", constraints=[wish]))
    assert not any("Constraints" in line for line in wished.decided)
    assert any("preference met" in note for note in wished.notes)


def test_phases_of_a_step(step):
    found = report(*step)
    phase = {name: found.bars.phase[i] for i, name in enumerate(found.bars.name)}
    names = [f"{name}{i}" for i, name in enumerate(HOSTILE)]
    assert {phase[name] for name in names} == {0}
    assert phase["d3"] == 1
    assert phase["g3"] == 2
    assert phase["u3"] == 3
    assert phase["w3"] == phase["x"] == 4
    module = next(row for row in found.modules if row.path == f"net.3{HOSTILE[3]}")
    assert module.ops == 3


def test_a_sentence_says_that_memory_binds():
    graph = hostile_step()
    without = report(graph, planned(graph))
    assert not [each for each in without.binds if each.what == "memory"]
    most = max(row.peak_bytes for row in without.devices)
    tight = planned(graph, memory=f"{most}B")
    text = next(each.text for each in report(graph, tight).binds if each.what == "memory")
    assert f"holds {most / 1024:.2f} KiB of {most / 1024:.2f} KiB usable" in text


@pytest.mark.jit
def test_a_busy_device_bounds_the_step_by_what_it_idles():
    graph, cluster = hand_graphs.mlp(2048, 2048, 2048, 2048), pardnn.Cluster.uniform(2)
    for algorithm in ("single", "round-robin"):
        plan = pardnn.plan(graph, cluster, algorithm, microbatches=2, costs="v100")
        found = report(graph, plan)
        busy = max(row.busy_s for row in found.devices) / found.times.makespan_s
        text = next(each.text for each in found.binds if each.what == "compute")
        least = "no" if algorithm == "single" else f"at most {100 * (1 - busy):.1f} %"
        assert text.endswith(f"gets {least} shorter unless that device has less or faster work.")


def test_a_page_says_whose_costs_it_shows(step):
    graph, plan = step
    assert not any("other costs" in note for note in report(graph, plan).notes)
    other = dataclasses.replace(plan.predicted, makespan_s=1.0)
    plan = dataclasses.replace(plan, predicted=other, checksum=None)
    assert any("other costs: it predicts 1 s" in note for note in report(graph, plan).notes)


def test_names_are_only_text(step):
    page = page_html(report(*step))
    # One script of ours, and data; nothing of a name ends or begins an element.
    assert re.findall(r"<script[^>]*>", page) == [
        '<script type="application/json" id="report">', '<script type="module">',
    ]  # fmt: skip
    assert "<img" not in page
    assert "<svg" not in page
    data = data_of(page)
    assert {printable(f"{name}{i}") for i, name in enumerate(HOSTILE)} <= set(data["bars"]["name"])
    text = data_text(report(*step))
    assert not set(text) & set("<>&\u2028\u2029")


def test_the_page_needs_nothing_but_itself(step):
    page = page_html(report(*step))
    assert "default-src 'none'; script-src 'sha256-" in page
    script = page[page.index('<script type="module">') :]
    for forbidden in ("innerHTML", "eval(", "outerHTML", "document.write", "http:", "https:"):
        assert forbidden not in script
    assert re.findall(r'(?:src|href)="(?!#)', page) == []
    assert re.findall(r"<[a-z][^>]*\son[a-z]+=", page) == []


def test_same_plan_same_page(step):
    assert page_html(report(*step)) == page_html(report(*step))


def test_the_data_keeps_to_its_schema(step):
    data = data_of(page_html(report(*step)))
    assert data.pop("phases")
    assert data.pop("kinds")
    TypeAdapter(Report).validate_json(json.dumps(data))


def test_a_run_stands_beside_the_prediction(step, tmp_path):
    graph, plan = step
    write_run(a_run(plan), tmp_path / "run.json")
    found = report(graph, plan, run=tmp_path / "run.json")
    assert found.measured is not None
    at = found.bars.name.index("d2")
    assert found.measured.seconds[at] == 0.5 * (at + 1)
    assert [rank.step_s for rank in found.measured.ranks] == [8.0, 8.0]
    assert found.measured.ranks[1].waited_s == 0.25
    calls = next(row for row in found.measured.kinds if row.kind == "call")
    assert calls.ops == 3 * LAYERS
    assert calls.measured_s == pytest.approx(
        sum(s for s, phase in zip(found.measured.seconds, found.bars.phase, strict=True)
            if phase in (0, 1, 2))
    )  # fmt: skip
    page = page_html(found)
    assert "Measured next to predicted: medians of 1 steps" in page
    assert '<a href="#measured">' in page
    assert "<h2" not in page.partition("measured-title")[0].rpartition("</section>")[2]
    assert 'href="#measured"' not in page_html(report(graph, plan))


def a_run(plan: Plan) -> RunRecord:
    """Op number i of the graph begins at i and takes half of i + 1 seconds."""
    number = {name: i for i, name in enumerate(plan.placement)}
    ranks = [
        RankTimes(
            step_s=(8.0,), peak_bytes=100, op=row,
            start_s=tuple(float(number[name]) for name in row),
            seconds=tuple(0.5 * (number[name] + 1) for name in row),
            tensor=("x",) * rank, wait_start_s=(0.0,) * rank, wait_s=(0.25,) * rank,
        )
        for rank, row in enumerate(plan.order)
    ]  # fmt: skip
    return RunRecord(ranks=tuple(ranks))


def test_the_run_of_another_plan_is_refused(step, tmp_path):
    graph, plan = step
    record = a_run(plan)
    for ranks, said in (
        (record.ranks[::-1], "not of this plan"),
        ((dataclasses.replace(record.ranks[0], seconds=()), record.ranks[1]), "lengths"),
    ):
        write_run(dataclasses.replace(record, ranks=ranks), tmp_path / "run.json")
        with pytest.raises(MismatchError, match=said) as caught:
            report(graph, plan, run=tmp_path / "run.json")
        assert caught.value.code == "E503"


def test_updates_and_states_belong_to_the_module_of_their_parameter():
    ops = [
        Op(name="net.0.weight", kind="parameter", outputs=(Tensor(name="w", bytes=4),)),
        Op(name="opt.state.net.0.weight.mean", kind="state", outputs=(Tensor(name="m", bytes=4),)),
        Op(name="h", kind="call", inputs=("w", "m"), outputs=(Tensor(name="h", bytes=4),),
           module="net.0", seconds={"accelerator": 1.0}),
    ]  # fmt: skip
    graph = build_graph(
        "owned", [dataclasses.replace(op, memory="residual") for op in ops[:2]] + ops[2:]
    )
    rows = {row.path: row for row in report(graph, planned(graph, 1)).modules}
    assert list(rows) == ["", "net", "net.0"]
    assert rows["net.0"].state_bytes == 8


@pytest.mark.jit
def test_many_ops_are_drawn_as_runs(monkeypatch):
    graph = training_step(800)
    plan = planned(graph, 3)
    alone = report(graph, plan)
    monkeypatch.setattr(bars, "MOST_BARS", 100)
    monkeypatch.setattr(bars, "LEAST_SLICES", 4)
    found = report(graph, plan)
    computing = sum(1 for seconds in alone.bars.seconds if seconds > 0)
    assert len(found.bars.name) < computing / 4
    assert sum(found.bars.count) == computing
    assert len(found.messages.tensor) < len(alone.messages.tensor)
    assert sum(found.messages.bytes) == sum(alone.messages.bytes)
    assert found.devices == alone.devices
    assert found.modules == alone.modules
    assert any("are drawn as" in note for note in found.notes)
    assert not any("are drawn as" in note for note in alone.notes)


def test_the_command_writes_a_page(step, tmp_path, capsys):
    from pardnn.cli import main

    graph, plan = step
    write_graph(graph, tmp_path / "g.json")
    write_plan(plan, tmp_path / "p.json")
    paths = [str(tmp_path / name) for name in ("p.json", "g.json", "r.html")]
    with pytest.raises(SystemExit) as end:
        main.main(["report", paths[0], "--graph", paths[1], "-o", paths[2], "--json"])
    assert end.value.code == 0
    said = json.loads(capsys.readouterr().out)
    page = (tmp_path / "r.html").read_bytes()
    assert said["bytes"] == len(page)
    assert page.decode() == page_html(report(graph, plan))


def test_numbers_that_json_has_not_are_refused(step):
    """`NaN` in the data would end the script of the page with a syntax error."""
    found = report(*step)
    for odd in (math.nan, math.inf):
        times = dataclasses.replace(found.times, makespan_s=odd)
        with pytest.raises(ValueError, match="not JSON compliant"):
            data_text(dataclasses.replace(found, times=times))


def test_same_bytes_whatever_the_order_of_sets(step, tmp_path):
    graph, plan = step
    write_graph(graph, tmp_path / "g.json")
    write_plan(plan, tmp_path / "p.json")
    pages = set()
    for seed in ("1", "2"):
        page = tmp_path / f"{seed}.html"
        command = [
            sys.executable, "-m", "pardnn", "report", str(tmp_path / "p.json"),
            "--graph", str(tmp_path / "g.json"), "-o", str(page),
        ]  # fmt: skip
        subprocess.run(command, check=True, env={**os.environ, "PYTHONHASHSEED": seed})
        pages.add(page.read_bytes())
    assert len(pages) == 1
