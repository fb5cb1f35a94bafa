"""Cuts under measured costs: an estimate is held against an estimate."""

import dataclasses
from collections.abc import Sequence

import pytest

from pardnn.cluster import Cluster
from pardnn.planner.costs import Progress, costs_for
from pardnn.planner.options import PlanOptions
from pardnn.planner.problem import Problem
from pardnn.planner.search.log import SearchLog
from pardnn.planner.search.portfolio import decide, decide_best
from pardnn.planner.sharded import complete
from pardnn.planner.sharded import decide as cuts
from pardnn.planner.sharded.complete import ShardedPlan
from tests.planner.test_sharded import chain

pytestmark = pytest.mark.jit

NAMES = ("single", "tofu", "equal-chop")


def problem() -> Problem:
    """Return a step that is timed by a roofline, said to be measured."""
    graph, cluster = chain(4096, 512), Cluster.uniform(2)
    costs = dataclasses.replace(costs_for(graph, cluster, "k80"), source="measured")
    return Problem(graph, cluster, costs, PlanOptions())


@pytest.fixture
def measuring(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What is measured of one cut after the other, in their estimates; none is known before."""
    shares: list[float] = []

    def measured(_: Problem, found: ShardedPlan, progress: Progress) -> ShardedPlan:
        progress(1, 1)
        return found._replace(
            makespan_s=found.makespan_s * shares.pop(0), estimated_s=found.makespan_s
        )

    monkeypatch.setattr(cuts, "measured", measured)
    monkeypatch.setattr(cuts, "known_costs", lambda *_, **__: None)
    return shares


def tried(found: Problem) -> list[tuple[str, bool]]:
    return [(each.algorithm, each.makespan_s is not None) for each in found.log.tried]


@pytest.mark.parametrize(("shares", "best"), [([0.6, 0.5], "equal-chop"), ([0.5, 0.6], "tofu")])
def test_a_cut_whose_estimate_is_above_what_was_measured_of_another_is_measured_too(
    measuring: list[float], shares: Sequence[float], best: str
) -> None:
    measuring += shares
    asked = problem()
    found = decide_best(asked, NAMES)
    assert measuring == []
    assert tried(asked) == [(name, True) for name in NAMES]
    assert found.algorithm == best


def test_one_that_is_estimated_far_above_the_best_is_not(measuring: list[float]) -> None:
    asked = problem()
    measuring += [0.5]
    first = decide(asked, "tofu")
    assert first.sharded is not None
    assert first.sharded.estimated_s is not None
    low = first.sharded._replace(estimated_s=first.sharded.estimated_s / 2)
    for cut in (low, low._replace(estimated_s=None)):
        with pytest.raises(cuts.InfeasibleError, match="computes for|it takes an estimated"):
            decide(asked, "equal-chop", best=first._replace(sharded=cut))


def test_seconds_of_timing_count_for_the_whole_search_where_something_is_timed() -> None:
    shown: list[str] = []
    log = SearchLog(lambda what, _tried, _best_s: shown.append(what))
    part, beside = SearchLog(within=log, part="2 pieces, "), SearchLog(beside=log)
    for each in (log, part, beside):
        each.timing("tofu")  # all of its ops are known
    assert log.measuring_s == 0
    told = part.timing("tofu")
    told(1, 2)
    first = beside.measuring_s
    told(2, 2)
    assert 0 < first < log.measuring_s == part.measuring_s
    assert shown == [f"2 pieces, timing the ops of tofu, {done} of 2" for done in (1, 2)]


def test_what_is_measured_keeps_its_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, cluster = chain(4096, 512), Cluster.uniform(2)
    asked = Problem(graph, cluster, costs_for(graph, cluster, "k80"), PlanOptions())
    estimate = decide(asked, "tofu").sharded
    assert estimate is not None
    twice = {kind: 2 * each for kind, each in estimate.costs.seconds.items()}
    costs = dataclasses.replace(estimate.costs, seconds=twice)
    monkeypatch.setattr(complete, "partitioned_costs", lambda *_, **__: costs)
    found = complete.measured(asked, estimate)
    assert found.estimated_s == estimate.makespan_s < found.makespan_s


@pytest.mark.parametrize("is_known", [False, True])
def test_after_a_while_only_what_is_known_counts(
    measuring: list[float], monkeypatch: pytest.MonkeyPatch, is_known: bool
) -> None:
    monkeypatch.setattr(cuts, "MEASURING_S", 0.0)
    monkeypatch.setattr(cuts, "known_costs", lambda *_, **__: True if is_known else None)
    measuring += [0.6, 0.5]
    asked = problem()
    found = decide_best(asked, NAMES)
    if is_known:
        assert (found.algorithm, measuring) == ("equal-chop", [])
        return
    # The first cut is held against a placement, so it is not measured either.
    assert (found.algorithm, measuring) == ("single", [0.6, 0.5])
    whys = [each.why or "" for each in asked.log.tried[1:]]
    assert all(why.startswith("not measured: other cuts took 0 s") for why in whys)
