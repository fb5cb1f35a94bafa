"""What a larger memory limit does to a plan."""

import math

import pytest

from pardnn.cost.costs import graph_costs
from pardnn.errors import InfeasibleError
from pardnn.planner.make_plan import make_plan
from pardnn.planner.options import PlanOptions
from pardnn.planner.problem import Problem
from pardnn.sim.peak import one_device_peak
from tests.place.machines import cluster_of
from tests.strategies import random_graph


@pytest.mark.jit
@pytest.mark.parametrize("family", ["layered", "fork-join"])
def test_a_larger_limit_refuses_nothing_and_hardly_slows_a_step(family: str) -> None:
    """The search is heuristic: up to 5 % slower than under some smaller limit, on these graphs."""
    graph, best = random_graph(1, 24, family), math.inf
    peak, options = one_device_peak(graph.arrays), PlanOptions(algorithm="auto-whole", reserve=0.0)
    for part in (0.6, 0.9, 1.0, 1.2, 2.0):
        cluster = cluster_of(2, memory=int(peak * part))
        try:
            found = make_plan(Problem(graph, cluster, graph_costs(graph), options))[1].makespan_s
        except InfeasibleError:
            assert best == math.inf
            continue
        assert found <= 1.05 * best
        best = min(best, found)
    assert best < math.inf
