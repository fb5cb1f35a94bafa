"""The least limits: bisection by hand, and a row on a graph whose limits are known."""

import json

import pytest

from bench.common import RESULTS
from bench.placement.boundary import ALGORITHMS, CLOSE, boundary_row, least, page
from bench.placement.memory import Case
from pardnn.cost.costs import graph_costs
from pardnn.graph.build import build_graph
from pardnn.graph.ir import Graph, Op, Tensor


def test_the_least_limit_is_found_to_a_hundredth() -> None:
    assert least(lambda limit: limit >= 137, 0, 1000) in (137, 138)
    assert least(lambda limit: False, 0, 1000) is None


def pairs() -> Graph:
    """Four parameters of 1,000 bytes, each read by an op that makes 100."""
    ops = []
    for n in range(4):
        made = Tensor(name=f"w{n}", bytes=1000)
        ops.append(Op(name=f"w{n}", kind="parameter", outputs=(made,), memory="residual"))
        ops.append(
            Op(name=f"y{n}", kind="op", inputs=(f"w{n}",), seconds={"accelerator": 1.0},
               outputs=(Tensor(name=f"y{n}", bytes=100),))
        )  # fmt: skip
    return build_graph("pairs", ops)


@pytest.mark.jit
def test_a_row_says_where_an_algorithm_gives_up() -> None:
    graph = pairs()
    row = boundary_row(Case("hand", graph, graph_costs(graph), 2), ("pardnn",))
    assert row["bound"] <= row["pardnn"] <= 2200 * 1.01  # two pairs a device, results kept
    report = {"date": "d", "command": "c", "machine": "m", "algorithms": ["pardnn"], "rows": [row]}
    assert "| pardnn | 1.0" in page(report)


def test_the_page_of_memory_says_what_the_last_run_found() -> None:
    rows = json.loads(sorted(RESULTS.glob("*_limits.json"))[-1].read_text("utf-8"))["rows"]
    assert all(row["pardnn"] < row["packing"] for row in rows)
    others = [name for name in ALGORITHMS if name != "pardnn"]
    assert all(row["pardnn"] <= row[name] * (1 + CLOSE) for row in rows for name in others)
