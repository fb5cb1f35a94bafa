"""Polish: never worse, valid, within the limit, the same twice; its search against a naive run."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pardnn.api.algorithms import ALGORITHMS, AUTO_SMALL
from pardnn.api.planning import compare, decide, make_plan
from pardnn.cluster import Cluster
from pardnn.cost.costs import graph_costs
from pardnn.errors import InfeasibleError
from pardnn.graph.ir import Graph
from pardnn.place.baseline import closed_arrays
from pardnn.place.pardnn import place_pardnn
from pardnn.place.polish import polish, task_of
from pardnn.place.polish_kernel import search_kernel, times_kernel
from pardnn.place.round_robin import place_round_robin
from pardnn.plan.check import plan_problems
from pardnn.plan.plan import plan_from_arrays
from pardnn.sim.engine import simulate
from tests.place.machines import cluster_of, clusters, limited, machine_for
from tests.place.test_pardnn import one_device_peak
from tests.strategies import FAMILIES, graphs, random_graph

TYPES = ("accelerator", "cpu")


@settings(max_examples=30)
@given(
    graph=graphs(max_ops=14, types=TYPES),
    cluster=clusters(),
    tightness=st.sampled_from([None, 1.0, 0.7]),
)
def test_never_worse_valid_and_within_the_limit(
    graph: Graph, cluster: Cluster, tightness: float | None
) -> None:
    limit = None if tightness is None else max(1, int(one_device_peak(graph) * tightness))
    capacities = [limit] * cluster.num_devices
    machine = machine_for(graph, cluster)
    try:
        plan = place_pardnn(graph, machine, capacities).plan
    except InfeasibleError:
        return
    better = polish(graph, machine, plan, capacities, changes=200)
    assert plan_problems(graph, plan_from_arrays(graph, better), limited(cluster, limit)) == []
    before, after = (simulate(graph, machine, p).makespan for p in (plan, better))
    assert after <= before


@pytest.mark.parametrize("family", FAMILIES)
def test_times_of_the_search_are_those_of_the_judge(family: str) -> None:
    graph = random_graph(2, 40, family, memory=False)
    machine = machine_for(graph, cluster_of(3))
    arrays = closed_arrays(graph)
    plan = place_round_robin(graph, machine, [None] * 3).plan
    place = plan.place.copy()
    order = np.argsort(simulate(graph, machine, plan).dispatch)
    before = simulate(graph, machine, plan).makespan
    search_kernel(arrays, machine, task_of(arrays, machine), place, order, 300, 0.01, 7)
    assert sorted(order.tolist()) == list(range(len(graph.ops)))
    start, finish = np.zeros(len(order)), np.zeros(len(order))
    times_kernel(arrays, machine, place, order, start, finish)
    better = polish(graph, machine, plan, [None] * 3, changes=2400)
    assert simulate(graph, machine, better).makespan <= before
    position = np.argsort(order)
    for op, row in enumerate(np.split(arrays.input_tensor, arrays.input_ptr[1:-1])):
        assert (position[arrays.tensor_op[row]] < position[op]).all()
    assert finish.max() <= before


def test_a_bad_plan_becomes_good() -> None:
    graph = random_graph(1, 80, "fork-join", memory=False)
    machine = machine_for(graph, cluster_of(3))
    plan = place_round_robin(graph, machine, [None] * 3).plan
    better = polish(graph, machine, plan, [None] * 3, changes=1600)
    before, after = (simulate(graph, machine, p).makespan for p in (plan, better))
    assert after < before * 0.85


def test_the_same_seed_gives_the_same_plan() -> None:
    graph = random_graph(3, 60, "layered")
    machine = machine_for(graph, cluster_of(3))
    plan = place_round_robin(graph, machine, [None] * 3).plan
    one, two = (polish(graph, machine, plan, [None] * 3, seed=5, changes=800) for _ in range(2))
    assert all(np.array_equal(x, y) for x, y in zip(one, two, strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_auto_is_never_worse_than_what_it_ran(family: str) -> None:
    graph = random_graph(4, 40, family)
    cluster, costs = cluster_of(3), graph_costs(graph)
    _, result = make_plan(graph, cluster, costs, algorithm="auto", reserve=0.0)
    for name in AUTO_SMALL:
        found = decide(graph, cluster, costs, algorithm=name, reserve=0.0, seed=0)
        assert result.makespan_s <= found.makespan_s


def test_compare_has_a_row_for_what_cannot_run() -> None:
    graph = random_graph(4, 40, "layered")
    rows = compare(graph, cluster_of(2), graph_costs(graph), names=["exact", "heft"])
    assert [row.fits for row in rows] == [False, True]
    assert "refuses more than 30" in (rows[0].error or "")
    assert "exact" in ALGORITHMS
