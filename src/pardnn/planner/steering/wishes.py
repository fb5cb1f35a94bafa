"""Constraints with a price: met where that makes the step slower by less.

Problem: choose which wishes a plan meets, so that its seconds, and the prices of those that it does
not, are least in all.
Idea: plan without them, and see which are met by luck; add those that are missing one by one, the
dearest first, and keep each that pays; at last try all that are still missing, as some pay only
together. What is met stays met meanwhile.
Complexity: as many plannings as there are wishes, and two.
Deviations: greedy; the best of all sets of wishes would take a planning for each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from pardnn.errors import InfeasibleError
from pardnn.plan.constraints import PLACING, Constraint, hard
from pardnn.plan.demands.check_constraints import broken_constraints
from pardnn.plan.demands.layout_demands import layout_demands
from pardnn.plan.plan import plan_from_arrays, planned_graph
from pardnn.planner.outcome import Outcome
from pardnn.planner.problem import Problem
from pardnn.planner.steering.constrained import meant_by
from pardnn.shard.mesh_of_cluster import mesh_of
from pardnn.time_limit import seconds_left


def decide_wished(problem: Problem, decide: Callable[[Problem], Outcome]) -> Outcome:
    """Return the outcome that is fastest, with the prices of wishes that it does not meet.

    Args:
        problem: What to plan.
        decide: Plans it; every constraint has to be met then.

    Raises:
        InfeasibleError: E301 or E303, if there is no plan even without wishes.
        UsageError: E245, if a wish names what is not there.
    """
    wishes = [each for each in problem.options.constraints if each.price_s is not None]
    if not wishes:
        return decide(problem)
    meant_by(problem, [each for each in wishes if each.kind in PLACING])
    list(layout_demands(wishes, problem.graph, mesh_of(problem.cluster)))
    must = hard(problem.options.constraints)
    best = decide(problem.with_options(constraints=must))
    unmet, spent = unmet_by(problem, best, wishes), best.planning_s
    by_price = sorted(wishes, key=lambda each: -(each.price_s or 0))
    for added in (*([each] for each in by_price), by_price):
        if not any(each in unmet for each in added) or seconds_left() <= 0:
            continue
        granted = [each for each in wishes if each not in unmet or each in added]
        found = _granted(problem, must, granted, decide)
        if found is None:
            continue
        spent += found.planning_s
        left = unmet_by(problem, found, wishes)
        if _value(found, left) < _value(best, unmet):
            best, unmet = found, left
    notes = [f"wish {'not met' if each in unmet else 'met'}: {each}" for each in wishes]
    return best._replace(planning_s=spent, notes=(*best.notes, *notes))


def _granted(
    problem: Problem,
    must: Sequence[Constraint],
    granted: Sequence[Constraint],
    decide: Callable[[Problem], Outcome],
) -> Outcome | None:
    """Return a plan that has to meet some wishes, too; None if none does."""
    demanded = (*must, *(dataclasses.replace(each, price_s=None) for each in granted))
    try:
        return decide(problem.with_options(constraints=demanded))
    except InfeasibleError:
        return None


def unmet_by(
    problem: Problem, outcome: Outcome, wishes: Sequence[Constraint]
) -> tuple[Constraint, ...]:
    """Return the wishes that an outcome does not meet."""
    graph, cut = problem.graph, outcome.sharded
    plan = plan_from_arrays(graph, outcome.plan) if cut is None else cut.plan
    planned = planned_graph(graph, plan)
    return tuple(e for e, _ in broken_constraints(wishes, graph, planned, plan, problem.cluster))


def _value(outcome: Outcome, unmet: Sequence[Constraint]) -> float:
    return outcome.makespan_s + sum(each.price_s or 0.0 for each in unmet)
