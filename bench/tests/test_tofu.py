"""The bench of Tofu's figures: what it counts, and prose that follows its figures."""

from typing import Any

import pytest

from bench.tofu.figure_11 import CONVOLUTION, claims, partition_rows, picture
from bench.tofu.in_place import ADD, ADD_IN_PLACE, accumulated
from bench.tofu.page import page
from bench.tofu.table_1 import limited_search
from pardnn.cluster import Cluster
from pardnn.graph.build import build_graph
from pardnn.graph.ir import Op, Tensor
from pardnn.shard.search.communication_bytes import sharding_bytes
from pardnn.shard.search.tofu import find_sharding
from testbed.kept_graphs import load


@pytest.mark.long
def test_what_convolutions_fetch_is_what_the_objective_counts() -> None:
    graph = load("wresnet_50_4")
    sharding = find_sharding(graph, Cluster.preset("p2-k80", 4), "bytes").sharding
    rows = partition_rows(graph, sharding)
    forward = [op.name for op in graph.ops if op.kind == CONVOLUTION]
    assert sum(row["count"] for row in rows) == len(forward) == 53
    moved = sharding_bytes(graph, sharding)
    assert sum(sum(row["moved"].values()) for row in rows) == sum(moved[op] for op in forward)
    assert {row["group"] for row in rows} == {0, 1, 2, 3, 4}
    assert picture(rows, sharding.mesh.shape).startswith("<svg")


def convolution(group: int, loops: str, weight: int, activation: int, **more: Any) -> Any:
    moved = {"weight": weight, "activation": activation, "sums": 0}
    laid = {"shape": (8, 8), "bytes": 256, "placements": ("Shard(0)",)}
    return {
        "group": group, "first": False, "part": "up", "loops": loops.split(), "count": 2,
        "moved": moved, "activation": laid, "weight": laid, **more,
    }  # fmt: skip


def test_claims_follow_the_figures() -> None:
    rows = [convolution(1, "b b", 3, 1), convolution(4, "ci co", 1, 3, part="down")]
    both, repeats, shares = claims(rows)
    assert "Of 4 convolutions 2 cut the batch, 2 channels" in both
    assert "2 of 2 groups" in repeats
    assert shares.endswith("75%, nothing fetched, nothing fetched, 25%.")


def test_the_search_without_recursion_is_ended_at_its_limit() -> None:
    found = limited_search("wresnet_50_4", Cluster.preset("p2-k80", 8), 0, together=True)
    assert found == {"error": "more than 0 s"}


def test_gradients_are_added_up_in_place_where_nothing_else_reads_them() -> None:
    def tensor(name: str, **more: Any) -> Tensor:
        return Tensor(name=name, bytes=16, shape=(2, 2), dtype="float32", **more)

    def add(name: str, *inputs: str) -> Op:
        args = {"args": [{"tensor": each} for each in inputs]}
        return Op(name=name, kind=ADD, inputs=inputs, outputs=(tensor(name),), arguments=args)

    def view(name: str, of: str) -> Op:
        made = (tensor(name),)
        return Op(name=name, kind="aten.t.default", inputs=(of,), outputs=made, memory="reference")

    made = [Op(name=f"g{n}", kind="aten.mm.default", outputs=(tensor(f"g{n}"),)) for n in range(5)]
    weight = Op(name="w", kind="parameter", outputs=(tensor("w"),), memory="residual")
    ops = [weight, *made, view("v1", "g1"), view("v2", "v1"), view("v3", "g3"), view("v4", "g3"),
           add("s1", "w", "v2"), add("s2", "s1", "g0"), add("s3", "v3", "w"), add("s4", "g4", "s2"),
           add("again", "g4", "w")]  # fmt: skip
    graph, changed = accumulated(build_graph("sums", ops))
    # s3 finds a weight and one of two views of g3; g4 is read twice, so s4 is made in s2.
    assert changed == ["s1", "s2", "s4"]
    aliases = {op.name: op.outputs[0].alias_of for op in graph.ops if op.kind == ADD_IN_PLACE}
    assert aliases == {"s1": "v2", "s2": "s1", "s4": "s2"}


def plan(name: str, step: float, compute: float, sent: float, peak: float) -> dict[str, Any]:
    return {
        "algorithm": f"{name}, bytes", "step_s": step, "compute_s": compute, "peak_bytes": peak,
        "transfer_bytes": sent, "planning_s": 1.0,
    }  # fmt: skip


def test_figure_10_is_explained_where_it_differs() -> None:
    rows = [plan("tofu", 3.0, 2.9, 1e9, 2**33), plan("icml18", 2.9, 2.8, 2e9, 2**33),
            plan("allrow-greedy", 4.0, 2.8, 3e9, 2**33)]  # fmt: skip
    row = {"graph": "wresnet", "batch": 8, "ops": 9, "ideal_s": 2.0, "rows": rows, "cpu_s": 1.0}
    report = {"date": "d", "command": "c", "machine": "m", "plans": {"wresnet": row}}
    text = page(report)
    assert "slower than `icml18` all the same" in text
    assert "fit here" in text
    rows[1]["step_s"], rows[2]["peak_bytes"] = 3.1, 2.0**34
    text = page(report)
    assert "all the same" not in text
    assert "fit here" not in text
