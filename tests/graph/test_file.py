import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pardnn.graph.build import build_graph
from pardnn.graph.file import (
    digested_text,
    fingerprint,
    graph_from_json,
    graph_to_json,
    op_digests,
    op_to_dict,
    read_graph,
    write_graph,
)
from pardnn.graph.ir import LOSS_KIND, Graph, Op, Tensor
from tests.strategies import graphs

FULL = Op(
    name="o",
    kind="mylib::op",
    inputs=("x", "x"),
    after=("x",),
    outputs=(
        Tensor(name="a", bytes=2**53 + 1, shape=(), dtype="host.int", strides=()),
        Tensor(name="b", bytes=0, shape=(0, 2), strides=(2, 1), alias_of="x", misaligned_bytes=4),
    ),
    memory="normal",
    seconds={"cpu": 1, "accelerator": 1e-300},
    workspace=7,
    group="",
    source="model.py:12",
    module="blocks.0",
    arguments={"args": [{"tensor": "x"}, None, True, 0.1, -7], "kwargs": {}},
    backward_of="x",
    step=3,
)


def full() -> Graph:
    x = Op(name="x", kind="input", outputs=(Tensor(name="x", bytes=2**62),))
    return build_graph("full", [x, FULL])


@given(graphs(shuffled=True, types=("accelerator", "cpu")))
def test_round_trip(graph: Graph) -> None:
    content = graph_to_json(graph)
    again = graph_from_json(content)
    assert again == graph
    assert hash(again) == hash(graph)
    assert graph_to_json(again) == content
    assert all((a == b).all() for a, b in zip(graph.arrays, again.arrays, strict=True))


def test_every_field_survives() -> None:
    # A field left at its default would not show that it gets lost.
    at_default = {f.name for f in dataclasses.fields(Op) if getattr(FULL, f.name) == f.default}
    assert at_default == {"memory", "position"}
    assert graph_from_json(graph_to_json(full())) == full()


