"""Algorithms side by side: who watches is told which one is at work."""

import pytest

from pardnn.cluster import Cluster
from pardnn.cost.costs import graph_costs
from pardnn.planner.compare import compare
from pardnn.planner.options import PlanOptions
from pardnn.planner.problem import Problem
from pardnn.planner.warm_up import _warm_up_graph


@pytest.mark.jit
def test_each_is_told_with_its_number_and_what_it_tries() -> None:
    graph, told = _warm_up_graph(), list[str]()
    problem = Problem(graph, Cluster.uniform(2), graph_costs(graph), PlanOptions())
    rows = compare(problem, ["heft", "auto-whole"], told.append)
    assert [row.algorithm for row in rows] == ["heft", "auto-whole"]
    assert told[0] == "comparing, 1 of 2: heft"
    assert "comparing, 2 of 2: auto-whole" in told
    assert any(line.startswith("comparing, 2 of 2: auto-whole: heft; ") for line in told)
