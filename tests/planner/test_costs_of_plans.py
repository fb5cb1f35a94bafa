"""Which costs a question about a plan goes by: those that the plan was made with."""

import dataclasses
from typing import Any

import pytest

import pardnn
from pardnn import backends
from pardnn.cluster import Cluster
from pardnn.cost.costs import MEASURED_BEFORE, Costs
from pardnn.errors import UsageError
from pardnn.graph.build import build_graph
from pardnn.graph.ir import Graph, Op, Tensor
from pardnn.plan.plan import Plan, Predicted
from pardnn.planner import costs as planner_costs
from pardnn.planner.costs import (
    choice_of,
    costs_for,
    keeps_freed,
    known_costs,
    partitioned_costs,
)
from tests.planner.test_sharded import chain


def plan(named: Any, source: str) -> Plan:
    predicted = Predicted(makespan_s=1.0, peak_bytes=(1, 1), transfer_bytes=0, costs=source)
    cluster = Cluster.uniform(2, named=named)
    return Plan(placement={}, order=((), ()), cluster=cluster, predicted=predicted)


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Ids of the graphs of which this machine's CPU has timed all calls."""
    known: set[int] = set()

    def of_this_cpu(graph: Graph, threads: int, _keeps: bool) -> Costs:
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


def test_freed_tensors_stay_in_the_heap_where_each_limit_has_room_for_the_whole_step() -> None:
    """Of 100 bytes of weights and 30 that a step makes at once: 100 + 4 * 30 are needed."""

    def op(name: str, size: int, *inputs: str, **more: Any) -> Op:
        return Op(name=name, kind="aten.neg.default" if inputs else "input", inputs=inputs,
                  outputs=(Tensor(name=name, bytes=size),), **more)  # fmt: skip

    graph = build_graph("step", [
        op("w", 100, memory="residual"), op("x", 10), op("y", 20, "x"), op("z", 10, "y")
    ])  # fmt: skip
    limits = [(None, True), (220, True), (219, False)]
    assert keeps_freed(graph, None)
    for memory, keeps in limits:
        cluster = Cluster.uniform(2, memory=memory)
        assert keeps_freed(graph, cluster) == keeps, memory
    large, small = (Cluster.uniform(1, memory=memory).devices[0] for memory in (1000, 100))
    small = dataclasses.replace(small, name="other")
    mixed = dataclasses.replace(Cluster.uniform(2), devices=(large, small))
    assert not keeps_freed(graph, mixed)


@pytest.mark.parametrize(("memory", "itself"), [(10**9, 10**9), (10, 1)])
def test_costs_are_those_of_the_whole_step_s_ranks(
    monkeypatch: pytest.MonkeyPatch, memory: int, itself: int
) -> None:
    """A partitioned graph is measured as its step is, however much it takes itself."""
    asked: list[bool] = []

    def table(*_: Any, keeps_freed: bool, **__: Any) -> Any:
        asked.append(keeps_freed)
        raise UsageError("enough", code="E230")

    for name in ("profile_graph", "profile_file", "cached_table"):
        monkeypatch.setattr(backends, name, table, raising=False)
    monkeypatch.setattr(backends, "this_device", lambda: "cpu", raising=False)
    one = Op(name="x", kind="input", outputs=(Tensor(name="x", bytes=itself),))
    step, other = chain(), build_graph("other", [one])
    cluster = Cluster.uniform(1, memory=memory)
    for graph, whole in ((step, None), (other, step)):
        for choice in ("measured", MEASURED_BEFORE):
            captured = dataclasses.replace(graph, is_captured=True)
            for each in (graph, captured):
                with pytest.raises(UsageError):
                    costs_for(each, cluster, choice, whole=whole)
        assert known_costs(graph, cluster, whole) is None
    cut = Costs({}, "measured")
    with pytest.raises(UsageError):
        partitioned_costs(step, other, cluster, cut)
    assert asked == [memory > 10] * 11


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
