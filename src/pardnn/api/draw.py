"""The pictures of a plan: what devices compute and hold, and the schedule of pieces as a grid."""

from __future__ import annotations

from pardnn.cost.costs import Costs
from pardnn.graph.ir import Graph
from pardnn.place.recipes.phases import BACKWARD, FORWARD, UPDATE, WEIGHT
from pardnn.place.recipes.units import units_of_plan
from pardnn.plan.plan import Plan, order_rows, plan_arrays, planned_graph
from pardnn.planner.recomputed import costs_of_planned
from pardnn.report.grid import Slot, grid_text
from pardnn.report.svg import Bar, Track, plan_svg
from pardnn.report.text import cluster_text, seconds_text
from pardnn.sim.machine import machine_of
from pardnn.sim.peak import memory_over_time
from pardnn.sim.sharing import timeline_on

_LETTERS = {FORWARD: "F", BACKWARD: "B", WEIGHT: "W", UPDATE: "U"}


def draw_plan(graph: Graph, plan: Plan, costs: Costs) -> str:
    """Return a plan as SVG: simulated time and order-only memory of each device.

    Args:
        graph: The graph.
        plan: A valid plan that names its cluster.
        costs: Durations of the graph's ops.
    """
    assert plan.cluster is not None
    planned = planned_graph(graph, plan)
    costs, graph = costs_of_planned(graph, plan, planned, costs), planned
    arrays = plan_arrays(graph, plan)
    timeline = timeline_on(plan.cluster, graph, machine_of(costs, plan.cluster), arrays)
    phase = phases(graph)
    tracks: list[Track] = []
    for device, row in enumerate(order_rows(arrays)):
        times, held = memory_over_time(graph.arrays, arrays, timeline, device)
        bars = [
            Bar(
                float(timeline.start[op]),
                float(timeline.finish[op]),
                phase[op],
                graph.ops[op].name,
            )
            for op in row
        ]
        target = plan.cluster.devices[device]
        tracks.append(Track(target.name, bars, times.tolist(), held.tolist(), target.memory))
    title = (
        f"{graph.name} by {plan.algorithm}: {seconds_text(timeline.makespan)} a step (simulated)"
    )
    return plan_svg(title, f"on {cluster_text(plan.cluster)}", tracks, timeline.makespan)


def phases(graph: Graph) -> list[str]:
    """Return "forward", "backward" or "update" for each op.

    A backward op knows its forward op; what depends on the backward pass and is not part of it
    updates something.
    """
    a = graph.arrays
    found = ["forward"] * a.num_ops
    for op in a.topological.tolist():
        inputs = a.tensor_op[a.input_tensor[a.input_ptr[op] : a.input_ptr[op + 1]]].tolist()
        if graph.ops[op].backward_of is not None:
            found[op] = "backward"
        elif any(found[predecessor] != "forward" for predecessor in inputs):
            found[op] = "update"
    return found


def schedule_grid(graph: Graph, plan: Plan, width: int, costs: Costs) -> list[str]:
    """Return the lines of the grid; nothing of a plan whose batch is whole.

    Args:
        graph: The graph that the plan is for.
        plan: A valid plan that names its cluster.
        width: Characters that a line may have.
        costs: Of the ops of the graph.
    """
    if plan.pieces is None or plan.cluster is None:
        return []
    cut = planned_graph(graph, plan)
    units = units_of_plan(graph, plan, cut)
    arrays = plan_arrays(cut, plan)
    machine = machine_of(costs_of_planned(graph, plan, cut, costs), plan.cluster)
    timeline = timeline_on(plan.cluster, cut, machine, arrays)
    start, finish = timeline.start.tolist(), timeline.finish.tolist()
    what, piece = units.phase.tolist(), units.piece.tolist()
    rows = [
        [
            Slot(start[op], finish[op], _LETTERS[what[op]], piece[op])
            for op in row
            if what[op] in _LETTERS
        ]
        for row in order_rows(arrays)
    ]
    return grid_text([device.name for device in plan.cluster.devices], rows, width)
