"""A search without limits comes first: its plan and its parts are taken if they fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest

import pardnn
from pardnn.cluster import Cluster
from pardnn.cost.costs import graph_costs
from pardnn.planner.options import PlanOptions
from pardnn.planner.outcome import Outcome, score
from pardnn.planner.problem import Problem
from pardnn.planner.search.portfolio import decide
from pardnn.planner.search.unlimited import decide_fitting, reused
from pardnn.sim.peak import peaks
from tests.strategies import random_graph

pytestmark = pytest.mark.jit
GRAPH = random_graph(1, 60)


def problem_of(memory: int | None, **options: Any) -> Problem:
    cluster = Cluster.uniform(3, memory=memory)
    return Problem(GRAPH, cluster, graph_costs(GRAPH), PlanOptions(reserve=0.0, **options))


def fastest(problem: Problem) -> Outcome:
    """As a search: it keeps what it finds."""
    found = decide(problem, "heft")
    problem.log.keep(found, score(problem, found))
    problem.log.note("heft", found.makespan_s)
    return found


FREE = fastest(problem_of(None))
HELD = int(peaks(GRAPH.arrays, FREE.plan).max())


@pytest.mark.parametrize(
    ("part", "searched"),
    [
        (1.0, [None]),  # it fits
        (0.9, [None, 0.9]),
        (0.5, [None, 0.5]),  # given up at its first plan
    ],
)
def test_a_plan_without_limits_is_taken_if_it_fits(
    part: float, searched: list[float | None]
) -> None:
    asked, completed = list[float | None](), 0

    def search(problem: Problem) -> Outcome:
        nonlocal completed
        memory = problem.cluster.devices[0].memory
        asked.append(None if memory is None else part)
        if memory is not None:
            return FREE._replace(algorithm="limited")
        found = fastest(problem)
        completed += 1
        return found

    problem = problem_of(int(part * HELD), algorithm="auto")
    found = decide_fitting(problem, search)
    assert asked == searched
    assert completed == (part > 0.6)
    assert found.algorithm == ("heft" if part == 1.0 else "limited")
    if part == 1.0:
        assert found.makespan_s == FREE.makespan_s
        assert [each.algorithm for each in problem.log.tried] == ["heft"]


def test_a_plan_that_fits_is_kept_from_a_search_whose_last_does_not() -> None:
    def search(problem: Problem) -> Outcome:
        if problem.cluster.devices[0].memory is not None:
            return FREE._replace(makespan_s=2 * FREE.makespan_s)
        fastest(problem)
        return decide(problem, "single")

    found = decide_fitting(problem_of(HELD, algorithm="auto"), search)
    assert found.makespan_s == FREE.makespan_s


@pytest.mark.parametrize(
    "options",
    [{"algorithm": "heft"}, {"algorithm": "auto", "recompute": True},
     {"algorithm": "auto", "policy": "fifo"}],
)  # fmt: skip
def test_other_searches_know_the_limits(options: dict[str, Any]) -> None:
    seen = list[int | None]()

    def search(problem: Problem) -> Outcome:
        seen.append(problem.cluster.devices[0].memory)
        return FREE

    assert decide_fitting(problem_of(HELD, **options), search) is FREE
    assert seen == [HELD]


def test_parts_of_a_search_without_limits_are_taken_where_they_fit() -> None:
    asked = 0

    def best(problem: Problem, names: Sequence[str]) -> Outcome:
        nonlocal asked
        asked += 1
        return decide(problem, names[0])

    limited = dataclasses.replace(problem_of(HELD), free={})
    found = reused(limited.without_limits(), ["heft"], best)
    assert reused(limited, ["heft"], best).plan is found.plan
    assert asked == 1
    tight = dataclasses.replace(limited, cluster=Cluster.uniform(3, memory=HELD - 1))
    for problem in (tight, problem_of(HELD)):
        assert reused(problem, ["heft"], best).plan is not found.plan
    assert asked == 3


def test_auto_under_a_limit_is_no_slower_than_a_plan_that_fits() -> None:
    """It took 0.24 % longer: placements were made to fit before local search."""
    graph = random_graph(6, 400)
    free = pardnn.plan(graph, Cluster.uniform(4), "auto", reserve=0.0)
    assert free.predicted is not None
    memory = max(free.predicted.peak_bytes)
    found = pardnn.plan(graph, Cluster.uniform(4, memory=memory), "auto", reserve=0.0)
    assert found.predicted is not None
    assert found.predicted.makespan_s == free.predicted.makespan_s
