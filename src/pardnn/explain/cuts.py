"""Evaluation of other layouts of a tensor, with everything else unchanged or cut again.

With all else as it was, the ops keep the loops that they are cut along and fetch what they need of
the tensor from where it lies now: the partitioned graph is made, simulated, and its memory proven.
Where the graph is small, the search of `tofu` also cuts all else anew around the tensor. Beyond
`JUDGED_LOCAL_OPS` nothing is judged, and the report says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from pardnn.errors import PardnnError
from pardnn.explain.anew import options_of
from pardnn.explain.case import Case
from pardnn.explain.moved import alternative
from pardnn.explain.submeshes import Mixed, cut_anew
from pardnn.graph.ir import Graph, Tensor, storage_owners
from pardnn.graph.layers import origin
from pardnn.plan.constraints import hard
from pardnn.plan.demands.layout_demands import LayoutDemand, layout_demands, layouts_of_demands
from pardnn.plan.mesh import Layout, layout_of, owned_boxes, placements
from pardnn.plan.partitioned_graph import Partition
from pardnn.plan.plan import graph_in_pieces
from pardnn.planner.costs import costs_for
from pardnn.planner.problem import Problem
from pardnn.planner.sharded.complete import plan_of_sharding
from pardnn.planner.submesh.submeshes import part_of
from pardnn.report.explained import Alternative
from pardnn.shard.search.tofu import search
from pardnn.shard.sharding import FixedLayouts, Sharding
from pardnn.shard.spmd.legalize import legalize
from pardnn.sim.peak import peaks

#: Ops of the graph x devices up to which other cuts are judged, and up to which all else is cut
#: anew: some seconds per layout.
JUDGED_LOCAL_OPS, ANEW_LOCAL_OPS = 20_000, 2_000
#: Other layouts that are judged of a tensor: whole, and cut along each of its first dims.
MOST_DIMS = 3


class _Asked(NamedTuple):
    """A tensor that could be cut differently.

    Attributes:
        case: A plan that cuts every op.
        graph: What it cuts: the step, or its pieces.
        partition: Of the plan.
        name: Of the tensor, in the step.
        pieces: What `graph` has of it.
        mixed: The plan, if it cuts ops inside submeshes.
    """

    case: Case
    graph: Graph
    partition: Partition
    name: str
    pieces: list[str]
    mixed: Mixed | None

    @property
    def demands(self) -> list[LayoutDemand]:
        """Layouts that the plan has to have."""
        plan, whole = self.case.plan, self.case.graph
        cut = None if plan.pieces is None else self.graph
        return [*layout_demands(hard(plan.constraints or ()), whole, self.partition.mesh, cut)]


def other_cuts(
    case: Case, tensors: list[str], mixed: Mixed | None = None
) -> tuple[Alternative, ...]:
    """Evaluate other layouts of the first tensor that can be cut.

    Args:
        case: A plan that cuts every op.
        tensors: Names of the graph.
        mixed: The plan, if it cuts ops inside submeshes.
    """
    partition = case.plan.partition
    assert partition is not None
    if case.plan.recompute is not None or case.plan.offload is not None:
        why = "second calls and state on the host were chosen for the existing cut"
        return (_refused("cut otherwise", why, judged=False),)
    graph = graph_in_pieces(case.graph, case.plan)
    found = ((each, _pieces_of(graph, each)) for each in tensors)
    name, pieces = next(((each, cut) for each, cut in found if cut and cut[0].shape), ("", []))
    if not pieces:
        return ()
    local = len(graph.ops) * case.plan.num_devices
    if local > JUDGED_LOCAL_OPS:
        why = f"{len(graph.ops)} ops on {case.plan.num_devices} devices take too long"
        return (_refused(f"{name} cut differently, or whole", why, judged=False),)
    shape, axes = pieces[0].shape or (), len(partition.mesh.shape)
    layouts: list[Layout] = [(None,) * axes]
    layouts += [(dim,) * axes for dim in range(min(len(shape), MOST_DIMS))]
    now = layout_of(tuple(partition.sharding[pieces[0].name]))
    asked = _Asked(case, graph, partition, name, [each.name for each in pieces], mixed)
    return tuple(
        found
        for layout in layouts
        if layout != now and owned_boxes(shape, layout, partition.mesh) is not None
        for found in _judged(asked, layout, anew=local <= ANEW_LOCAL_OPS)
    )


def _pieces_of(graph: Graph, name: str) -> list[Tensor]:
    """Return what a step in pieces has of a tensor: itself, or one for each piece."""
    outputs = (t for op in graph.ops for t in op.outputs)
    return [t for t in outputs if t.name == name or origin(t.name) == name]


def _judged(asked: _Asked, layout: Layout, *, anew: bool) -> Iterator[Alternative]:
    """Yield what a layout costs.

    Args:
        asked: About which tensor.
        layout: Another one.
        anew: Whether everything else is cut again, too.
    """
    case, partition = asked.case, asked.partition
    costs = costs_for(asked.graph, case.cluster, case.choice)
    options = options_of(case, "tofu" if asked.mixed is None else None)
    problem = Problem(asked.graph, case.cluster, costs, options)
    what = f"{asked.name} as ({', '.join(placements(layout))})"
    if partition.loops is not None:
        sharding = Sharding(partition.mesh, _with_layout(asked, layout), partition.loops)
        yield _alternative(asked, problem, f"{what}, everything else unchanged", sharding)
    if not anew:
        return
    inside, capacity = case.cluster, min(filter(None, problem.capacities), default=None)
    if asked.mixed is not None:  # each submesh has a part of the ops, and no search knows which
        inside, capacity = part_of(case.cluster, range(partition.mesh.size)), None
    demanded, _ = layouts_of_demands(asked.demands, partition.mesh)
    try:
        sharding = search(
            asked.graph, inside, "bytes" if case.plan.objective == "bytes" else "seconds",
            costs=costs, capacity=capacity,
            fixed=FixedLayouts(partition.mesh, demanded | dict.fromkeys(asked.pieces, layout)),
        )  # fmt: skip
    except PardnnError as error:
        yield _refused(f"{what}, everything else cut again", error.message.splitlines()[0])
        return
    yield _alternative(asked, problem, f"{what}, everything else cut again", sharding)


def _with_layout(asked: _Asked, layout: Layout) -> dict[str, Layout]:
    """Return the layouts of a plan with another one of a tensor, and of what shares its storage.

    Args:
        asked: About which tensor.
        layout: Its other layout.
    """
    owners = storage_owners(asked.graph.ops)
    shapes = {t.name: t.shape for op in asked.graph.ops for t in op.outputs}
    sharding = asked.partition.sharding
    moved = {(owners[piece], shapes[piece], tuple(sharding[piece])) for piece in asked.pieces}
    found: dict[str, Layout] = {}
    for each, words in sharding.items():
        is_alike = (owners[each], shapes[each], tuple(words)) in moved
        known = layout if is_alike else layout_of(tuple(words))
        if known is not None:
            found[each] = known
    return found


def _alternative(asked: _Asked, problem: Problem, what: str, sharding: Sharding) -> Alternative:
    """Return the result of a sharding.

    Args:
        asked: About which tensor.
        problem: What it solves.
        what: Description, for people.
        sharding: The other cut.
    """
    try:
        legal = legalize(asked.graph, sharding)
        if any(legal.layouts[piece] != sharding.layouts[piece] for piece in asked.pieces):
            return _refused(what, "ops that write or view it are cut along other dims")
        for demand in asked.demands:
            if legal.layouts[demand.tensor][demand.axis] != demand.dim:
                return _refused(what, f"constraint: {demand.constraint}")
        if asked.mixed is not None:
            return alternative(asked.case, what, cut_anew(asked.case, asked.mixed, legal)[1])
        found = plan_of_sharding(problem, legal)
    except PardnnError as error:
        return _refused(what, error.message.splitlines()[0])
    return Alternative(
        what=what,
        judged=True,
        fits=True,
        makespan_s=found.makespan_s,
        change_s=found.makespan_s - asked.case.timeline.makespan,
        peak_bytes=tuple(peaks(found.graph.arrays, found.arrays).tolist()),
        transfer_bytes=found.transfer_bytes,
    )


def _refused(what: str, why: str, *, judged: bool = True) -> Alternative:
    return Alternative(
        what=what, judged=judged, fits=False, makespan_s=None, change_s=None, peak_bytes=None,
        transfer_bytes=None, why=why,
    )  # fmt: skip
