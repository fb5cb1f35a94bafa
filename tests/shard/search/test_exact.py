"""The integer program agrees with search where both are exact, and states its gap."""

import importlib.util

import pytest

from pardnn.cluster import Cluster
from pardnn.cost.costs import preset_costs
from pardnn.shard.search.coarsening import NEEDED
from pardnn.shard.search.cost_tables import CostTables
from pardnn.shard.search.exact import exact_state
from pardnn.shard.search.objective_bytes import BytesObjective
from pardnn.shard.search.objective_seconds import seconds_objective
from pardnn.shard.search.problem import make_problem
from pardnn.shard.search.tofu import find_sharding
from testbed.hand_graphs import chain, mlp

pytestmark = [
    pytest.mark.jit,
    pytest.mark.skipif(importlib.util.find_spec("highspy") is None, reason="needs highspy"),
]


@pytest.mark.parametrize("graph", [chain(4, 4, 12, 20), mlp(32, 256, 512, 128), mlp(6, 10, 7, 9)])
def test_bytes(graph):
    found = exact_state(CostTables(make_problem(graph, NEEDED), BytesObjective(), (2,)))
    searched = find_sharding(graph, Cluster.uniform(2))
    assert found.cost == pytest.approx(searched.cost)
    assert found.bound == pytest.approx(searched.cost, rel=1e-6)


def test_seconds_are_within_two_percent():
    graph, cluster = mlp(512, 1024, 4096, 1024), Cluster.uniform(2)
    costs = preset_costs(graph, "a100")
    problem = make_problem(graph, NEEDED)
    found = exact_state(
        CostTables(problem, seconds_objective(graph, problem, cluster, costs), (2,))
    )
    searched = find_sharding(graph, cluster, "seconds", costs=costs)
    assert searched.cost <= 1.02 * found.cost
