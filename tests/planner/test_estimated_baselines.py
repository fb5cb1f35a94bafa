"""Ideal, small batch and swapping, counted by hand."""

import dataclasses
import io

import pytest
from rich.console import Console

from pardnn.cluster import Cluster
from pardnn.cost.costs import graph_costs
from pardnn.graph.build import build_graph
from pardnn.graph.ir import Graph, Op, Tensor
from pardnn.planner.options import PlanOptions
from pardnn.planner.problem import Problem
from pardnn.planner.without_plan.baselines import HOST_BANDWIDTH, estimated_baselines
from pardnn.report.results import CompareResult, CompareRow
from pardnn.report.text import result_text

MEGA = 10**6


def step(batch: int) -> Graph:
    """A layer of 8 MB: 1 s and 4 MB of result per sample; 2 s whatever the batch is."""
    x = Tensor(name="x", bytes=MEGA * batch, shape=(batch, 250_000), dtype="float32")
    w = Tensor(name="w", bytes=8 * MEGA, shape=(2_000_000,), dtype="float32")
    y = Tensor(name="y", bytes=4 * MEGA * batch, shape=(batch, 1_000_000), dtype="float32")
    seconds = {"accelerator": 2.0 + batch}
    ops = [
        Op(name="x", kind="input", outputs=(x,), memory="residual"),
        Op(name="w", kind="parameter", outputs=(w,), memory="residual"),
        Op(name="y", kind="layer", inputs=("x", "w"), outputs=(y,), seconds=seconds),
    ]
    return build_graph("step", ops)


def rows(memory: int | None, batch: int | None = 8, count: int = 2) -> dict[str, CompareRow]:
    graph, cluster = step(batch or 8), Cluster.uniform(count, memory=memory)
    problem = Problem(graph, cluster, graph_costs(graph), PlanOptions(reserve=0.0))
    found = estimated_baselines(problem, batch, step if batch else None)
    assert all(row.estimated for row in found)
    return {row.algorithm: row for row in found}


def test_by_hand_where_all_fits() -> None:
    found = rows(None)
    assert found["ideal"].makespan_s == pytest.approx(10 / 2)
    assert found["small-batch"].makespan_s == pytest.approx(2 + 4)  # 4 samples on each of two
    assert found["small-batch"].peak_bytes == (8 * MEGA + 5 * 4 * MEGA,)
    assert found["swapping"].makespan_s == pytest.approx(2 + 4)  # nothing is moved


def test_by_hand_where_memory_is_short() -> None:
    """Two samples fit: 8 + 10 MB; of four, 28 MB are needed and 24 are there."""
    found = rows(24 * MEGA)
    assert found["small-batch"].makespan_s == pytest.approx((2 + 2) * 2)
    assert found["small-batch"].note == "2 samples on each device"
    assert found["swapping"].makespan_s == pytest.approx(2 + 4)  # hidden behind computation
    assert rows(12 * MEGA)["small-batch"].error == (
        "one sample needs 12.40 MiB on one device, usable: 11.44 MiB"
    )


def test_swapping_is_as_slow_as_the_link_to_the_host() -> None:
    fast, cluster = step(8), Cluster.uniform(1, memory=44 * MEGA)
    costs = graph_costs(fast)
    costs = dataclasses.replace(costs, seconds={"accelerator": costs.seconds["accelerator"] * 1e-9})
    problem = Problem(fast, cluster, costs, PlanOptions(reserve=0.0))
    found = {row.algorithm: row for row in estimated_baselines(problem)}
    # 48 MB are touched at once: the weight or the batch goes and comes back in each step.
    moved = (found["swapping"].makespan_s or 0.0) * HOST_BANDWIDTH
    assert moved in (pytest.approx(8 * MEGA), pytest.approx(16 * MEGA))


def test_a_graph_file_has_no_other_batch_sizes() -> None:
    found = rows(None, batch=None)
    assert not found["small-batch"].fits
    assert "FILE.py:FUNCTION" in (found["small-batch"].error or "")
    assert found["swapping"].makespan_s == pytest.approx(10.0)
    said = io.StringIO()
    Console(file=said, width=200).print(result_text(CompareResult(rows=tuple(found.values()))))
    assert "10 s (estimated)" in said.getvalue()
    assert "ideal: no communication, no memory limit" in said.getvalue()
