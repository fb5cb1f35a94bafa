"""Graphs that are wrong, strange, huge or hostile: an error that teaches, or a graph; no traceback.

A fault in a file is refused with exit 4, another version with exit 5.
"""

import dataclasses
import gzip
import json
import os
import pickle
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pardnn import files
from pardnn.cluster import Cluster
from pardnn.errors import FileError, MismatchError
from pardnn.graph.build import build_graph
from pardnn.graph.csr import op_edges
from pardnn.graph.file import fingerprint, graph_from_json, graph_to_json, read_graph, write_graph
from pardnn.graph.ir import Op, Tensor
from pardnn.graph.text import graph_text
from pardnn.plan.file import read_plan, write_plan
from pardnn.plan.plan import Plan
from tests.strategies import random_graph

ROOT = Path(__file__).parents[2]


def source(name: str, size: int = 8) -> Op:
    return Op(name=name, kind="input", outputs=(Tensor(name=name, bytes=size),))


def call(name: str, *inputs: str, size: int = 8) -> Op:
    return Op(name=name, kind="k", inputs=inputs, outputs=(Tensor(name=name, bytes=size),))


def assert_graph_or_error(content: bytes) -> bool:
    """Whether `content` is a graph; anything but a graph or a `FileError` fails the test."""
    try:
        graph = graph_from_json(content)
    except (FileError, MismatchError) as error:
        assert error.exit_status in (4, 5)  # noqa: PT017
        assert error.message.isprintable() or "\n" in error.message  # noqa: PT017
        return False
    graph_text(graph)
    fingerprint(graph)
    return True


# Content


def test_no_ops() -> None:
    with pytest.raises(FileError, match="E402 'g' is not a valid graph: graph has no operations"):
        build_graph("g", [])


def test_cycle_shows_its_path() -> None:
    ops = [call("a", "b"), call("b", "c"), call("c", "a"), call("d", "a")]
    with pytest.raises(FileError, match="it has a cycle: 'a' -> 'c' -> 'b' -> 'a'"):
        build_graph("g", ops)


def test_duplicate_edges_are_one() -> None:
    double = dataclasses.replace(call("b", "a", "a"), after=("a", "a"))
    graph = build_graph("g", [source("a"), double])
    assert graph.arrays.input_tensor.tolist() == [0]
    assert graph.arrays.after_op.tolist() == [0]
    assert op_edges(graph.arrays).tolist() == [[0, 1]]


def test_zeros_are_values() -> None:
    zero = dataclasses.replace(source("a", size=0), seconds={"cpu": 0.0})
    empty = Tensor(name="b", bytes=0, shape=(3, 0), dtype="float32")
    graph = build_graph("g", [zero, Op(name="b", kind="k", inputs=("a",), outputs=(empty,))])
    assert graph_from_json(graph_to_json(graph)) == graph


def test_bytes_are_exact_up_to_the_last_one() -> None:
    largest = 2**63 - 1
    graph = build_graph("g", [source("a", largest - 2**53 - 1), source("b", 2**53 + 1)])
    assert [int(b) for b in graph.arrays.tensor_bytes] == [largest - 2**53 - 1, 2**53 + 1]
    assert graph_from_json(graph_to_json(graph)) == graph
    with pytest.raises(FileError, match=f"its tensors take {largest + 1} bytes together"):
        build_graph("g", [source("a", largest), source("b", 1)])


@pytest.mark.jit
def test_isolated_ops_take_linear_time() -> None:
    graph = build_graph("g", [source(f"op{i}") for i in range(100_000)])
    assert len(op_edges(graph.arrays)) == 0


@pytest.mark.jit
def test_star_takes_linear_time() -> None:
    n = 50_000
    leaves = [call(f"leaf{i}", "centre") for i in range(n)]
    names = tuple(leaf.name for leaf in leaves)
    sink = dataclasses.replace(call("sink", *names), after=names)
    graph = build_graph("g", [sink, *leaves, source("centre")])
    assert len(op_edges(graph.arrays)) == 2 * n
    assert graph.arrays.topological[[0, -1]].tolist() == [n + 1, 0]


@pytest.mark.jit
def test_long_chain_of_updates_takes_linear_time() -> None:
    """Walking the aliases of each update to their owner would take hours."""
    n = 50_000
    ops = [source("t0")]
    for i in range(1, n):
        tensor = Tensor(name=f"t{i}", bytes=8, alias_of=f"t{i - 1}")
        ops.append(Op(name=f"t{i}", kind="aten.add_", inputs=(f"t{i - 1}",), outputs=(tensor,)))
    ops.append(
        Op(name="last", kind="v", inputs=(f"t{n - 1}",),
           outputs=(Tensor(name="last", bytes=8, alias_of="t0"),))
    )  # fmt: skip
    assert build_graph("g", ops).arrays.tensor_alias.tolist() == [-1, *range(n)]


