"""The integer program agrees with search where both are exact, and states its gap."""

import importlib.util
from typing import Any

import pytest

from pardnn.cluster import Cluster
from pardnn.cost.costs import preset_costs
from pardnn.shard.search import exact
from pardnn.shard.search.coarsening import NEEDED
from pardnn.shard.search.cost_tables import NEVER, CostTables
from pardnn.shard.search.dynamic_program import Solution
from pardnn.shard.search.exact import exact_state
from pardnn.shard.search.objective_bytes import BytesObjective
from pardnn.shard.search.objective_seconds import seconds_objective
from pardnn.shard.search.problem import make_problem
from pardnn.shard.search.tofu import find_sharding
from testbed.hand_graphs import chain, mlp
from tests.shard.search.test_dynamic_program import stated

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


def test_what_must_not_be_costs_more_than_all_else_and_the_answer_is_priced(monkeypatch) -> None:
    """The solver's choice is costed here, by its tables; its bound is passed on."""
    tables = CostTables(make_problem(mlp(256, 512, 512, 512), NEEDED), BytesObjective(), (2,))
    asked: list[Any] = []

    def answered(name: str, program: Any, **_: Any) -> Any:
        asked.append(program)
        return {"choice": [0] * len(program["unary"]), "bound": 7.0}

    monkeypatch.setattr(exact, "ask", answered)
    found = exact_state(tables)
    (program,) = asked
    never = max(c for _, _, rows in program["pairs"] for row in rows for c in row)
    others = [
        max((c for row in rows for c in row if c < never), default=0.0)
        for _, _, rows in program["pairs"]
    ]
    assert never > 10 * sum(others) > 0
    assert found.bound == 7.0
    axes = tuple(range(1))
    cost = stated(tables, Solution(found.state, 0.0, False), axes)
    assert found.cost == (pytest.approx(cost) if cost < NEVER else pytest.approx(found.cost))
    assert found.state.layouts == tuple(
        tables.layouts(v, (None,), axes)[0] for v in tables.problem.variables
    )
