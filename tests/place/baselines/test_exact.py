"""The optimum by CP-SAT against exhaustion, and no heuristic beats it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pardnn.cost.costs import graph_costs
from pardnn.errors import InfeasibleError, StuckError
from pardnn.graph.ir import Graph
from pardnn.place.baselines import exact
from pardnn.place.baselines.exact import optimum, place_exact
from pardnn.place.colocation import closed_arrays
from pardnn.place.ordering.schedule import first_overwrites
from pardnn.place.pardnn import place_pardnn
from pardnn.plan.check import plan_problems
from pardnn.plan.plan import plan_from_arrays
from pardnn.planner.make_plan import make_plan
from pardnn.planner.options import PlanOptions
from pardnn.planner.problem import Problem
from pardnn.sim.bounds import lower_bound_seconds
from pardnn.sim.engine import simulate
from pardnn.sim.machine import machine_of
from testbed.small_graphs import small_case
from tests.long_cases import long_but
from tests.place.machines import cluster_of, limited, machine_for
from tests.place.pardnn.test_pardnn import one_device_peak
from tests.reference.pardnn import least_makespan
from tests.strategies import FAMILIES, examples, graphs, random_graph

cp = pytest.importorskip("pardnn.solvers.cp", exc_type=ImportError)

TYPES = ("accelerator", "cpu")


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process per example would take longer than the example."""
    monkeypatch.setattr(exact, "ask", lambda _, problem, **__: cp.solve(problem))


@examples(15)
@given(
    graph=graphs(max_ops=6, types=TYPES),
    speeds=st.sampled_from([(1.0,), (1.0, 2.0)]),
    types=st.sampled_from([TYPES[:1], TYPES]),
)
def test_it_is_the_optimum(graph: Graph, speeds: tuple[float, ...], types: tuple[str, ...]) -> None:
    cluster = cluster_of(2, speeds=speeds, types=types)
    machine = machine_for(graph, cluster)
    arrays = closed_arrays(graph)
    best = least_makespan(graph, machine, arrays.group.tolist())
    nothing = np.empty((0, 2), dtype=np.int64)
    found = optimum(arrays, machine, [None] * 2, nothing)
    assert found is not None
    assert found.is_proven
    assert found.lower_bound_s == pytest.approx(best, abs=1e-9)
    found = optimum(arrays, machine, [None] * 2, first_overwrites(graph))
    assert found is not None
    plan = place_exact(graph, machine, [None] * 2).plan
    assert plan_problems(graph, plan_from_arrays(graph, plan), cluster) == []
    makespan = simulate(graph, machine, plan).makespan
    assert makespan == pytest.approx(found.lower_bound_s, abs=1e-9)
    assert makespan >= best * (1 - 1e-12)  # which lets ops overwrite what is being sent


@pytest.mark.parametrize("family", FAMILIES)
def test_no_heuristic_beats_it(family: str) -> None:
    graph = random_graph(4, 14, family)
    machine = machine_for(graph, cluster_of(3))
    times = [
        simulate(graph, machine, place(graph, machine, [None] * 3).plan).makespan
        for place in (place_exact, place_pardnn)
    ]
    assert lower_bound_seconds(graph.arrays, machine) <= times[0] <= times[1] * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_an_op_of_no_time_does_not_wait_for_one_that_starts_with_it(seed: int) -> None:
    graph = random_graph(4, 14, "fork-join")
    machine = machine_for(graph, cluster_of(3))
    limits: list[int | None] = [None] * 3
    overwrites = first_overwrites(graph)
    found = optimum(closed_arrays(graph), machine, limits, overwrites, seed=seed)
    assert found is not None
    plan = exact.ordered(graph, machine, found, limits).plan
    assert simulate(graph, machine, plan).makespan <= found.lower_bound_s * (1 + 1e-9)


