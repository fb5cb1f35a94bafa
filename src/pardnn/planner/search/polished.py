"""Local search from the best placements of a portfolio."""

from __future__ import annotations

from pardnn.place.polish.polish import FEW_OPS, polish_best
from pardnn.planner.algorithms import STAGED
from pardnn.planner.outcome import Outcome, score, with_plan
from pardnn.planner.problem import Problem
from pardnn.planner.start.near import improved


def polished(problem: Problem, placed: list[Outcome], *, by_period: bool = False) -> Outcome:
    """Improve the best placements by local search; return the best.

    With a start plan, only the best is improved, by moves of single groups.

    Args:
        problem: What is planned.
        placed: The placements.
        by_period: Whether to minimise the period instead of the makespan.
    """
    if problem.start is not None:
        found = min(placed, key=lambda outcome: outcome.makespan_s)
        return with_plan(problem, found, improved(problem, found.plan))
    starts = _starts(problem, placed, by_period)
    plan, origin = polish_best(
        problem.graph, problem.machine, [start.plan for start in starts], problem.capacities,
        seed=problem.options.seed, by_period=by_period,
        known_s=problem.log.score[0] if by_period else problem.log.seconds,
    )  # fmt: skip
    return with_plan(problem, starts[origin], plan)


def _starts(problem: Problem, placed: list[Outcome], by_period: bool) -> list[Outcome]:
    """Return the placements from which local search starts, best first.

    These are the best two and, for small graphs, the best stages: they differ from the others, so
    their own time says little about what local search makes of them.
    """
    is_small = len(problem.graph.ops) <= FEW_OPS

    def seconds(outcome: Outcome) -> float:
        return score(problem, outcome)[0] if by_period else outcome.makespan_s

    # Plans that are as good are mostly equal: the second start is the next slower one.
    unlike = {seconds(outcome): outcome for outcome in reversed(placed)}
    ranked = [unlike[each] for each in sorted(unlike)]
    best_stages = next((each for each in ranked if is_small and each.algorithm in STAGED), None)
    others = [outcome for outcome in ranked if outcome is not best_stages][:2]
    chosen = {id(outcome) for outcome in (*others, best_stages)}
    return [outcome for outcome in ranked if id(outcome) in chosen]
