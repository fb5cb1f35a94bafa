"""A search near the user's start plan: repair it, improve it by small moves, stay close to it.

Candidates are the plan itself, with forced moves and, under a new limit, an order close to its own,
and `pardnn`'s warm start for other graphs and devices (`portfolio`). Local search improves the
better one, with part of its usual work and without placing all ops again; then moves that gain
nothing are undone (`place.polish.restore`).
"""

from __future__ import annotations

import numpy as np

from pardnn.errors import InfeasibleError
from pardnn.place.colocation import closed_arrays, legal_placement, runnable
from pardnn.place.ordering.fit import fit_moved, fits
from pardnn.place.ordering.schedule import first_overwrites
from pardnn.place.polish.effort import work_for
from pardnn.place.polish.polish import polish
from pardnn.place.polish.restore import relabelled, restored
from pardnn.plan.plan import PlanArrays
from pardnn.planner.problem import Problem
from pardnn.planner.start.earlier import plan_before
from pardnn.sim.engine import run_lists
from pardnn.sim.machine import machine_of
from pardnn.sim.transfers import missing_link

#: Local search takes this part of its usual work.
WORK_PART = 4


def itself(problem: Problem) -> PlanArrays:
    """Return the earlier plan if it is valid for this graph, with forced moves.

    Ops on a device where they may no longer be go to another one. If the plan then does not fit,
    messages and order change as little as possible.

    Raises:
        InfeasibleError: E301, if it is for another graph, cannot run on these devices, or no order
            close to its own fits.
    """
    machine, graph, a = problem.machine, problem.graph, problem.graph.arrays
    plan = plan_before(graph, problem.before, problem.cluster)
    if plan is None:
        raise InfeasibleError("the earlier plan is not valid for this graph")
    free = machine_of(problem.costs, problem.cluster)
    seconds = free.seconds[free.device_class[plan.place], np.arange(len(plan.place))]
    arrays = closed_arrays(graph)
    place = legal_placement(arrays, runnable(arrays, machine), plan.place)
    if not np.isfinite(seconds).all() or missing_link(a, machine, place) is not None:
        raise InfeasibleError("the earlier plan does not run on these devices")
    if np.array_equal(place, plan.place) and fits(a, plan, problem.capacities):
        return plan
    timeline, overwrites = run_lists(a, free, plan), first_overwrites(graph)
    _, found = fit_moved(a, machine, place, timeline, problem.capacities, overwrites)
    if found is None:
        raise InfeasibleError("the earlier plan does not fit")
    return found


def improved(problem: Problem, plan: PlanArrays) -> PlanArrays:
    """Return a plan that is no slower, by moves of single groups.

    Args:
        problem: With the start plan.
        plan: A plan near it.
    """
    return polish(
        problem.graph, problem.machine, plan, problem.capacities, seed=problem.options.seed,
        work=work_for(len(problem.graph.ops)) // WORK_PART, near=True,
    )  # fmt: skip


def kept_near(problem: Problem, plan: PlanArrays) -> tuple[PlanArrays, str]:
    """Return a plan that is no slower and closer to the start plan, and what it kept.

    Args:
        problem: With the start plan, which places whole ops.
        plan: What was found.
    """
    near = problem.known.near
    plan = relabelled(problem.machine, plan, near, problem.capacities)
    if problem.options.policy == "order":
        plan = restored(problem.graph, problem.machine, plan, near, problem.capacities)
    known = near >= 0
    kept, old, new = int((plan.place == near).sum()), int(known.sum()), int((~known).sum())
    note = f"started from a plan: {kept} of {old} ops stay on their devices"
    return plan, f"{note}; {new} others are new or were on devices that are gone" if new else note
