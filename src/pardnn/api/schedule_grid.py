"""The grid of a plan in pieces: forward, input and weight gradients of each piece in time."""

from __future__ import annotations

from pardnn.cost.costs import Costs
from pardnn.graph.ir import Graph
from pardnn.place.recipes.phases import BACKWARD, FORWARD, UPDATE, WEIGHT, phases_of
from pardnn.place.recipes.stages import Stages
from pardnn.place.recipes.units import units_of
from pardnn.plan.plan import Plan, order_rows, plan_arrays, planned_graph
from pardnn.planner.costs import partitioned_costs
from pardnn.report.grid import Slot, grid_text
from pardnn.sim.engine import simulate
from pardnn.sim.machine import machine_of

_LETTERS = {FORWARD: "F", BACKWARD: "B", WEIGHT: "W", UPDATE: "U"}


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
    phase = phases_of(graph, frozenset(plan.pieces.batch)).phase
    units = units_of(graph, cut, Stages(phase * 0, phase, 1))
    arrays = plan_arrays(cut, plan)
    machine = machine_of(partitioned_costs(graph, cut, plan.cluster, costs), plan.cluster)
    timeline = simulate(cut, machine, arrays)
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