@pytest.mark.parametrize("family", ["fork-join", "in-tree"])
def test_the_same_seed_gives_the_same_schedule(family: str) -> None:
    graph = random_graph(4, 14, family)
    machine, arrays = machine_for(graph, cluster_of(3)), closed_arrays(graph)
    overwrites = first_overwrites(graph)
    found = [optimum(arrays, machine, [None] * 3, overwrites, seed=1) for _ in range(3)]
    assert None not in found
    assert len({(tuple(f.place), tuple(f.start)) for f in found if f is not None}) == 1


@pytest.mark.jit
def test_auto_is_near_the_optimum() -> None:
    found = []
    for seed in range(12):
        graph = random_graph(seed, 10, FAMILIES[seed % len(FAMILIES)], memory=False)
        cluster = cluster_of(2 + seed % 2, speeds=(1.0, 2.0) if seed % 3 == 0 else (1.0,))
        machine = machine_for(graph, cluster)
        arrays = closed_arrays(graph)
        nothing = np.empty((0, 2), dtype=np.int64)
        best = optimum(arrays, machine, [None] * cluster.num_devices, nothing)
        assert best is not None
        assert best.is_proven
        problem = Problem(
            graph, cluster, graph_costs(graph), PlanOptions(algorithm="auto", reserve=0.0)
        )
        _, result = make_plan(problem)
        assert result.makespan_s >= best.lower_bound_s
        assert result.lower_bound_s <= best.lower_bound_s + 1e-9
        found.append(result.makespan_s / best.lower_bound_s - 1)
    assert max(found) <= 0.1
    assert np.mean(found) <= 0.02


@pytest.mark.parametrize("seed", long_but({0, 1, 4}, range(6)))
def test_within_limits(seed: int) -> None:
    graph = random_graph(seed, 12, FAMILIES[seed])
    machine = machine_for(graph, cluster_of(2))
    limit = int(one_device_peak(graph) * 0.9)
    try:
        plan = place_exact(graph, machine, [limit] * 2, time_limit=2.0).plan
    except (InfeasibleError, StuckError):
        return
    assert plan_problems(graph, plan_from_arrays(graph, plan), limited(cluster_of(2), limit)) == []


def test_residuals_alone_may_be_too_much() -> None:
    graph = random_graph(0, 30, "transformer")
    machine = machine_for(graph, cluster_of(2))
    with pytest.raises(InfeasibleError):
        place_exact(graph, machine, [50, 50])


def test_no_answer_in_time_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact, "ask", lambda *_, **__: {"status": "UNKNOWN"})
    graph = random_graph(0, 10, "chain")
    with pytest.raises(StuckError, match="UNKNOWN"):
        place_exact(graph, machine_for(graph, cluster_of(2)), [None] * 2)


def test_links_that_are_missing_are_not_used() -> None:
    graph = random_graph(3, 12, "layered", memory=False)
    machine = machine_for(graph, cluster_of(2))
    latency = np.array([[0.0, np.inf], [np.inf, 0.0]])
    nothing = np.empty((0, 2), dtype=np.int64)
    found = optimum(graph.arrays, machine._replace(latency=latency), [None] * 2, nothing)
    assert found is not None
    tensors = graph.arrays.input_tensor
    readers = np.repeat(np.arange(12), np.diff(graph.arrays.input_ptr))
    assert (found.place[graph.arrays.tensor_op[tensors]] == found.place[readers]).all()


@pytest.mark.jit
def test_what_is_called_optimal_is_not_beaten() -> None:
    # OR-Tools 9.15 by its defaults calls 7.465049 ms optimal here.
    graph, cluster = small_case(86, 0)
    costs, arrays = graph_costs(graph), closed_arrays(graph)
    found = optimum(arrays, machine_of(costs, cluster), [None] * 2, first_overwrites(graph))
    problem = Problem(graph, cluster, costs, PlanOptions(algorithm="exact", reserve=0.0))
    _, result = make_plan(problem)
    assert found is not None
    assert found.is_proven
    assert found.lower_bound_s <= result.makespan_s < 7.46499e-3