@given(st.text(), st.text(), st.text())
def test_names_are_data(graph_name: str, name: str, kind: str) -> None:
    ops = [Op(name=name, kind=kind, outputs=(Tensor(name=name, bytes=1),), seconds={name: 0.5})]
    graph = build_graph(graph_name, ops)
    assert graph_from_json(graph_to_json(graph)) == graph


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_on_disk(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"g.json{suffix}"
    write_graph(full(), path)
    assert read_graph(path) == full()
    assert (path.read_bytes()[:2] == b"\x1f\x8b") == bool(suffix)
    content = path.read_bytes()
    write_graph(full(), path)
    assert path.read_bytes() == content


def test_tiny(tiny: Path) -> None:
    graph = read_graph(tiny / "graph.json")
    assert (graph.name, len(graph.ops), graph.arrays.num_tensors) == ("tiny", 8, 8)
    assert graph.ops[7].inputs == ("w", "c")
    written = json.loads(graph_to_json(graph))
    assert len(written.pop("checksum")) == 64
    assert [op.pop("position") for op in written["ops"]] == list(range(8))
    assert written == json.loads((tiny / "graph.json").read_bytes())


@given(graphs(min_ops=2, shuffled=True), st.randoms(use_true_random=False))
def test_fingerprint_is_independent_of_the_order_of_ops(graph: Graph, random: object) -> None:
    ops = list(graph.ops)
    random.shuffle(ops)  # type: ignore[attr-defined]
    assert fingerprint(build_graph("other name", ops)) == fingerprint(graph)


@given(graphs(min_ops=2), st.data())
def test_fingerprint_ignores_time_and_place_and_nothing_else(
    graph: Graph, data: st.DataObject
) -> None:
    def changed(**changes: object) -> Graph:
        i = data.draw(st.integers(0, len(graph.ops) - 1))
        ops = list(graph.ops)
        ops[i] = dataclasses.replace(ops[i], **changes)  # type: ignore[arg-type]
        return build_graph(graph.name, ops)

    for same in ({"seconds": {"accelerator": 77.0}}, {"source": "s"}, {"module": "m"}, {"step": 9}):
        assert fingerprint(changed(**same)) == fingerprint(graph)
    other = changed(workspace=1234)
    assert fingerprint(other) != fingerprint(graph)
    differing = [n for n, digest in op_digests(other).items() if op_digests(graph)[n] != digest]
    assert len(differing) == 1
    for change in ({"kind": "k"}, {"group": "h"}, {"arguments": {"args": [1]}}):
        assert fingerprint(changed(**change)) != fingerprint(graph)


def test_the_line_of_a_condition_is_a_place_and_the_condition_is_not() -> None:
    """A comment above the step voided the plans of a step that branches on a number."""

    def loss(conditions: object) -> str:
        host = {"rows": [], "conditions": conditions, "writes": [], "initial": {}}
        return digested_text(Op(name="loss", kind=LOSS_KIND, arguments={"host": host}))

    assert loss([["a", True, "x.py:1"]]) == loss([["a", True, "x.py:9"]])
    assert loss([["a", True, "x.py:1"]]) != loss([["a", False, "x.py:1"]])
    assert loss(["odd"]) != loss(7)


@given(graphs(shuffled=True), st.text(), st.text())
def test_digests_are_of_the_sorted_json(graph: Graph, text: str, other: str) -> None:
    # Plan files of before hold them: the text must stay as json.dumps writes it.
    words = dict.fromkeys(("source", "module", "backward_of"), "m")
    named = dataclasses.replace(FULL, kind=text, group=other, memory="reference", **words)
    view = Tensor(name=text, bytes=1, alias_of=other, dtype=other)
    named = dataclasses.replace(named, inputs=(text, other), outputs=(view,))
    for op in (*graph.ops, FULL, named, Op(name=text, kind=other)):
        data = json.loads(json.dumps(op_to_dict(op)))
        for name in ("seconds", "source", "module", "backward_of", "step"):
            data.pop(name, None)
        data |= {"inputs": list(dict.fromkeys(op.inputs)), "after": sorted(set(op.after))}
        assert digested_text(op) == json.dumps(data, sort_keys=True)


def test_fingerprint_is_independent_of_repetition() -> None:
    def graph(inputs: tuple[str, ...], after: tuple[str, ...]) -> Graph:
        sources = [Op(name=n, kind="input", outputs=(Tensor(name=n, bytes=1),)) for n in ("x", "y")]
        return build_graph("g", [*sources, Op(name="o", kind="k", inputs=inputs, after=after)])

    base = fingerprint(graph(("x", "y"), ("x", "y")))
    assert fingerprint(graph(("x", "y", "x"), ("y", "x", "y"))) == base
    assert fingerprint(graph(("y", "x"), ("x", "y"))) != base  # an argument list has an order


def test_fingerprint_is_the_same_in_every_process(tiny: Path) -> None:
    code = (
        "import sys; from pardnn.graph.file import fingerprint, read_graph;"
        "print(fingerprint(read_graph(sys.argv[1])))"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code, str(tiny / "graph.json")],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("0", "1")
    }
    assert found == {fingerprint(read_graph(tiny / "graph.json"))}
    # Plans on disk hold it: another value means that they no longer fit their graphs.
    assert found == {"1c743b73c4fbcd7e51c82833b9745ecd"}


@pytest.mark.parametrize("field", [{"seconds": {"gpu": 2.0}}, {"outputs": [8]}])
def test_two_ops_that_differ_in_one_field_stand_alike_whatever_they_are_called(
    field: dict[str, object],
) -> None:
    """Names settle ties alone: the longer, or larger, one comes where it does under any name."""

    def order(plain: str, other: str) -> list[bool]:
        ops: list[dict[str, Any]] = [
            {"name": name, "kind": "op", "seconds": {"gpu": 1.0}, "outputs": [4], "inputs": ["x"]}
            | (field if name == other else {})
            for name in (plain, other)
        ]
        for op in ops:
            op["outputs"] = [{"name": f"t{op['name']}", "bytes": op["outputs"][0]}]
        x = {"name": "x", "kind": "input", "outputs": [{"name": "x", "bytes": 4}]}
        content = json.dumps({"format": "pardnn.graph/1", "name": "g", "ops": [x, *ops]})
        return [op.name == other for op in graph_from_json(content.encode()).ops]

    assert order("a", "b") == order("b", "a")
