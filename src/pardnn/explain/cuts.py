"""Other cuts of a tensor, judged: it lies otherwise, and all else as it was, or cut anew.

With all else as it was, the ops keep the loops that they are cut along and fetch what they need of
the tensor from where it lies now: the partitioned graph is made, simulated, and its memory proven.
Where the graph is small, the search of `tofu` also cuts all else anew around the tensor. Beyond
`MANY_LOCAL_OPS` nothing is judged, and the report says so.
"""

from __future__ import annotations

from collections.abc import Iterator

from pardnn.errors import PardnnError
from pardnn.explain.anew import options_of
from pardnn.explain.case import Case
from pardnn.graph.ir import storage_owners
from pardnn.plan.mesh import Layout, layout_of, owned_boxes, placements
from pardnn.plan.partitioned_graph import Partition
from pardnn.planner.costs import costs_for
from pardnn.planner.problem import Problem
from pardnn.planner.sharded.complete import plan_of_sharding
from pardnn.report.explained import Alternative
from pardnn.shard.search.tofu import search
from pardnn.shard.sharding import FixedLayouts, Sharding
from pardnn.sim.peak import peaks

#: Ops of the graph x devices up to which other cuts are judged, and up to which all else is cut
#: anew: some seconds per layout.
MANY_LOCAL_OPS, FEW_LOCAL_OPS = 20_000, 2_000
#: Other layouts that are judged of a tensor: whole, and cut along each of its first dims.
MOST_DIMS = 3


def other_cuts(case: Case, tensors: list[str]) -> tuple[Alternative, ...]:
    """Judge other layouts of the first of some tensors that can be cut.

    Args:
        case: A plan that cuts every op.
        tensors: Names of the graph.
    """
    partition = case.plan.partition
    assert partition is not None
    if partition.submeshes > 1:
        why = "cuts inside of submeshes are not judged one by one"
        return (_refused("cut otherwise, or on another submesh", why, judged=False),)
    shapes = {t.name: t.shape for op in case.graph.ops for t in op.outputs}
    name = next((each for each in tensors if shapes.get(each)), None)
    if name is None:
        return ()
    local = len(case.graph.ops) * case.plan.num_devices
    if local > MANY_LOCAL_OPS:
        why = f"{len(case.graph.ops)} ops on {case.plan.num_devices} devices take too long"
        return (_refused(f"{name} cut otherwise, or whole", why, judged=False),)
    shape, axes = shapes[name] or (), len(partition.mesh.shape)
    layouts: list[Layout] = [(None,) * axes]
    layouts += [(dim,) * axes for dim in range(min(len(shape), MOST_DIMS))]
    now = layout_of(tuple(partition.sharding[name]))
    return tuple(
        found
        for layout in layouts
        if layout != now and owned_boxes(shape, layout, partition.mesh) is not None
        for found in _judged(case, partition, name, layout, anew=local <= FEW_LOCAL_OPS)
    )


def _judged(
    case: Case, partition: Partition, name: str, layout: Layout, *, anew: bool
) -> Iterator[Alternative]:
    """Yield what a layout costs.

    Args:
        case: The plan.
        partition: Of the plan.
        name: Of the tensor.
        layout: Another one.
        anew: Whether all else is cut anew, too.
    """
    words = placements(layout)
    costs = costs_for(case.graph, case.cluster, case.choice)
    problem = Problem(case.graph, case.cluster, costs, options_of(case, "tofu"))
    what = f"{name} as ({', '.join(words)})"
    if partition.loops is not None:
        layouts = _with_layout(case, partition, name, layout)
        sharding = Sharding(partition.mesh, layouts, partition.loops)
        yield _alternative(case, problem, f"{what}, all else as it is", name, sharding)
    if not anew:
        return
    limits = [size for size in problem.capacities if size is not None]
    try:
        sharding = search(
            case.graph, case.cluster, case.plan.objective, costs=costs,
            capacity=min(limits, default=None), fixed=FixedLayouts(partition.mesh, {name: layout}),
        )  # fmt: skip
    except PardnnError as error:
        yield _refused(f"{what}, all else cut anew", error.message.splitlines()[0])
        return
    yield _alternative(case, problem, f"{what}, all else cut anew", name, sharding)


def _with_layout(case: Case, partition: Partition, name: str, layout: Layout) -> dict[str, Layout]:
    """Return the layouts of a plan with another one of a tensor, and of what shares its storage.

    Args:
        case: The plan.
        partition: Of the plan.
        name: Of the tensor.
        layout: Its other layout.
    """
    owners = storage_owners(case.graph.ops)
    shapes = {t.name: t.shape for op in case.graph.ops for t in op.outputs}
    found: dict[str, Layout] = {}
    for each, words in partition.sharding.items():
        shares = owners[each] == owners[name] and shapes[each] == shapes[name]
        is_alike = shares and words == partition.sharding[name]
        known = layout if is_alike else layout_of(tuple(words))
        if known is not None:
            found[each] = known
    return found


def _alternative(
    case: Case, problem: Problem, what: str, name: str, sharding: Sharding
) -> Alternative:
    """Return what a sharding comes to.

    Args:
        case: The plan.
        problem: What it solves.
        what: It is, for people.
        name: Of the tensor that lies otherwise.
        sharding: The other cut.
    """
    try:
        found = plan_of_sharding(problem, sharding)
    except PardnnError as error:
        return _refused(what, error.message.splitlines()[0])
    made = found.plan.partition
    if made is None or tuple(made.sharding[name]) != placements(sharding.layouts[name]):
        return _refused(what, "ops that write or view it are cut along other dims")
    return Alternative(
        what=what,
        judged=True,
        fits=True,
        makespan_s=found.makespan_s,
        change_s=found.makespan_s - case.timeline.makespan,
        peak_bytes=tuple(peaks(found.graph.arrays, found.arrays).tolist()),
        transfer_bytes=found.transfer_bytes,
    )


def _refused(what: str, why: str, *, judged: bool = True) -> Alternative:
    return Alternative(
        what=what, judged=judged, fits=False, makespan_s=None, change_s=None, peak_bytes=None,
        transfer_bytes=None, why=why,
    )  # fmt: skip
