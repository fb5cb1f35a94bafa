"""A small file takes little time and memory, whatever it unpacks to; a flipped bit is refused."""

from __future__ import annotations

import gzip
import json
import random
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pardnn import files
from pardnn.api.schemas import json_schemas
from pardnn.cluster import Cluster, write_cluster
from pardnn.errors import FileError, PardnnError
from pardnn.graph.file import read_graph, write_graph
from pardnn.plan.check import plan_problems
from pardnn.plan.file import read_plan
from tests.fuzz.targets import DATA, built_once, command

GRAPH = b'{"format": "pardnn.graph/1", "name": "g", "ops": ['
INPUTS = GRAPH + b'{"name": "a", "kind": "k", "inputs": ['
ORDER = b'{"format": "pardnn.plan/1", "placement": {}, "order": ['
DEVICES = b'{"format": "pardnn.cluster/1", "devices": ['


@pytest.mark.parametrize(
    ("read", "begin", "element", "end"),
    [
        (read_graph, GRAPH, b"[]", b"]}"), (read_graph, INPUTS, b"1", b"]}]}"),
        (read_plan, ORDER, b"1", b"]}"), (Cluster.load, DEVICES, b"{}", b"]}"),
    ],
)  # fmt: skip
def test_a_list_stops_at_its_first_error(
    tmp_path: Path, read: Callable[[Path], Any], begin: bytes, element: bytes, end: bytes
) -> None:
    path = tmp_path / "f.json"
    path.write_bytes(begin + b",".join([element] * 200_000) + end)
    with pytest.raises(FileError, match="E407"):
        read(path)
    started = time.process_time()
    tracemalloc.start()
    with pytest.raises(FileError, match=r"E407 .*\[0\]"):
        read(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 40 << 20  # 200 MB when every error was told
    assert time.process_time() - started < 5


def test_a_packed_file_unpacks_to_a_bounded_size(tmp_path: Path) -> None:
    path = tmp_path / "g.json.gz"
    path.write_bytes(gzip.compress(GRAPH + b",".join([b"[]"] * 3_000_000) + b"]}"))
    assert path.stat().st_size < 10_000
    with pytest.raises(FileError, match="E404 .* holds more than"):
        read_graph(path)


def test_elements_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_ELEMENTS", 1000)
    (tmp_path / "g.json").write_bytes(GRAPH + b",".join([b"[]"] * 2000) + b"]}")
    with pytest.raises(FileError, match="E406 .* more than 1000 elements"):
        read_graph(tmp_path / "g.json")


def test_wrong_values_of_an_object_are_not_all_told(tmp_path: Path) -> None:
    placement = {str(i): "" for i in range(5000)}
    data = {"format": "pardnn.plan/1", "order": [], "placement": placement}
    (tmp_path / "p.json").write_text(json.dumps(data))
    with pytest.raises(FileError, match="E407 .* 5000 values have the wrong type"):
        read_plan(tmp_path / "p.json")


def test_a_cluster_has_a_bounded_number_of_devices(tmp_path: Path) -> None:
    devices = [{"name": f"d{i}"} for i in range(5000)]
    path = tmp_path / "c.json"
    path.write_text(json.dumps({"format": "pardnn.cluster/1", "devices": devices}))
    with pytest.raises(FileError, match="E421 .* 5000 devices; at most 1024"):
        Cluster.load(path)


def test_a_plan_of_idle_devices_starts_no_processes(tmp_path: Path) -> None:
    data = json.loads((DATA / "tiny/plan.json").read_text())
    data["order"] += [[]] * 4998
    path = tmp_path / "p.json"
    path.write_text(json.dumps(data))
    problems = plan_problems(read_graph(DATA / "tiny/graph.json"), read_plan(path))
    assert problems == ["order has 5000 devices; at most 1024 are possible"]
    (tmp_path / "s.py").write_text("def make():\n    return print, ()\n")
    run = ("run", f"{tmp_path / 's.py'}:make")
    with built_once():
        assert command(*run, "--plan", path) == 2
        assert command(*run, "--devices", 129, "--bandwidth", "1GB/s", "--latency", "1us") == 2


@pytest.mark.parametrize("kind", ["graph", "cluster"])
def test_a_flipped_bit_is_refused(tmp_path: Path, kind: str) -> None:
    path, rng = tmp_path / "f.json", random.Random(1)
    read: Any = read_graph if kind == "graph" else Cluster.load
    value = read(DATA / "tiny" / f"{kind}.json")
    (write_graph if kind == "graph" else write_cluster)(value, path)
    content = path.read_bytes()
    assert read(path) == value
    assert "checksum" in json_schemas()[f"pardnn.{kind}/1"]["properties"]
    for _ in range(300):
        damaged = bytearray(content)
        damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        with pytest.raises(PardnnError):
            read(path)


def test_a_file_that_was_edited_loses_its_checksum(tmp_path: Path) -> None:
    path = tmp_path / "g.json"
    write_graph(read_graph(DATA / "tiny/graph.json"), path)
    data = json.loads(path.read_text())
    path.write_text(json.dumps(data, indent=2))
    with pytest.raises(FileError, match="E408 (?s:.*)delete the field `checksum`"):
        read_graph(path)
    del data["checksum"]
    path.write_text(json.dumps(data, indent=2))
    assert read_graph(path) == read_graph(DATA / "tiny/graph.json")
