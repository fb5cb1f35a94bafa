"""The objective `period`: steps in a row overlap, and what is best for one need not be for many."""

import dataclasses
import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pardnn.cluster import Cluster
from pardnn.cost.costs import graph_costs
from pardnn.errors import UsageError
from pardnn.graph.build import build_graph
from pardnn.graph.ir import Graph, Op, Tensor
from pardnn.plan.file import plan_from_json, plan_to_json
from pardnn.plan.plan import Plan, plan_arrays
from pardnn.planner.make_plan import make_plan
from pardnn.planner.options import Objective, PlanOptions
from pardnn.planner.problem import Problem
from pardnn.report.results import PlanResult
from pardnn.sim.machine import machine_of
from pardnn.sim.period import period
from tests.strategies import graphs


def op(name: str, seconds: float, *reads: str) -> Op:
    return Op(
        name=name, kind="op", inputs=reads, outputs=(Tensor(name=name, bytes=8),),
        seconds={"accelerator": seconds},
    )  # fmt: skip


def planned(
    graph: Graph, cluster: Cluster, objective: Objective, algorithm: str = "auto-whole"
) -> tuple[Plan, PlanResult]:
    options = PlanOptions(algorithm=algorithm, objective=objective, reserve=0.0)
    return make_plan(Problem(graph, cluster, graph_costs(graph), options))


@functools.cache
def encoder_and_head() -> Graph:
    """A chain: four ops of an encoder, 1 s each, and two of a head, 2 s each."""
    names = [*(f"encode{i}" for i in range(4)), "head", "update"]
    seconds = [1.0] * 4 + [2.0] * 2
    reads = [(), *((name,) for name in names[:-1])]
    rows = zip(names, seconds, reads, strict=True)
    return build_graph("chain", [op(name, s, *read) for name, s, read in rows])


def test_a_chain_is_spread_where_steps_follow_each_other() -> None:
    """One step takes 8 s wherever its ops are; of many, each takes what the busier device does."""
    cluster = Cluster.uniform(2, bandwidth=1e9, latency=0.0)
    plan, result = planned(encoder_and_head(), cluster, "period")
    assert result.period_s == pytest.approx(4.0, rel=1e-6)
    assert plan.objective == "period"
    assert "acyclic" in {each.algorithm for each in plan.tried}
    assert plan_from_json(plan_to_json(plan)).objective == "period"
    _, alone = planned(encoder_and_head(), Cluster.uniform(1), "period")
    assert alone.period_s == pytest.approx(8.0)


@pytest.mark.jit
@settings(max_examples=15)
@given(graph=graphs(max_ops=12, memory=False), k=st.integers(2, 3))
def test_no_period_is_longer_than_that_of_the_fastest_single_step(graph: Graph, k: int) -> None:
    cluster = Cluster.uniform(k, bandwidth=1e9)
    plan, result = planned(graph, cluster, "period")
    _, fastest = planned(graph, cluster, "seconds")
    assert result.period_s <= fastest.period_s * (1 + 1e-9)
    machine = machine_of(graph_costs(graph), cluster)
    assert result.period_s == period(graph.arrays, machine, plan_arrays(graph, plan)).seconds


def test_begins_of_late_steps_repeat() -> None:
    """From them on, the same step begins again a period later."""
    graph, cluster = encoder_and_head(), Cluster.uniform(2, bandwidth=1e9, latency=0.25)
    plan, _ = planned(graph, cluster, "period")
    machine = machine_of(graph_costs(graph), cluster)
    found = period(graph.arrays, machine, plan_arrays(graph, plan))
    assert found.settled
    assert found.ready.min() == 0.0
    assert np.isfinite(found.ready).all()


def test_what_compares_makespans_alone_is_refused() -> None:
    with pytest.raises(UsageError, match="E201 with recompute, plans are compared by makespan"):
        PlanOptions(objective="period", recompute=True)
    with pytest.raises(UsageError, match="E201 with offload"):
        PlanOptions(objective="period", offload=True)
    with pytest.raises(UsageError, match="E201 heft minimises seconds, not period"):
        PlanOptions(objective="period", algorithm="heft").check_asked()
    options = PlanOptions(objective="period")
    assert dataclasses.replace(options, objective="seconds").is_timed
    assert options.is_timed
