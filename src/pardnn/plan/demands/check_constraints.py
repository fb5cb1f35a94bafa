"""The checker of constraints: which of them a plan breaks, and by what."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from pardnn.cluster import Cluster
from pardnn.errors import PardnnError, shown
from pardnn.graph.ir import Graph
from pardnn.plan.constraints import PLACING, Constraint, constraint_to_dict
from pardnn.plan.demands.layout_demands import how, layout_demands
from pardnn.plan.demands.named import Named, named
from pardnn.plan.mesh import layout_of, make_mesh
from pardnn.plan.plan import Plan, graph_in_pieces

_NO_MESH = make_mesh((1,))


def constraint_problems(
    constraints: Sequence[Constraint],
    graph: Graph,
    planned: Graph,
    plan: Plan,
    cluster: Cluster | None,
) -> Iterator[str]:
    """Yield each constraint that a plan breaks, with what breaks it; prices do not count.

    Args:
        constraints: Of the user.
        graph: The step, whose names they use.
        planned: The graph whose ops the plan places.
        plan: Any plan of that graph.
        cluster: Names the devices, if it is known.
    """
    for each, why in broken_constraints(constraints, graph, planned, plan, cluster):
        yield f"constraint {shown(str(each))} {why}"


def broken_constraints(
    constraints: Sequence[Constraint],
    graph: Graph,
    planned: Graph,
    plan: Plan,
    cluster: Cluster | None,
) -> Iterator[tuple[Constraint, str]]:
    """Yield each constraint that a plan breaks, and why; see `constraint_problems`."""
    of_ops = [each for each in constraints if each.kind in PLACING]
    if plan.partition is not None and plan.partition.submeshes == 1:
        yield from ((each, "is broken: the plan cuts every op over all devices") for each in of_ops)
    elif of_ops:
        yield from _misplaced(of_ops, graph, planned, plan, cluster)
    yield from _laid_otherwise([each for each in constraints if each.kind == "layout"], graph, plan)
    count = 1 if plan.pieces is None else len(plan.pieces.points) - 1
    for each in constraints:
        if each.kind == "pieces" and each.count != count:
            yield each, f"is broken: the batch is in {count}"


def _misplaced(
    constraints: Sequence[Constraint],
    graph: Graph,
    planned: Graph,
    plan: Plan,
    cluster: Cluster | None,
) -> Iterator[tuple[Constraint, str]]:
    try:
        width = 1 if plan.partition is None else plan.partition.mesh.size
        found = named(constraints, graph, planned, cluster, plan.num_devices, width)
    except PardnnError as error:
        yield _unknown(constraints, error)
        return
    place = [plan.placement[op.name] for op in planned.ops]
    for each in found:
        at = breaking(each, place)
        if at is not None:
            ops = " and ".join(f"{planned.ops[i].name!r:.60} is on device {place[i]}" for i in at)
            yield each.constraint, f"is broken: {ops}"


def _laid_otherwise(
    constraints: Sequence[Constraint], graph: Graph, plan: Plan
) -> Iterator[tuple[Constraint, str]]:
    if not constraints:
        return
    cut, told = plan.partition, set[int]()
    mesh = _NO_MESH if cut is None else cut.mesh
    asked = constraints
    if cut is None:  # whatever the axis: no op is cut
        asked = [dataclasses.replace(each, axis=None) for each in constraints]
    number = {id(each): i for i, each in enumerate(asked)}
    try:
        pieces = None if cut is None or plan.pieces is None else graph_in_pieces(graph, plan)
        for demand in layout_demands(asked, graph, mesh, pieces):
            i = number[id(demand.constraint)]
            words = () if cut is None else cut.sharding.get(demand.tensor, ())
            dim = (layout_of(words) or (None,) * len(mesh.shape))[demand.axis]
            if dim != demand.dim and i not in told:
                told.add(i)
                on = (
                    "the plan cuts no op" if cut is None else f"mesh axis {mesh.names[demand.axis]}"
                )
                yield constraints[i], f"is broken: {demand.tensor!r:.60} is {how(dim)} ({on})"
    except PardnnError as error:
        yield _unknown(constraints, error)


def _unknown(constraints: Sequence[Constraint], error: PardnnError) -> tuple[Constraint, str]:
    """Return the constraint that names what is not there, and what that is."""
    wrong = error.details["constraint"]
    each = next((e for e in constraints if constraint_to_dict(e) == wrong), constraints[0])
    return each, error.message.splitlines()[0].removeprefix(f"constraint {shown(str(each))}: ")


def breaking(each: Named, place: Sequence[int]) -> tuple[int, ...] | None:
    """Return the op, or the two ops, that break a constraint; None if it holds.

    Args:
        each: The constraint.
        place: Device of each op.
    """
    kind, everywhere = each.constraint.kind, [i for row in each.members for i in row]
    if kind == "pin":
        return next(((i,) for i in everywhere if place[i] not in each.devices), None)
    if kind == "forbid":
        return next(((i,) for i in everywhere if place[i] in each.devices), None)
    if kind == "together":
        first, width = everywhere[0], each.width
        there = place[first] // width
        return next(((first, i) for i in everywhere if place[i] // width != there), None)
    owner: dict[int, tuple[int, int]] = {}
    for number, row in enumerate(each.members):
        for i in row:
            member, other = owner.setdefault(place[i], (number, i))
            if member != number:
                return (other, i)
    return None
