"""Other cuts of a tensor, judged: it lies otherwise, and all else is cut anew around it.

The search of `tofu` runs with the tensor's layout fixed, the partitioned graph is made and
simulated, and its memory proven. That takes seconds where the graph is large, so beyond
`MANY_LOCAL_OPS` nothing is judged, and the report says so.
"""

from __future__ import annotations

from pardnn.errors import PardnnError
from pardnn.explain.anew import options_of
from pardnn.explain.case import Case
from pardnn.plan.mesh import Layout, layout_of, owned_boxes, placements
from pardnn.planner.costs import costs_for
from pardnn.planner.problem import Problem
from pardnn.planner.sharded import plan_of_sharding
from pardnn.report.explained import Alternative
from pardnn.shard.search.tofu import search
from pardnn.shard.sharding import FixedLayouts
from pardnn.sim.peak import peaks

#: Ops of the graph x devices up to which other cuts are judged: about a second each at this size.
MANY_LOCAL_OPS = 2_000
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
    shapes = {t.name: t.shape for op in case.graph.ops for t in op.outputs}
    name = next((each for each in tensors if shapes.get(each)), None)
    if name is None:
        return ()
    local = len(case.graph.ops) * case.plan.num_devices
    if local > MANY_LOCAL_OPS:
        why = f"{len(case.graph.ops)} ops on {case.plan.num_devices} devices: a search each"
        return (_unjudged(f"{name} cut otherwise, or whole", why),)
    shape, axes = shapes[name] or (), len(partition.mesh.shape)
    layouts: list[Layout] = [(None,) * axes]
    layouts += [(dim,) * axes for dim in range(min(len(shape), MOST_DIMS))]
    now = layout_of(tuple(partition.sharding[name]))
    return tuple(
        _judged(case, name, layout)
        for layout in layouts
        if layout != now and owned_boxes(shape, layout, partition.mesh) is not None
    )


def _judged(case: Case, name: str, layout: Layout) -> Alternative:
    partition = case.plan.partition
    assert partition is not None
    words = placements(layout)
    what = f"{name} as ({', '.join(words)}), all else cut anew"
    costs = costs_for(case.graph, case.cluster, case.choice)
    problem = Problem(case.graph, case.cluster, costs, options_of(case, "tofu"))
    limits = [size for size in problem.capacities if size is not None]
    fixed = FixedLayouts(partition.mesh, {name: layout})
    try:
        found = plan_of_sharding(
            problem,
            search(
                case.graph, case.cluster, case.plan.objective, costs=costs,
                capacity=min(limits, default=None), fixed=fixed,
            ),
        )  # fmt: skip
    except PardnnError as error:
        return _refused(what, error.message.splitlines()[0])
    made = found.plan.partition
    if made is None or tuple(made.sharding[name]) != words:
        return _refused(what, "ops that write or view it do not allow it")
    return Alternative(
        what=what,
        judged=True,
        fits=True,
        makespan_s=found.makespan_s,
        change_s=found.makespan_s - case.timeline.makespan,
        peak_bytes=tuple(peaks(found.graph.arrays, found.arrays).tolist()),
        transfer_bytes=found.transfer_bytes,
    )


def _unjudged(what: str, why: str) -> Alternative:
    return Alternative(
        what=what, judged=False, fits=False, makespan_s=None, change_s=None, peak_bytes=None,
        transfer_bytes=None, why=why,
    )  # fmt: skip


def _refused(what: str, why: str) -> Alternative:
    return Alternative(
        what=what, judged=True, fits=False, makespan_s=None, change_s=None, peak_bytes=None,
        transfer_bytes=None, why=why,
    )  # fmt: skip
