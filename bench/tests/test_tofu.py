"""The bench of Tofu's figures: what it counts, and prose that follows its figures."""

import json
from typing import Any

import pytest

from bench.common import RESULTS
from bench.tofu.figure_11 import CONVOLUTION, claims, partition_rows, picture
from bench.tofu.in_place import ADD, ADD_IN_PLACE, accumulated, last_below
from bench.tofu.notes import notes
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


def test_the_last_batch_below_a_limit_is_found_in_few_steps() -> None:
    for last in (5, 26, 130, 999):
        asked: list[int] = []

        def over(count: int, last: int = last, asked: list[int] = asked) -> int:
            asked.append(count)
            return 10 * (count - last) - 5 + count % 3

        assert last_below(over, 4) == last
        assert len(asked) <= 14


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


def throughput(graph: str, **rates: float | None) -> Any:
    """A row of Figs. 8 and 9 at ideal 100 samples/s; None: out of memory."""
    row: dict[str, Any] = {"graph": graph, "ideal": {"batch": 64, "samples_per_s": 100.0}}
    for system, rate in rates.items():
        found = {"batch": 64, "devices": 4, "samples_per_s": rate}
        row[system.replace("_", " ")] = {"error": "out of memory"} if rate is None else found
    return row


def test_notes_of_figures_8_and_9_follow_their_rows() -> None:
    rows = [
        throughput("wresnet_50_4", small_batch=90.0, swapping=80.0, tofu=96.0),
        throughput("wresnet_152_4", small_batch=None, swapping=50.0, tofu=80.0),
        throughput("rnn_6_4k", small_batch=None, swapping=60.0, tofu=90.0, operator_placement=53.5),
        throughput("rnn_6_8k", small_batch=None, swapping=7.0, tofu=70.0, operator_placement=None),
    ]
    text = "\n".join(notes({row["graph"]: row for row in rows}))
    assert "80 to 96 % of ideal for the WResNets" in text
    assert "70 to 90 % of ideal for the RNNs" in text
    assert "are -57 % above Table 3's, those of placement are -50 % above" in text
    assert "fits 64 images and 64 sentences" in text
    assert "fits 1 of 2 WResNets, at 0.94 to 0.94 times" in text
    assert "WResNet-152-4" not in text
    assert "Of the 1 RNNs of 6K and 8K 1 are fastest on fewer" in text
    assert "it has 7 % of ideal" in text
    assert "rnn_6_8k runs out of memory here" in text


def test_the_page_of_figures_8_and_9_has_the_notes_of_its_rows() -> None:
    report = json.loads((RESULTS / "2026-11-21_tofu.json").read_text(encoding="utf-8"))
    text = (RESULTS / "2026-11-21_tofu.md").read_text(encoding="utf-8")
    assert "\n".join(notes(report["models"])) in text
