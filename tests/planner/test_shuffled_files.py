"""The order in which a file lists its ops decides nothing: not a bit of a plan."""

import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import pardnn
from pardnn.errors import FileError
from pardnn.graph.file import graph_from_json, graph_to_json
from pardnn.graph.ir import Graph
from pardnn.planner.algorithms import ALGORITHMS
from tests.strategies import graphs, random_graph

CLUSTER = pardnn.Cluster.uniform(2, bandwidth=1e3, latency=0.01)


def _document(graph: Graph, *, positions: bool) -> dict[str, Any]:
    data = json.loads(graph_to_json(graph))
    del data["checksum"]
    for op in data["ops"]:
        if not positions:
            del op["position"]
    return data


def _read(data: dict[str, Any]) -> Graph:
    return graph_from_json(json.dumps(data).encode())


@given(graphs(shuffled=True), st.booleans(), st.randoms(use_true_random=False))
def test_a_shuffled_file_is_the_same_graph(
    graph: Graph, positions: bool, rng: random.Random
) -> None:
    data = _document(graph, positions=positions)
    read = _read(data)
    rng.shuffle(data["ops"])
    again = _read(data)
    assert again == read
    assert all((a == b).all() for a, b in zip(read.arrays, again.arrays, strict=True))
    if positions:
        assert read.ops == graph.ops
    else:  # whatever the order of the file, that of the graph is one in which the step can run
        assert read.arrays.topological.tolist() == list(range(len(graph.ops)))


def _renamed(data: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """Return the document with other names of ops and tensors."""
    ops = data["ops"]
    names = [op["name"] for op in ops] + [t["name"] for op in ops for t in op.get("outputs", [])]
    fresh = rng.sample(range(1000), len(set(names)))
    new = {name: f"n{number}" for name, number in zip(dict.fromkeys(names), fresh, strict=True)}

    def replaced(value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            return {k: replaced(v, k) for k, v in value.items()}
        if isinstance(value, list):
            return [replaced(item, key) for item in value]
        return new[value] if key in ("name", "inputs", "after", "alias_of") else value

    return data | {"ops": replaced(ops)}


@pytest.mark.jit
@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_shuffled_or_renamed_ops_are_planned_alike(name: str) -> None:
    """Also without positions, as in files of other tools."""
    rng = random.Random(name)
    for seed, family in ((1, "layered"), (3, "transformer")):
        data = _document(random_graph(seed, 7 if name == "exact" else 16, family), positions=False)
        for i, op in enumerate(data["ops"]):  # so that no two ops are alike
            op["seconds"] = {"accelerator": 0.5 + i % 7 + i / 1024}
        shuffled = data | {"ops": rng.sample(data["ops"], len(data["ops"]))}
        plans = [
            pardnn.plan(_read(each), CLUSTER, name)
            for each in (data, shuffled, _renamed(shuffled, rng))
        ]
        assert plans[0] == plans[1]
        assert len({plan.predicted.makespan_s for plan in plans if plan.predicted}) == 1


def test_two_ops_at_one_position() -> None:
    data = _document(random_graph(1, 9), positions=True)
    data["ops"][3]["position"] = 5
    with pytest.raises(FileError, match="E402 .*two ops have the position 5"):
        _read(data)
