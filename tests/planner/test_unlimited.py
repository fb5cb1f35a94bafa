"""A search without limits comes first: its plan and its parts are taken if they fit."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import pytest

import pardnn
from pardnn.cluster import Cluster
from pardnn.cost.costs import graph_costs
from pardnn.errors import InfeasibleError
from pardnn.plan.check import check_plan
from pardnn.planner.costs import costs_for
from pardnn.planner.microbatches import decide as microbatches
from pardnn.planner.microbatches.in_pieces import completed, problem_in_pieces
from pardnn.planner.options import PlanOptions
from pardnn.planner.outcome import Outcome, plan_of, score
from pardnn.planner.problem import Problem
from pardnn.planner.search import unlimited
from pardnn.planner.search.portfolio import decide
from pardnn.planner.search.unlimited import decide_fitting, reused
from pardnn.sim.peak import peaks
from testbed import hand_graphs
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
    ("part", "close", "searched"),
    [
        (1.0, 1.0, [None]),  # it fits
        (0.99, 1.0, [None]),  # it is made to fit, and no slower
        (0.99, 0.8, [None, 0.99]),
        (0.9, 1.0, [None, 0.9]),
        (0.5, 1.0, [None, 0.5]),  # given up at its first plan
    ],
)
def test_a_plan_without_limits_is_taken_if_it_fits(
    part: float, close: float, searched: list[float | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unlimited, "CLOSE", close)
    asked, completed = list[float | None](), 0

    def search(problem: Problem) -> Outcome:
        nonlocal completed
        memory = problem.cluster.devices[0].memory
        asked.append(None if memory is None else part)
        if memory is not None:
            return FREE._replace(algorithm="limited", makespan_s=0.8 * FREE.makespan_s)
        found = fastest(problem)
        completed += 1
        return found

    problem = problem_of(int(part * HELD), algorithm="auto")
    found = decide_fitting(problem, search)
    assert asked == searched
    assert completed == (part > 0.6)
    assert found.algorithm == ("heft" if len(searched) == 1 else "limited")
    if len(searched) == 1:
        assert found.makespan_s <= FREE.makespan_s
        assert peaks(GRAPH.arrays, found.plan).max() <= part * HELD
        assert [each.algorithm for each in problem.log.tried] == ["heft"]


def test_a_plan_that_fits_is_kept_from_a_search_whose_last_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_order(*_: Any) -> None:
        raise InfeasibleError("")

    monkeypatch.setattr(unlimited, "fit_candidate", no_order)

    def search(problem: Problem) -> Outcome:
        if problem.cluster.devices[0].memory is not None:
            return FREE._replace(makespan_s=2 * FREE.makespan_s)
        fastest(problem)
        return decide(problem, "single")

    found = decide_fitting(problem_of(HELD, algorithm="auto"), search)
    assert found.makespan_s == FREE.makespan_s


def test_pieces_are_made_to_fit_too() -> None:
    graph = hand_graphs.mlp(64, 64, 64, 64)

    def problem(memory: int | None) -> Problem:
        cluster = Cluster.uniform(2, memory=memory)
        costs = costs_for(graph, cluster, "v100")
        return Problem(graph, cluster, costs, PlanOptions(reserve=0.0, costs="v100"))

    def plan(whole: Problem) -> Outcome:
        pieces, inner = problem_in_pieces(whole, 4, 4)
        return completed(whole, inner, pieces, decide(inner, "round-robin"))

    free = plan(problem(None))
    assert free.sharded is not None
    limit = int(0.95 * peaks(free.sharded.graph.arrays, free.plan).max())
    found = unlimited._fitted(problem(limit), free, 1.0)
    assert found.sharded is not None
    assert found.sharded.plan.pieces == free.sharded.plan.pieces
    check_plan(graph, plan_of(problem(limit), found), problem(limit).cluster)
    assert found.makespan_s == found.sharded.makespan_s <= free.makespan_s


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


def test_what_no_limit_changes_is_made_once_for_both_searches() -> None:
    made = list[int]()

    def make() -> list[int]:
        made.append(len(made))
        return made

    alone, limited = problem_of(None), dataclasses.replace(problem_of(HELD), free={})
    for each in (alone, alone, limited.without_limits(), limited):
        assert each.kept(("this",), make) is made
    assert made == [0, 1, 2]
    other = dataclasses.replace(limited, graph=random_graph(2, 60))
    assert other.kept(("this",), make) is limited.kept(("that",), make)
    assert made == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("share", "searched"), [(1.0, 1), (0.98, 2)])
def test_stages_of_a_search_without_limits_are_taken_where_they_fit(
    share: float, searched: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = hand_graphs.mlp(64, 64, 64, 64)
    asked = list[Problem]()

    def in_stages(problem: Problem, inner: Problem) -> Outcome:
        asked.append(inner)
        return search(problem, inner)

    search = microbatches.in_stages
    monkeypatch.setattr(microbatches, "in_stages", in_stages)

    def staged(problem: Problem) -> Outcome:
        return microbatches._staged(problem, 4, lambda *_: FREE, math.inf)

    def problem(memory: int | None) -> Problem:
        cluster = Cluster.uniform(3, memory=memory)
        given = PlanOptions(algorithm="modulo", reserve=0.0, costs="v100")
        made = Problem(graph, cluster, costs_for(graph, cluster, "v100"), given)
        return dataclasses.replace(made, free={})

    free = problem(None)
    known = staged(free)
    assert known.sharded is not None
    most = int(peaks(known.sharded.graph.arrays, known.plan).max())
    limited = dataclasses.replace(free, cluster=Cluster.uniform(3, memory=int(share * most)))
    vars(limited)["in_pieces"] = free.in_pieces
    found = staged(limited)
    assert len(asked) == searched
    assert asked[0].graph is asked[-1].graph  # the batch is cut once
    assert (found.plan is known.plan) == (searched == 1)


def test_auto_under_a_limit_is_no_slower_than_a_plan_that_fits() -> None:
    """It took 0.24 % longer: placements were made to fit before local search."""
    graph = random_graph(6, 400)
    free = pardnn.plan(graph, Cluster.uniform(4), "auto", reserve=0.0)
    assert free.predicted is not None
    memory = max(free.predicted.peak_bytes)
    found = pardnn.plan(graph, Cluster.uniform(4, memory=memory), "auto", reserve=0.0)
    assert found.predicted is not None
    assert found.predicted.makespan_s == free.predicted.makespan_s
