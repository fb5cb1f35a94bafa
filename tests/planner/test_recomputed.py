"""Plans with second calls of ops: steps that fit no other way, on one device and on several."""

from __future__ import annotations

import pytest

import pardnn
from pardnn.api import advice
from pardnn.api.advice import planned
from pardnn.api.draw import draw_plan
from pardnn.api.simulate import simulate
from pardnn.cluster import Cluster
from pardnn.errors import InfeasibleError, UsageError
from pardnn.graph.build import build_graph
from pardnn.graph.ir import Graph, Op, Tensor
from pardnn.place.recompute import search
from pardnn.place.recompute.annealing import Front
from pardnn.place.recompute.problem import Nodes
from pardnn.plan.check import check_plan
from pardnn.plan.file import plan_from_json, plan_to_json
from pardnn.planner.compare import compare
from pardnn.planner.costs import costs_for
from pardnn.planner.options import PlanOptions
from pardnn.planner.problem import Problem
from testbed.recompute_graphs import unet_step

pytestmark = pytest.mark.jit


@pytest.fixture(autouse=True)
def _quick_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "MOST_ROUNDS", 100)


def chain(layers: int) -> Graph:
    """A step of equal layers; each gradient reads its layer's result."""
    ops = [Op(name="f0", kind="input", outputs=(Tensor(name="f0", bytes=10),))]
    names = [f"f{i}" for i in range(1, layers + 1)]
    read = [("f0",), *((name,) for name in names)]
    read += [
        (f"g{i + 1}" if i < layers else f"f{layers}", f"f{i - 1}") for i in range(layers, 0, -1)
    ]
    names += [f"g{i}" for i in range(layers, 0, -1)]
    del read[layers]
    for name, inputs in zip(names, read, strict=True):
        made = (Tensor(name=name, bytes=10),)
        ops.append(Op(name=name, kind="aten.mm.default", inputs=inputs, outputs=made,
                      seconds={"accelerator": 1.0}))  # fmt: skip
    return build_graph("chain", ops)


def test_a_step_fits_that_did_not() -> None:
    graph, cluster = chain(8), Cluster.uniform(1, memory=70)
    with pytest.raises(InfeasibleError):
        pardnn.plan(graph, cluster, reserve=0.0)
    plan = pardnn.plan(graph, cluster, reserve=0.0, recompute=True)
    assert plan.predicted is not None
    assert plan.predicted.peak_bytes[0] <= 70
    assert plan.recompute
    assert plan.predicted.makespan_s == 16 + len(plan.recompute)
    assert "called a second time" in plan.notes[0]
    check_plan(graph, plan_from_json(plan_to_json(plan)))
    assert plan_to_json(pardnn.plan(graph, cluster, reserve=0.0, recompute=True)) == plan_to_json(
        plan
    )


def test_nothing_is_called_again_where_a_step_fits() -> None:
    graph, cluster = chain(4), Cluster.uniform(1, memory=1000)
    assert pardnn.plan(graph, cluster, recompute=True).recompute is None


def test_more_memory_is_never_slower() -> None:
    graph, before = chain(6), float("inf")
    for memory in (50, 60, 70, 80, 90):
        plan = pardnn.plan(graph, Cluster.uniform(1, memory=memory), reserve=0.0, recompute=True)
        assert plan.predicted is not None
        assert plan.predicted.makespan_s <= before
        before = plan.predicted.makespan_s


def test_devices_decide_for_themselves() -> None:
    graph, cluster = chain(12), Cluster.uniform(2, memory=60)
    with pytest.raises(InfeasibleError):
        pardnn.plan(graph, cluster, "auto-whole", reserve=0.0)
    plan = pardnn.plan(graph, cluster, "auto-whole", reserve=0.0, recompute=True)
    assert plan.recompute
    assert plan.predicted is not None
    assert max(plan.predicted.peak_bytes) <= 60
    check_plan(graph, plan, cluster)
    assert draw_plan(graph, plan, costs_for(graph, cluster)).startswith("<svg")
    assert simulate(graph, plan).makespan_s == plan.predicted.makespan_s


