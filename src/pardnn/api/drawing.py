"""The picture of a plan."""

from __future__ import annotations

from pardnn.cost.costs import Costs
from pardnn.graph.ir import Graph, Op, writes
from pardnn.plan.plan import Plan, order_rows, plan_arrays
from pardnn.report.svg import Bar, Track, plan_svg
from pardnn.report.text import cluster_text, seconds_text


def draw_plan(graph: Graph, plan: Plan, costs: Costs) -> str:
    """Return a plan as SVG: simulated time and order-only memory of each device.

    Args:
        graph: The graph.
        plan: A valid plan that names its cluster.
        costs: Durations of the graph's ops.
    """
    from pardnn.sim.curve import memory_curve
    from pardnn.sim.engine import simulate
    from pardnn.sim.machine import machine_of

    assert plan.cluster is not None
    arrays = plan_arrays(graph, plan)
    timeline = simulate(graph, machine_of(costs, plan.cluster), arrays)
    tracks: list[Track] = []
    for device, row in enumerate(order_rows(arrays)):
        times, held = memory_curve(graph.arrays, arrays, timeline, device)
        bars = [
            Bar(
                float(timeline.start[op]),
                float(timeline.finish[op]),
                phase_of(graph.ops[op]),
                graph.ops[op].name,
            )
            for op in row
        ]
        target = plan.cluster.devices[device]
        tracks.append(Track(target.name, bars, times.tolist(), held.tolist(), target.memory))
    title = (
        f"{graph.name} by {plan.algorithm} on {cluster_text(plan.cluster)}: "
        f"{seconds_text(timeline.makespan)} a step (simulated)"
    )
    return plan_svg(title, tracks, timeline.makespan)


def phase_of(op: Op) -> str:
    """Return "forward", "backward" or "update": a backward op knows its forward op."""
    if op.backward_of is not None:
        return "backward"
    return "update" if op.group is not None or writes(op) else "forward"
