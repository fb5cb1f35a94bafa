"""What a larger memory limit does to a plan, and which one is advised."""

import math
import re

import pytest

import pardnn
from pardnn.api.advice import planned
from pardnn.cluster import Cluster
from pardnn.cost.costs import graph_costs
from pardnn.errors import InfeasibleError
from pardnn.planner.make_plan import make_plan
from pardnn.planner.options import PlanOptions
from pardnn.planner.problem import Problem
from pardnn.sim.peak import one_device_peak
from testbed.hand_graphs import mlp
from tests.long_cases import long_but
from tests.place.machines import cluster_of
from tests.strategies import random_graph


@pytest.mark.jit
@pytest.mark.parametrize("family", long_but(["layered"], ["layered", "fork-join"]))
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


@pytest.mark.jit
@pytest.mark.parametrize("algorithm", ["heft", "data-parallel", "tofu*1f1b"])
def test_an_advised_limit_was_tried_with_the_batch_in_pieces(algorithm: str) -> None:
    """Limits of the whole batch were called tried; cuts inside of submeshes ended in a KeyError."""
    graph, k = mlp(8, 64, 64, 64), 4 if "*" in algorithm else 2
    options = PlanOptions(algorithm=algorithm, microbatches=2, costs="v100")
    asked = {"algorithm": algorithm, "microbatches": 2, "costs": "v100"}
    plan = pardnn.plan(graph, Cluster.uniform(k), **asked)
    assert plan.predicted is not None
    limit = int(0.8 * max(plan.predicted.peak_bytes))
    with pytest.raises(InfeasibleError, match="tried: fits") as caught:
        planned(graph, Cluster.uniform(k, memory=limit), options)
    advised = re.search(r"--max-memory (\w+)", str(caught.value))
    assert advised is not None
    pardnn.plan(graph, Cluster.uniform(k, memory=advised[1]), **asked)


@pytest.mark.jit
def test_a_cut_inside_of_submeshes_that_does_not_fit_is_no_bug(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pardnn.api.advice.CHEAP_OPS", 0)  # pieces would be tried for seconds
    options = PlanOptions(algorithm="tofu*heft", costs="v100")
    with pytest.raises(InfeasibleError):
        planned(mlp(8, 64, 64, 64), Cluster.uniform(4, memory="20KiB"), options)
