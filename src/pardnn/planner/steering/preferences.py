"""Preferences: constraints with a price, met where that slows the step by less than the price.

Problem: choose which preferences to meet so that the step's seconds plus the prices of the unmet
preferences are minimal.
Idea: plan without preferences and see which are met by chance. Then add the unmet ones one by one,
most expensive first, and keep each that pays off; preferences met so far stay met. Finally try all
that are still unmet at once, since some pay off only together.
Complexity: as many plannings as there are preferences, plus two.
Deviations: greedy. The best set of preferences would need a planning for every subset.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from pardnn.errors import InfeasibleError
from pardnn.plan.constraints import PLACING, Constraint, hard
from pardnn.plan.demands.check_constraints import broken_constraints
from pardnn.plan.demands.layout_demands import layout_demands
from pardnn.plan.plan import planned_graph
from pardnn.planner.outcome import Outcome, makespan_s, plan_of
from pardnn.planner.problem import Problem
from pardnn.planner.steering.constrained import meant_by
from pardnn.shard.mesh_of_cluster import mesh_of
from pardnn.time_limit import seconds_left


def decide_preferred(problem: Problem, decide: Callable[[Problem], Outcome]) -> Outcome:
    """Return the outcome with the least seconds plus prices of unmet preferences.

    Args:
        problem: What to plan.
        decide: Plans a problem and meets all its constraints.

    Raises:
        InfeasibleError: E301 or E303, if no plan exists even without preferences.
        UsageError: E245, if a preference names something that does not exist.
    """
    preferences = [each for each in problem.options.constraints if each.price_s is not None]
    if not preferences:
        return decide(problem)
    meant_by(problem, [each for each in preferences if each.kind in PLACING])
    list(layout_demands(preferences, problem.graph, mesh_of(problem.cluster)))
    must = hard(problem.options.constraints)
    best = decide(problem.with_options(constraints=must))
    unmet, spent = unmet_by(problem, best, preferences), best.planning_s
    by_price = sorted(preferences, key=lambda each: -(each.price_s or 0))
    for added in (*([each] for each in by_price), by_price):
        if not any(each in unmet for each in added) or seconds_left() <= 0:
            continue
        granted = [each for each in preferences if each not in unmet or each in added]
        found = _granted(problem, must, granted, decide)
        if found is None:
            continue
        spent += found.planning_s
        left = unmet_by(problem, found, preferences)
        if _value(problem, found, left) < _value(problem, best, unmet):
            best, unmet = found, left
    notes = [f"preference {'not met' if each in unmet else 'met'}: {each}" for each in preferences]
    return best._replace(planning_s=spent, notes=(*best.notes, *notes))


def _granted(
    problem: Problem,
    must: Sequence[Constraint],
    granted: Sequence[Constraint],
    decide: Callable[[Problem], Outcome],
) -> Outcome | None:
    """Return a plan that also meets the granted preferences; None if there is none."""
    demanded = (*must, *(dataclasses.replace(each, price_s=None) for each in granted))
    try:
        return decide(problem.with_options(constraints=demanded))
    except InfeasibleError:
        return None


def unmet_by(
    problem: Problem, outcome: Outcome, preferences: Sequence[Constraint]
) -> tuple[Constraint, ...]:
    """Return the preferences that an outcome does not meet."""
    graph, plan = problem.graph, plan_of(problem, outcome)
    planned = planned_graph(graph, plan)
    return tuple(
        e for e, _ in broken_constraints(preferences, graph, planned, plan, problem.cluster)
    )


def _value(problem: Problem, outcome: Outcome, unmet: Sequence[Constraint]) -> float:
    return makespan_s(problem, outcome) + sum(each.price_s or 0.0 for each in unmet)
