"""A search near the plan that a user starts from: repaired, improved by small moves, kept near.

The plan itself, in its own order if it has to fit a new limit, and `pardnn`'s warm start for other
graphs and devices are the candidates (`portfolio`). Local search improves the better one, with a
part of its usual work and without placing all ops anew; then moves that bring nothing are undone
(`place.polish.restore`).
"""

from __future__ import annotations

import numpy as np

from pardnn.errors import InfeasibleError
from pardnn.place.ordering.fit import fits
from pardnn.place.ordering.memory_bounded import memory_bounded_plan
from pardnn.place.ordering.schedule import first_overwrites
from pardnn.place.polish.polish import polish, work_for
from pardnn.place.polish.restore import relabelled, restored
from pardnn.plan.plan import PlanArrays
from pardnn.planner.problem import Problem
from pardnn.planner.start.earlier import plan_before
from pardnn.sim.engine import run_lists
from pardnn.sim.transfers import missing_link

#: Local search takes this part of its usual work.
WORK_PART = 4


def itself(problem: Problem) -> PlanArrays:
    """Return the earlier plan if it is one for this graph; messages moved, if it must fit so.

    Raises:
        InfeasibleError: E301, if it is for another graph, does not run on these devices, would move
            state, or does not fit in its own order.
    """
    machine, pins, a = problem.machine, problem.known.pins, problem.graph.arrays
    plan = plan_before(problem.graph, problem.before, problem.cluster)
    if plan is None:
        raise InfeasibleError("the plan that was there before is none for this graph")
    place = plan.place
    can_run = np.isfinite(machine.seconds[machine.device_class[place], np.arange(len(place))])
    stays = (pins < 0) | (pins == place)
    if not (can_run & stays).all() or missing_link(a, machine, place) is not None:
        raise InfeasibleError("the plan that was there before does not run on these devices")
    if not fits(a, plan, problem.capacities):
        position = run_lists(a, machine, plan).dispatch.copy()
        plan = memory_bounded_plan(
            a, machine, place, position, problem.capacities, first_overwrites(problem.graph)
        )
        if not fits(a, plan, problem.capacities):
            raise InfeasibleError("the plan that was there before does not fit")
    return plan


def improved(problem: Problem, plan: PlanArrays) -> PlanArrays:
    """Return a plan that is no slower, by moves of single groups.

    Args:
        problem: With the plan to start from.
        plan: A plan near it.
    """
    return polish(
        problem.graph, problem.machine, plan, problem.capacities, seed=problem.options.seed,
        work=work_for(len(problem.graph.ops)) // WORK_PART, near=True,
    )  # fmt: skip


def kept_near(problem: Problem, plan: PlanArrays) -> tuple[PlanArrays, str]:
    """Return a plan that is no slower and nearer to the one to start from, and what it kept.

    Args:
        problem: With the plan to start from, which places whole ops.
        plan: What was found.
    """
    near = problem.known.near
    plan = relabelled(problem.machine, plan, near, problem.capacities)
    if problem.options.policy == "order":
        plan = restored(problem.graph, problem.machine, plan, near, problem.capacities)
    known = near >= 0
    kept, old, new = int((plan.place == near).sum()), int(known.sum()), int((~known).sum())
    note = f"started from a plan: {kept} of {old} ops run where it had them"
    return plan, f"{note}; {new} others are new or were on devices that are gone" if new else note
