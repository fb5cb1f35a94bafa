"""`convert`, all ways: inputs, graphs, plans, placements and splits."""

import dataclasses
import json
from pathlib import Path

import pytest

import pardnn
from pardnn.api.convert import (
    GRAPH,
    MSR_INPUT,
    MSR_SPLIT,
    PLACEMENT,
    PLAN,
    ConvertOptions,
    convert,
)
from pardnn.cluster import Cluster
from pardnn.errors import FileError, InvalidPlanError, MismatchError, UsageError
from pardnn.graph.file import read_graph, write_graph
from pardnn.plan.check import plan_problems
from pardnn.plan.file import read_plan, write_plan
from pardnn.planner.options import PlanOptions
from testbed import DATA
from testbed.small_graphs import small_case

INPUT = DATA / "msr-fiddle" / "layer_bert24_inference.json.gz"


@pytest.fixture
def read(tmp_path: Path) -> tuple[Path, Cluster]:
    """The graph and the cluster of a published input."""
    graph, cluster = tmp_path / "g.json.gz", tmp_path / "c.json"
    done = convert(INPUT, graph, ConvertOptions(cluster_file=cluster))
    assert (done.format_in, done.format_out, done.ops) == (MSR_INPUT, GRAPH, 32)
    return graph, Cluster.load(cluster)


def test_the_cluster_of_an_input(read: tuple[Path, Cluster]) -> None:
    cluster = read[1]
    kinds = [device.type for device in cluster.devices]
    assert kinds == ["accelerator"] * 5 + ["cpu"] * 8
    assert {device.memory for device in cluster.devices[:5]} == {600 * 2**20}
    assert cluster.devices[5].memory is None
    gib = 2**30
    assert cluster.seconds(0, 1, gib) == 1.0
    assert cluster.seconds(0, 5, gib) == cluster.seconds(5, 0, gib) == 0.5
    assert cluster.seconds(5, 12, gib) < 1e-8


def test_a_graph_goes_back(read: tuple[Path, Cluster], tmp_path: Path) -> None:
    graph, cluster = read
    back, again = tmp_path / "back.json", tmp_path / "again.json"
    done = convert(graph, back, ConvertOptions(cluster=cluster))
    assert (done.format_in, done.format_out) == (GRAPH, MSR_INPUT)
    convert(back, again, ConvertOptions())
    assert read_graph(again).ops == read_graph(graph).ops
    with pytest.raises(UsageError, match="one memory limit"):
        convert(graph, back, ConvertOptions(cluster=Cluster.uniform(2)))


def test_splits_plans_and_placements(read: tuple[Path, Cluster], tmp_path: Path) -> None:
    """split -> plan -> placement -> split gives the first split."""
    graph, cluster = read
    options = ConvertOptions(graph_file=graph, cluster=cluster, planning=PlanOptions(reserve=0.0))
    ids = [op.name for op in read_graph(graph).ops]
    nodes = [int(name[1:]) for name in ids]
    # As many bytes as fit one accelerator after another, in order.
    parts: list[list[int]] = [[]]
    held = 0
    for node, op in zip(nodes, read_graph(graph).ops, strict=True):
        size = sum(tensor.bytes for tensor in op.outputs)
        if held + size > 450 * 2**20:
            parts.append([])
            held = 0
        parts[-1].append(node)
        held += size
    rows = [{"nodes": part} for part in parts] + [{"nodes": []}] * (5 - len(parts))
    split, plan, lines, back = (tmp_path / name for name in ("s.json", "p.json", "p.txt", "b.json"))
    split.write_text(json.dumps({"fpgas": rows, "cpus": [{"nodes": []}] * 8}))
    assert convert(split, plan, options).format_out == PLAN
    assert plan_problems(read_graph(graph), read_plan(plan)) == []
    assert convert(plan, lines, options).format_out == PLACEMENT
    done = convert(lines, back, ConvertOptions(to=MSR_SPLIT, graph_file=graph, cluster=cluster))
    assert (done.format_in, done.format_out) == (PLACEMENT, MSR_SPLIT)
    assert json.loads(back.read_text()) == json.loads(split.read_text())
    convert(plan, back, ConvertOptions(to=MSR_SPLIT, graph_file=graph))
    assert json.loads(back.read_text()) == json.loads(split.read_text())
    convert(split, back, ConvertOptions(to=PLACEMENT, graph_file=graph, cluster=cluster))
    assert back.read_bytes() == lines.read_bytes()


@pytest.mark.parametrize("to", [PLACEMENT, MSR_SPLIT])
def test_a_plan_for_another_number_of_devices_than_its_cluster_is_refused(
    to: str, tmp_path: Path
) -> None:
    graph, cluster = small_case(0, seed=0)
    plan = pardnn.plan(graph, cluster, "round-robin")
    fewer = Cluster.uniform(cluster.num_devices - 1)
    write_graph(graph, tmp_path / "g.json")
    write_plan(dataclasses.replace(plan, cluster=fewer), tmp_path / "p.json")
    options = ConvertOptions(to=to, graph_file=tmp_path / "g.json")
    with pytest.raises(InvalidPlanError, match="order has 3 devices, the cluster 2"):
        convert(tmp_path / "p.json", tmp_path / "out", options)
    assert not (tmp_path / "out").exists()


def test_what_is_missing_is_named(read: tuple[Path, Cluster], tmp_path: Path) -> None:
    graph, cluster = read
    out, split = tmp_path / "out", tmp_path / "s.json"
    split.write_text('{"fpgas": [], "cpus": []}')
    for source, options, reason in (
        (split, ConvertOptions(), "--graph"),
        (split, ConvertOptions(graph_file=graph), "--cluster"),
        (graph, ConvertOptions(), "--devices"),
        (INPUT, ConvertOptions(to=PLAN), "it can become pardnn.graph/1, not 'pardnn.plan/1'"),
    ):
        with pytest.raises(UsageError, match=reason):
            convert(source, out, options)
    with pytest.raises(MismatchError, match="32 such nodes"):
        convert(split, out, ConvertOptions(graph_file=graph, cluster=cluster))
    split.write_text("{}")
    with pytest.raises(FileError, match="unknown format"):
        convert(split, out, ConvertOptions())
    assert not out.exists()
