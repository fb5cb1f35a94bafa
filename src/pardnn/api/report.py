"""`pardnn report`: a plan as one page."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from pardnn.errors import UsageError
from pardnn.gc_pause import collector_paused
from pardnn.graph.ir import Graph
from pardnn.place.recipes.phases import phases_of
from pardnn.place.recipes.stages import Stages
from pardnn.place.recipes.units import units_of
from pardnn.plan.check import capacities, check_plan
from pardnn.plan.file import check_fingerprint
from pardnn.plan.plan import Plan, called_once, plan_arrays, planned_graph
from pardnn.plan.run_record import read_run
from pardnn.planner.check_cut import check_cut
from pardnn.planner.costs import costs_for, partitioned_costs
from pardnn.planner.recomputed import costs_again
from pardnn.report.page.contents import Report
from pardnn.report.page.report import report_of
from pardnn.report.page.simulated import Simulated
from pardnn.sim.bounds import lower_bound_seconds
from pardnn.sim.engine import simulate
from pardnn.sim.machine import machine_of, serial_seconds


@collector_paused()
def report(
    graph: Graph, plan: Plan, *, costs: str | None = None, run: str | Path | None = None
) -> Report:
    """Return the report of a plan: what was decided, what it costs, what binds.

    Args:
        graph: The graph that the plan is for.
        plan: A valid plan that names its cluster.
        costs: As for `plan`.
        run: A record of a run of this plan, of `pardnn run --record` or `parallelize(record=)`.

    Raises:
        MismatchError: E503, if the plan is for another graph, or the run of another plan.
        InvalidPlanError: E410, if it is not valid.
        FileError: E403 to E407, if the record cannot be read.
        UsageError: E212, if the plan names no cluster.
    """
    if plan.cluster is None:
        raise UsageError(
            "the plan names no cluster, so its time is not defined.\n"
            "Plan again with --devices or --cluster.",
            code="E212",
        )
    check_fingerprint(plan, graph)
    check_plan(graph, plan)
    check_cut(graph, plan)
    record = None if run is None else read_run(run, plan)
    return report_of(simulated(graph, plan, costs), record)


def simulated(graph: Graph, plan: Plan, choice: str | None = None) -> Simulated:
    """Return a plan with its simulation, and what each of its ops belongs to.

    Args:
        graph: The graph that the plan is for.
        plan: A valid plan that names its cluster.
        choice: Of costs, as for `plan`.
    """
    assert plan.cluster is not None
    whole = costs = costs_for(graph, plan.cluster, choice)
    once, placed = called_once(graph, plan), planned_graph(graph, plan)
    if not plan.keeps_bits:
        costs = partitioned_costs(graph, once, plan.cluster, costs)
    if placed is not once:
        costs = costs_again(once, costs, placed)
    arrays, machine = plan_arrays(placed, plan), machine_of(costs, plan.cluster)
    on_whole = machine_of(whole, plan.cluster)
    serial = serial_seconds(on_whole)
    bound = serial / plan.num_devices
    if plan.keeps_bits:
        usable = capacities(plan.cluster, plan.reserve)
        bound = lower_bound_seconds(graph.arrays, on_whole, usable)
    batched = frozenset(plan.pieces.batch) if plan.pieces is not None else None
    phase = phases_of(graph, batched).phase
    units = units_of(graph, placed, Stages(phase * 0, phase, 1))
    return Simulated(
        whole=graph,
        graph=placed,
        plan=plan,
        arrays=arrays,
        machine=machine,
        timeline=simulate(placed, machine, arrays),
        phase=units.phase,
        # The number behind an op of a cut graph is that of its device.
        piece=np.full_like(units.piece, -1) if plan.pieces is None else units.piece,
        lower_bound_s=bound,
        serial_s=serial,
        costs=costs.source,
    )
