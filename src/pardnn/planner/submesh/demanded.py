"""Constraints of mixed plans: devices are submeshes, and mesh axes those inside a submesh.

An op that is cut inside a submesh runs on all devices of it. So a pin allows the submeshes whose
devices it names all, and a forbidden device forbids its submesh. Columns are then restricted as
whole ops are, and the cut keeps to the layouts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from pardnn.cluster import Cluster
from pardnn.errors import InfeasibleError, UsageError
from pardnn.place.constraints import holds
from pardnn.plan.constraints import Constraint, cutting, placing
from pardnn.plan.demands.named import Named, named
from pardnn.planner.kept_state import state_inside
from pardnn.planner.problem import Problem
from pardnn.planner.sharded.decide import can_shard
from pardnn.planner.steering.constrained import restricted_to, setting_of
from pardnn.planner.submesh.submeshes import part_of, submesh_sizes
from pardnn.shard.search.coarsening import NEEDED
from pardnn.shard.search.problem import make_problem
from pardnn.shard.sharding import FixedLayouts


def on_submeshes(problem: Problem, column: Problem, size: int) -> Problem:
    """Return a column that keeps to where constraints let the devices of submeshes run it.

    Args:
        problem: The step, with its constraints.
        column: A device for each submesh, without constraints.
        size: Devices of a submesh.

    Raises:
        InfeasibleError: E301, if constraints cannot hold together on submeshes of this size.
        UsageError: E245, if a name or a device does not exist.
    """
    meant = _of_submeshes(problem, column, size)
    if not meant:
        return column
    try:
        return restricted_to(column, meant)
    except InfeasibleError as error:
        raise InfeasibleError(f"on submeshes of {size} {error.message}") from None


def _of_submeshes(problem: Problem, column: Problem, size: int) -> tuple[Named, ...]:
    """Return what constraints on ops mean, by numbers of submeshes."""
    cluster, demanded = problem.cluster, placing(problem.options.constraints)
    meant = named(demanded, problem.graph, column.graph, cluster, cluster.num_devices)
    return tuple(each._replace(devices=_submeshes(each, cluster, size)) for each in meant)


def _submeshes(each: Named, cluster: Cluster, size: int) -> frozenset[int]:
    """Return the submeshes that a constraint names: all of their devices, or, to forbid, any."""
    names = all if each.constraint.kind == "pin" else any
    return frozenset(
        number
        for number in range(cluster.num_devices // size)
        if names(number * size + at in each.devices for at in range(size))
    )


def inside_of_submesh(problem: Problem, graph: Problem, size: int) -> Problem:
    """Return a graph as a problem of one submesh, with the layouts that are demanded or there.

    Args:
        problem: The step, with its constraints.
        graph: The step, or the same with its batch in pieces.
        size: Devices of a submesh.
    """
    return dataclasses.replace(
        graph,
        cluster=part_of(problem.cluster, range(size)),
        options=problem.options,
        state=problem.state and state_inside(graph.graph, problem.state, size),
        allowed=None,
    )


def layouts_inside(inside: Problem) -> FixedLayouts | None:
    """Return the layouts that are demanded inside a submesh; None if there are none.

    Args:
        inside: From `inside_of_submesh`.

    Raises:
        InfeasibleError: E301, if a constraint names a mesh axis that a submesh does not have.
    """
    try:
        return inside.fixed
    except UsageError as error:
        size = inside.cluster.num_devices
        raise InfeasibleError(f"on submeshes of {size} {error.message}") from None


def may_hold(problem: Problem, constraints: Sequence[Constraint]) -> bool:
    """Whether a mixed plan may meet constraints: on submeshes of some size nothing speaks against.

    What devices hold is left out, as cut ops need less.

    Raises:
        UsageError: E245, if a name or a device does not exist.
    """
    step = problem.with_options(constraints=tuple(constraints))
    is_free = problem.state is None and problem.start is None
    if not is_free or problem.options.policy != "order" or not can_shard(problem.graph):
        return False
    return any(_may_hold_on(step, size) for size in submesh_sizes(problem.cluster))


def _may_hold_on(step: Problem, size: int) -> bool:
    devices = part_of(step.cluster, range(0, step.cluster.num_devices, size), size)
    column = dataclasses.replace(step, cluster=devices, allowed=None)
    setting = setting_of(column)._replace(capacities=[None] * devices.num_devices)
    if not holds(setting, _of_submeshes(step, column, size)):
        return False
    if not cutting(step.options.constraints):
        return True
    try:
        make_problem(step.graph, NEEDED, fixed=layouts_inside(inside_of_submesh(step, step, size)))
    except InfeasibleError:
        return False
    return True
