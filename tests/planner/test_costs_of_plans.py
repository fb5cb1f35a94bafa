"""Which costs a question about a plan goes by: those that the plan was made with."""

import dataclasses
from typing import Any

import pytest

import pardnn
from pardnn import backends
from pardnn.cluster import Cluster
from pardnn.cost.costs import MEASURED_BEFORE, Costs
from pardnn.errors import UsageError
from pardnn.graph.ir import Graph
from pardnn.plan.plan import Plan, Predicted
from pardnn.planner import costs as planner_costs
from pardnn.planner.costs import choice_of, costs_for
from tests.planner.test_sharded import chain


def plan(named: Any, source: str) -> Plan:
    predicted = Predicted(makespan_s=1.0, peak_bytes=(1, 1), transfer_bytes=0, costs=source)
    cluster = Cluster.uniform(2, named=named)
    return Plan(placement={}, order=((), ()), cluster=cluster, predicted=predicted)


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Ids of the graphs of which this machine's CPU has timed all calls."""
    known: set[int] = set()

    def of_this_cpu(graph: Graph, threads: int) -> Costs:
        if id(graph) not in known:
            raise UsageError("not measured", code="E230")
        return dataclasses.replace(
            costs_for(graph, Cluster.uniform(2), "k80", threads=threads), source="measured"
        )

    monkeypatch.setattr(planner_costs, "_of_this_cpu", of_this_cpu)
    monkeypatch.setattr(backends, "this_device", lambda: "cpu", raising=False)
    return known


def test_what_was_measured_here_is_used_again_and_nothing_is_run(
    timed: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, other = chain(), chain()
    measured = plan("cpu", "measured")
    assert choice_of(measured, None, graph, graph) is None
    timed.add(id(graph))
    assert choice_of(measured, None, graph, graph) == MEASURED_BEFORE
    assert choice_of(plan("cpu", MEASURED_BEFORE), None, graph, graph) == MEASURED_BEFORE
    assert choice_of(measured, None, graph, other) is None  # of a cut plan's ops some are not known
    assert choice_of(measured, "a100", graph, graph) == "a100"
    assert choice_of(plan("cpu", "v100"), None, graph, graph) == "v100"
    assert choice_of(plan("gpu", "measured"), None, graph, graph) is None  # of another machine
    found = costs_for(graph, Cluster.uniform(2), MEASURED_BEFORE)
    assert (found.source, found.is_measured) == (MEASURED_BEFORE, True)
    with pytest.raises(UsageError):
        costs_for(other, Cluster.uniform(2), MEASURED_BEFORE)
    monkeypatch.setattr(backends, "this_device", lambda: "cuda")
    assert choice_of(measured, None, graph, graph) is None


@pytest.mark.jit
def test_a_simulation_tells_the_time_that_the_plan_predicts(timed: set[int]) -> None:
    graph, cluster = chain(), Cluster.uniform(2, named="cpu")
    made = pardnn.plan(graph, cluster, "heft", costs="k80")
    assert made.predicted is not None
    said = dataclasses.replace(made.predicted, costs="measured")
    made = dataclasses.replace(made, predicted=said, checksum=None)
    assert pardnn.simulate(graph, made).makespan_s != said.makespan_s
    timed.add(id(graph))
    assert pardnn.simulate(graph, made).makespan_s == said.makespan_s
