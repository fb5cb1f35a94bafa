"""Constraints as groups and devices, which every algorithm knows, and their conflicts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float64
from numpy import ndarray

from pardnn.errors import InfeasibleError, shown
from pardnn.place.colocation import closed_arrays, legal_placement, runnable
from pardnn.place.constraints import Setting, conflict, reduced, sides
from pardnn.place.decision import Decision, fitted
from pardnn.place.ordering.schedule import first_overwrites
from pardnn.place.pardnn import place_pardnn
from pardnn.plan.constraints import Constraint, constraint_to_dict, placing
from pardnn.plan.demands.named import Named, named
from pardnn.planner.problem import Problem


def constrained(problem: Problem) -> Problem:
    """Return a problem whose groups and devices express its constraints.

    Raises:
        InfeasibleError: E303, with a minimal set of conflicting constraints.
        UsageError: E245, if a name or a device does not exist.
    """
    constraints = placing(problem.options.constraints)
    if not constraints or problem.allowed is not None:
        return problem
    return restricted_to(problem, meant_by(problem, constraints))


def restricted_to(problem: Problem, meant: Sequence[Named]) -> Problem:
    """Return a problem whose groups and devices say what constraints mean.

    Args:
        problem: Without constraints so far.
        meant: By numbers of its ops and devices.

    Raises:
        InfeasibleError: E303, with constraints that cannot hold together, each of them needed.
    """
    setting = setting_of(problem)
    found = conflict(setting, meant)
    if found:
        raise refused([each.constraint for each in found], "cannot hold together")
    joined = reduced(setting, meant)
    group = joined.joined
    group.setflags(write=False)
    graph = dataclasses.replace(problem.graph, arrays=problem.graph.arrays._replace(group=group))
    free = dataclasses.replace(problem, graph=graph, allowed=joined.allowed[joined.group])
    if not any(each.constraint.kind == "apart" for each in meant):
        return free
    allowed, _ = sides(joined, meant, _work(free))
    if allowed is None:
        raise refused([each.constraint for each in meant], "were not met within the time limit")
    return dataclasses.replace(free, allowed=allowed[joined.group])


def at_odds(problem: Problem, constraints: Sequence[Constraint]) -> tuple[Constraint, ...]:
    """Return a minimal set of conflicting constraints on whole ops; empty if there is no conflict.

    Raises:
        UsageError: E245, if a name or a device does not exist.
    """
    found = conflict(setting_of(problem), meant_by(problem, constraints))
    return tuple(each.constraint for each in found)


def meant_by(problem: Problem, constraints: Sequence[Constraint]) -> tuple[Named, ...]:
    """Return constraints on whole ops, as numbers.

    Raises:
        UsageError: E245, if a name or a device does not exist.
    """
    cluster, whole = problem.cluster, problem.cut.whole if problem.cut else problem.graph
    return named(constraints, whole, problem.graph, cluster, cluster.num_devices)


def setting_of(problem: Problem) -> Setting:
    """Return what constraints are to hold on: a problem's ops and devices."""
    graph, machine, capacities = problem.graph, problem.machine, problem.capacities
    # What does not fit may do so with state on the host.
    room = [None if problem.options.offload else size for size in capacities]
    return Setting(graph.arrays, machine, room, first_overwrites(graph))


def _work(problem: Problem) -> Float64[ndarray, "n k"]:
    """Return the seconds of each op on each device in a placement without "apart"."""
    machine, n = problem.machine, len(problem.graph.ops)
    work = np.zeros((n, machine.num_devices))
    try:
        place = place_pardnn(problem.graph, machine, problem.capacities).plan.place
    except InfeasibleError:
        return work
    work[np.arange(n), place] = machine.seconds[machine.device_class[place], np.arange(n)]
    return work


def obeyed(problem: Problem, decision: Decision) -> Decision:
    """Return a decision that meets the constraints: itself, or the closest one that does.

    Algorithms respect groups and devices that can run an op; where one does not, it is fixed here.

    Raises:
        InfeasibleError: E301, if the closest one does not fit.
    """
    if problem.allowed is None:
        return decision
    place, arrays = decision.plan.place, closed_arrays(problem.graph)
    runs = runnable(arrays, problem.machine)
    legal = legal_placement(arrays, runs, place)
    if np.array_equal(legal, place):
        return decision
    note = f"{int((legal != place).sum())} ops moved to meet constraints"
    found = fitted(problem.graph, problem.machine, legal, problem.capacities)
    return found._replace(notes=(*decision.notes, *found.notes, note))


def refused(constraints: Sequence[Constraint], why: str, more: str = "") -> InfeasibleError:
    """Return E303 that lists constraints.

    Args:
        constraints: Those in conflict.
        why: For several of them, such as "cannot hold together".
        more: Added to the text.
    """
    listed = "\n".join(f"  {shown(str(each))[1:-1]}" for each in constraints)
    one = len(constraints) == 1
    text = "this constraint" if one else f"these {len(constraints)} constraints"
    why = why.replace("cannot hold together", "cannot hold") if one else why
    why = why.replace("be met together", "be met") if one else why
    why = why.replace("were not met", "was not met") if one else why
    return InfeasibleError(
        f"{text} {why}:\n{listed}\n"
        f"{'Without it' if one else 'Without any one of them'} the others may hold.{more}",
        code="E303",
        details={"constraints": [constraint_to_dict(each) for each in constraints]},
    )