def test_what_nothing_fits_is_said() -> None:
    with pytest.raises(InfeasibleError, match="no plan fits"):
        pardnn.plan(chain(4), Cluster.uniform(1, memory=25), reserve=0.0, recompute=True)


def test_engines_that_order_ops_themselves_make_no_second_calls() -> None:
    with pytest.raises(UsageError, match="called a second time"):
        pardnn.plan(chain(4), Cluster.uniform(2), policy="fifo", recompute=True)


def test_what_does_not_fit_is_told_that_second_calls_would_do() -> None:
    graph, cluster = chain(8), Cluster.uniform(1, memory=70)
    with pytest.raises(InfeasibleError) as error:
        planned(graph, cluster, PlanOptions(reserve=0.0))
    assert "--recompute" in error.value.details["try"]
    _, result = planned(graph, cluster, PlanOptions(reserve=0.0, recompute=True))
    assert result.peak_bytes[0] <= 70
    with pytest.raises(InfeasibleError) as error:
        planned(graph, Cluster.uniform(1, memory=25), PlanOptions(reserve=0.0))
    assert "--recompute" not in error.value.details["try"]


@pytest.mark.long
def test_what_fits_with_second_calls_alone_is_advised_where_they_are_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(advice, "CHEAP_OPS", 0)  # pieces of the batch would be tried for seconds
    graph = chain(8)
    with pytest.raises(InfeasibleError) as error:
        planned(graph, Cluster.uniform(1, memory=25), PlanOptions(reserve=0.0, recompute=True))
    assert "ops called a second time, needs 60 B" in error.value.message
    assert "--max-memory 60B" in error.value.details["try"]


def test_advice_stops_between_tries_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advice, "SECONDS", -1.0)
    with pytest.raises(InfeasibleError, match=r"Not tried, after .*--microbatches 2, "):
        planned(chain(8), Cluster.uniform(1, memory=25), PlanOptions(reserve=0.0))


def test_all_orders_on_devices_take_a_bounded_amount_of_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spent: list[int] = []

    def front_of(nodes: Nodes, *, seed: int, work: int) -> Front:
        spent.append(work)
        return given(nodes, seed=seed, work=min(work, 1))

    given = search.front_of
    monkeypatch.setattr(search, "front_of", front_of)
    search._known_front.cache_clear()
    pardnn.plan(chain(11), Cluster.uniform(2, memory=60), "auto-whole", reserve=0.0,
                recompute=True)  # fmt: skip
    search._known_front.cache_clear()
    assert 0 < sum(spent) <= 2.1 * search.WORK


def test_algorithms_are_compared_with_second_calls() -> None:
    graph, cluster = chain(8), Cluster.uniform(1, memory=70)
    problem = Problem(graph, cluster, costs_for(graph, cluster), PlanOptions(reserve=0.0))
    assert not compare(problem, ["heft"])[0].fits
    (row,) = compare(problem.with_options(recompute=True), ["heft"])
    assert row.makespan_s is not None
    assert row.makespan_s > 16


def test_a_sweep_of_limits_is_monotone() -> None:
    graph, before = unet_step(3), float("inf")
    peak = pardnn.plan(graph, Cluster.uniform(1), "single", reserve=0.0).predicted
    assert peak is not None
    reached = 0
    for memory in range(peak.peak_bytes[0] // 3, peak.peak_bytes[0], peak.peak_bytes[0] // 24):
        try:
            plan = pardnn.plan(graph, Cluster.uniform(1, memory=memory), "single",
                               reserve=0.0, recompute=True)  # fmt: skip
        except InfeasibleError:
            assert before == float("inf")
            continue
        assert plan.predicted is not None
        assert plan.predicted.peak_bytes[0] <= memory
        assert plan.predicted.makespan_s <= before * (1 + 1e-12)
        before, reached = plan.predicted.makespan_s, reached + 1
    assert reached > 5