NAMES = [
    "",
    "x" * 10_000,
    "naïve 模型 🙂",
    "\u202eevil\u200f",
    "two\nlines\r\n",
    "../../etc/passwd",
    "</script><script>alert(1)</script>",
    "\x1b[31mred\x00",
    "$.ops[0]",
    "{}%s{0}",
]


@pytest.mark.parametrize("name", NAMES, ids=range(len(NAMES)))
def test_hostile_names_are_data(name: str, tmp_path: Path) -> None:
    other = dataclasses.replace(call("other" + name, name), after=(name,), group=name, source=name)
    graph = build_graph(name, [source(name), other])
    write_graph(graph, tmp_path / "g.json")
    assert read_graph(tmp_path / "g.json") == graph
    assert len(graph_text(graph).splitlines()) == 3
    assert [path.name for path in tmp_path.iterdir()] == ["g.json"]
    with pytest.raises(FileError, match="two ops are named") as caught:
        build_graph(name, [*graph.ops, source(name)])
    assert caught.value.message.replace("\n", "").isprintable()
    assert len(caught.value.message) < 1000


def test_an_edited_graph_has_another_fingerprint(tiny: Path) -> None:
    content = (tiny / "graph.json").read_bytes()
    edited = content.replace(b"aten.relu.default", b"aten.gelu.default")
    assert fingerprint(graph_from_json(edited)) != fingerprint(graph_from_json(content))


# Damage


@pytest.mark.parametrize("name", ["g.json", "g.json.gz"])
def test_truncated_at_every_byte(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    graph = random_graph(3, 6, "layered")
    write_graph(graph, path)
    content = path.read_bytes()
    for length in range(len(content) - 1):  # the last byte of the JSON is a newline
        path.write_bytes(content[:length])
        with pytest.raises(FileError) as caught:
            read_graph(path)
        assert caught.value.exit_status == 4


@pytest.mark.parametrize("has_checksum", [True, False])
def test_flipped_bits(has_checksum: bool) -> None:
    """Without a checksum a flip may make another graph; it never makes a traceback."""
    content = graph_to_json(random_graph(5, 12, "transformer"))
    content = content if has_checksum else files.without_checksum(content, "g")
    rng = np.random.default_rng(0)
    graphs_found = 0
    for position, bit in zip(
        rng.integers(0, len(content), 800), rng.integers(0, 8, 800), strict=True
    ):
        damaged = bytearray(content)
        damaged[position] ^= 1 << bit
        graphs_found += assert_graph_or_error(bytes(damaged))
    assert graphs_found == 0 if has_checksum else 0 < graphs_found < 800


def test_flipped_bits_of_a_packed_file_are_found(tmp_path: Path) -> None:
    path = tmp_path / "g.json.gz"
    graph = random_graph(5, 12, "transformer")
    write_graph(graph, path)
    content = path.read_bytes()
    rng = np.random.default_rng(1)
    for position, bit in zip(
        rng.integers(10, len(content), 200), rng.integers(0, 8, 200), strict=True
    ):  # the ten bytes of the header decide nothing
        damaged = bytearray(content)
        damaged[position] ^= 1 << bit
        path.write_bytes(damaged)
        with pytest.raises(FileError, match="E403"):
            read_graph(path)


WRONG = [
    ("bytes", True, "$.ops[1].outputs[0].bytes"),
    ("bytes", 8.0, "$.ops[1].outputs[0].bytes"),
    ("bytes", "8", "$.ops[1].outputs[0].bytes"),
    ("shape", [1, None], "$.ops[1].outputs[0].shape[1]"),
    ("alias", "h", "$.ops[1].outputs[0].alias"),
]
WRONG_OP = [
    ("memory", 7, "$.ops[1].memory"),
    ("memory", "permanent", "$.ops[1].memory"),
    ("inputs", "x", "$.ops[1].inputs"),
    ("inputs", ["x", 1], "$.ops[1].inputs[1]"),
    ("after", {}, "$.ops[1].after"),
    ("seconds", {"cpu": "1"}, "$.ops[1].seconds.cpu"),
    ("seconds", {"cpu": True}, "$.ops[1].seconds.cpu"),
    ("seconds", [], "$.ops[1].seconds"),
    ("workspace", None, "$.ops[1].workspace"),
    ("workspace", 0.5, "$.ops[1].workspace"),
    ("colour", "red", "$.ops[1].colour"),
    ("arguments", [], "$.ops[1].arguments"),
    ("name", None, "$.ops[1].name"),
    ("step", "3", "$.ops[1].step"),
]


def plain() -> dict[str, Any]:
    ops = [source("x"), call("y", "x")]
    data = json.loads(graph_to_json(build_graph("g", ops)))
    del data["checksum"]  # what is edited has none
    return data


@pytest.mark.parametrize(("field", "value", "place"), WRONG + WRONG_OP)
def test_wrong_fields_are_placed(field: str, value: object, place: str) -> None:
    data = plain()
    op = data["ops"][1]
    (op["outputs"][0] if "outputs" in place else op)[field] = value
    with pytest.raises(FileError) as caught:
        graph_from_json(json.dumps(data).encode(), "graph file 'g.json'")
    assert (caught.value.code, caught.value.details) == ("E407", {"path": place})
    assert caught.value.message.startswith(f"graph file 'g.json': {place}: ")


@pytest.mark.parametrize("path", [("name",), ("ops",), ("ops", 0, "name"), ("ops", 0, "kind")])
def test_missing_fields_are_placed(path: tuple[Any, ...]) -> None:
    data = inner = plain()
    for part in path[:-1]:
        inner = inner[part]
    del inner[path[-1]]
    with pytest.raises(FileError, match="Field required|missing") as caught:
        graph_from_json(json.dumps(data).encode())
    assert caught.value.details["path"].endswith(path[-1])


@pytest.mark.parametrize(
    "text", ["NaN", "Infinity", "-1e999", "9" * 5000, '"a", "bytes": 8', "[" * 9999, '"\\ud800"']
)
def test_numbers_that_are_none(text: str) -> None:
    content = files.without_checksum(graph_to_json(build_graph("g", [source("x")])), "g")
    content = content.replace(b'"bytes": 8', b'"bytes": ' + text.encode())
    with pytest.raises(FileError) as caught:
        graph_from_json(content)
    assert caught.value.code in ("E406", "E407")
    assert len(caught.value.message) < 300


@pytest.mark.parametrize("mutates", [5, "x", [["x"]], {"x": 1}, None, ["nothing"]])
def test_arguments_cannot_confuse(mutates: object) -> None:
    data = plain()
    data["ops"][1]["arguments"] = {"mutates": mutates}
    with pytest.raises(FileError, match="E402 .*mutates is not a list of tensors that it reads"):
        graph_from_json(json.dumps(data).encode())


def test_other_versions(tiny: Path) -> None:
    content = (tiny / "graph.json").read_bytes()
    with pytest.raises(MismatchError, match="has format 'pardnn.graph/2'.*reads 'pardnn.graph/1'"):
        graph_from_json(content.replace(b"pardnn.graph/1", b"pardnn.graph/2"))
    with pytest.raises(FileError, match="expected 'pardnn.graph/1'"):
        graph_from_json((tiny / "plan.json").read_bytes())


def test_a_file_of_another_kind_is_not_called_damaged(tmp_path: Path) -> None:
    """Each has a checksum, made in its own way."""
    graph, plan = tmp_path / "graph", tmp_path / "plan"
    write_graph(build_graph("g", [source("x")]), graph)
    write_plan(Plan(placement={"x": 0}, order=(("x",),)), plan)
    for read, path in ((read_graph, plan), (Cluster.load, plan), (read_plan, graph)):
        with pytest.raises(FileError, match=r"E407 .*\$.format: is 'pardnn"):
            read(path)


class Payload:
    def __init__(self, target: str) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (self.target,))


