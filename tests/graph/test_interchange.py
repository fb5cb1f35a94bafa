"""msr-fiddle inputs and splits: what goes out is what came in."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pardnn import files
from pardnn.errors import FileError, MismatchError, PardnnError, UsageError
from pardnn.graph.build import build_graph
from pardnn.graph.file import graph_from_json, graph_to_json
from pardnn.graph.interchange import (
    HOST_BANDWIDTH,
    MsrMachine,
    graph_from_msr,
    graph_to_msr,
    node_ids,
    split_from_json,
    split_to_json,
)
from pardnn.graph.ir import Graph, Op, Tensor
from testbed import DATA

FOLDER = DATA / "msr-fiddle"
PUBLISHED = sorted(FOLDER.glob("*.json.gz"))


def edge(source: int, target: int, num_bytes: int) -> dict[str, Any]:
    return {"sourceId": source, "destId": target, "cost": num_bytes / HOST_BANDWIDTH * 1e3}


def node(number: int, **fields: Any) -> dict[str, Any]:
    return {
        "id": number, "supportedOnFpga": 1, "cpuLatency": 20.0, "fpgaLatency": 2.0,
        "isBackwardNode": False, "size": 100.0,
    } | fields  # fmt: skip


def whole(nodes: list[Any], edges: list[Any]) -> dict[str, Any]:
    machine = {"maxSizePerFPGA": 1000.0, "maxFPGAs": 2, "maxCPUs": 1}
    return machine | {"nodes": nodes, "edges": edges}


def read(data: Any) -> tuple[Graph, MsrMachine]:
    return graph_from_msr(json.dumps(data).encode(), "input", "g")


def test_a_node_is_an_op() -> None:
    graph, machine = read(
        whole(
            [
                node(4, name="mm", colorClass=7),
                node(1, supportedOnFpga=False, isBackwardNode=True),
                node(9, size=0),
            ],
            [edge(4, 1, 60), edge(4, 9, 60), edge(9, 1, 10)],
        )
    )
    assert machine == MsrMachine(accelerators=2, accelerator_bytes=1000, cpus=1)
    first, second, third = graph.ops
    assert (first.name, first.module, first.group) == ("n4", "mm", "color7")
    assert first.seconds == {"accelerator": 2e-3, "cpu": 20e-3}
    assert [(t.name, t.bytes) for t in first.outputs] == [("n4:0", 60), ("n4:rest", 40)]
    assert first.memory == "residual"
    assert second.inputs == ("n4:0", "n9:0")
    assert second.seconds == {"cpu": 20e-3}
    assert (third.memory, third.outputs[0].bytes) == ("reference", 10)


def _sent(data: dict[str, Any]) -> dict[int, float]:
    return {e["sourceId"]: e["cost"] for e in data["edges"]}


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert {k: v for k, v in one.items() if k[:3] == "max"} == {
        k: v for k, v in other.items() if k[:3] == "max"
    }
    sent, colors = _sent(one), {}
    for before, after in zip(one["nodes"], other["nodes"], strict=True):
        assert after["id"] == before["id"]
        assert bool(after["supportedOnFpga"]) == bool(before["supportedOnFpga"])
        assert after["isBackwardNode"] == bool(before["isBackwardNode"])
        assert after["cpuLatency"] == pytest.approx(before["cpuLatency"], rel=1e-12)
        if before["supportedOnFpga"]:
            assert after["fpgaLatency"] == pytest.approx(before["fpgaLatency"], rel=1e-12)
        assert colors.setdefault(before.get("colorClass"), after.get("colorClass")) == after.get(
            "colorClass"
        )
        if before["size"] >= sent.get(before["id"], 0.0) / 1e3 * HOST_BANDWIDTH:
            assert after["size"] == pytest.approx(before["size"], abs=1)
    found = {(e["sourceId"], e["destId"]): e["cost"] for e in other["edges"]}
    assert found.keys() == {(e["sourceId"], e["destId"]) for e in one["edges"]}
    for each in one["edges"]:  # to a whole byte
        cost = found[each["sourceId"], each["destId"]]
        assert cost == pytest.approx(each["cost"], rel=1e-9, abs=1e3 / HOST_BANDWIDTH)


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: path.name)
def test_published_inputs_there_and_back(path: Path) -> None:
    content = files.read_bytes(path)
    graph, machine = graph_from_msr(content, "input", path.name)
    back = graph_to_msr(graph_from_json(graph_to_json(graph)), machine)
    assert_same(json.loads(content), json.loads(back))
    again, _ = graph_from_msr(back, "input", path.name)
    assert [op.outputs for op in again.ops] == [op.outputs for op in graph.ops]
    assert [op.module for op in again.ops] == [op.module for op in graph.ops]


def test_published_figures() -> None:
    """One device takes 92.4 ms on bert24 and 49.4 ms on the operators of BERT with 3 layers."""
    totals = []
    for path in PUBLISHED:
        graph, _ = graph_from_msr(files.read_bytes(path), "input", "g")
        totals.append(1e3 * sum((op.seconds or {})["accelerator"] for op in graph.ops))
    assert totals == [pytest.approx(92.406), pytest.approx(49.3526, rel=1e-5)]


@st.composite
def inputs(draw: st.DrawFn) -> dict[str, Any]:
    ids = draw(st.lists(st.integers(0, 50), unique=True, min_size=1, max_size=8))
    nodes = [
        node(
            i,
            size=float(draw(st.integers(0, 200))),
            fpgaLatency=draw(st.floats(0, 100)),
            supportedOnFpga=draw(st.sampled_from([0, 1, True, False])),
            isBackwardNode=draw(st.booleans()),
            **draw(st.sampled_from([{}, {"colorClass": 3}, {"colorClass": 12}])),
        )
        for i in ids
    ]
    edges = []
    for k, source in enumerate(ids):
        num_bytes = draw(st.integers(0, 200))
        edges += [edge(source, j, num_bytes) for j in ids[k + 1 :] if draw(st.booleans())]
    return whole(nodes, edges)


@given(inputs())
def test_any_input_there_and_back(data: dict[str, Any]) -> None:
    graph, machine = read(data)
    back = json.loads(graph_to_msr(graph, machine))
    assert_same(data, back)
    assert [op.outputs for op in read(back)[0].ops] == [op.outputs for op in graph.ops]


@given(inputs(), st.randoms(use_true_random=False))
def test_any_split_there_and_back(data: dict[str, Any], random: Any) -> None:
    graph, _ = read(data)
    types = ["accelerator", "cpu", "accelerator", "cpu"]
    placement = {op.name: random.randrange(4) for op in graph.ops}
    content = split_to_json(graph, placement, types)
    split = json.loads(content)
    assert sorted(i for p in split["fpgas"] + split["cpus"] for i in p["nodes"]) == sorted(
        n["id"] for n in data["nodes"]
    )
    assert set(split["cpus"][0]["nodes"]) == {
        int(name[1:]) for name, device in placement.items() if device == 1
    }
    assert split_from_json(content, graph, types, "split") == placement


def test_ops_of_other_graphs_are_numbered() -> None:
    ops = [
        Op(name=name, kind="op", outputs=(Tensor(name=name, bytes=1),)) for name in ("n0", "n01")
    ]
    graph = build_graph("g", ops)
    assert node_ids(graph) == {"n0": 0, "n01": 1}
    with pytest.raises(UsageError, match="'n0' does not state its seconds"):
        graph_to_msr(graph, MsrMachine(accelerators=1, accelerator_bytes=1, cpus=0))


BROKEN: dict[str, tuple[Any, str, str]] = {
    "edge to nowhere": (whole([node(1)], [edge(1, 2, 1)]), "E407", r"edges\[0\].*no node 2"),
    "twice": (whole([node(1), node(1)], []), "E407", "same id"),
    "two costs": (
        whole([node(1), node(2), node(3)], [edge(1, 2, 1), edge(1, 3, 2)]),
        "E407",
        r"edges\[1\]\.cost.*one message",
    ),
    "cycle": (whole([node(1), node(2)], [edge(1, 2, 1), edge(2, 1, 1)]), "E402", "cycle"),
    "negative": (whole([node(1, size=-1)], []), "E407", "negative"),
    "negative machine": (whole([], []) | {"maxFPGAs": -1}, "E407", "negative"),
    "text": (whole([node(1, size="7")], []), "E407", r"nodes\[0\]\.size"),
    "missing": ({"nodes": [], "edges": []}, "E407", "maxSizePerFPGA"),
    "nan": (whole([node(1, size=float("nan"))], []), "E406", "NaN"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_inputs_are_refused(name: str) -> None:
    data, code, reason = BROKEN[name]
    with pytest.raises(FileError, match=reason) as raised:
        read(data)
    assert raised.value.code == code


SPLITS: dict[str, tuple[Any, type[PardnnError], str]] = {
    "twice": ({"fpgas": [{"nodes": [1, 2]}], "cpus": [{"nodes": [1]}]}, FileError, "appears twice"),
    "nowhere": ({"fpgas": [{"nodes": [1]}], "cpus": []}, MismatchError, "node 2 is missing"),
    "unknown": ({"fpgas": [{"nodes": [1, 2, 3]}], "cpus": []}, MismatchError, "no op has the id 3"),
    "too many": (
        {"fpgas": [{"nodes": []}, {"nodes": [1, 2]}], "cpus": []},
        MismatchError,
        "1 such devices",
    ),
    "no list": ({"fpgas": [[1]], "cpus": []}, FileError, "fpgas"),
}


@pytest.mark.parametrize("name", SPLITS)
def test_broken_splits_are_refused(name: str) -> None:
    data, kind, reason = SPLITS[name]
    graph, _ = read(whole([node(1), node(2)], []))
    with pytest.raises(kind, match=reason):
        split_from_json(json.dumps(data).encode(), graph, ["accelerator", "cpu"], "split")