@pytest.mark.parametrize("name", ["g.json", "g.json.gz"])
def test_a_pickle_does_not_run(name: str, tmp_path: Path) -> None:
    target = tmp_path / "it ran"
    payload = pickle.dumps(Payload(str(target)))
    path = tmp_path / name
    path.write_bytes(gzip.compress(payload) if name.endswith("gz") else payload)
    with pytest.raises(FileError) as caught:
        read_graph(path)
    assert caught.value.exit_status == 4
    assert not target.exists()
    pickle.loads(payload)
    assert target.exists()  # the payload was a live one


def test_gzip_bomb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_BYTES", 1 << 20)
    path = tmp_path / "g.json.gz"
    path.write_bytes(gzip.compress(b"[" * (20 << 20)))
    with pytest.raises(FileError, match="E404"):
        read_graph(path)


def test_unwritable_place_keeps_nothing(tmp_path: Path) -> None:
    graph = build_graph("g", [source("x")])
    with pytest.raises(FileError, match="E405 cannot write .*errno 2"):
        write_graph(graph, tmp_path / "none" / "g.json")
    assert list(tmp_path.iterdir()) == []


# Size


@pytest.mark.jit
@pytest.mark.parametrize(
    ("n", "limit_bytes"),
    [(100_000, 2 << 30), pytest.param(1_000_000, 4 << 30, marks=pytest.mark.long)],
)
def test_a_long_chain(n: int, limit_bytes: int) -> None:
    """In a process of its own, for its memory."""
    code = f"from {__name__} import build_chain; build_chain({n}, {limit_bytes})"
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": path})


def build_chain(n: int, limit_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes))
    ops = [source("t0"), *(call(f"t{i}", f"t{i - 1}", size=400) for i in range(1, n))]
    graph = build_graph("chain", ops[::-1])
    assert (np.diff(graph.arrays.topological) == -1).all()
    assert len(op_edges(graph.arrays)) == n - 1
