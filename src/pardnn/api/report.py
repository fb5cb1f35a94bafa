"""`pardnn report` and `pardnn export`: a plan as one page, and for other tools."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from pardnn.errors import UsageError
from pardnn.gc_pause import collector_paused
from pardnn.graph.ir import Graph
from pardnn.place.ordering.schedule import first_overwrites
from pardnn.place.recipes.pipeline import CutStep, rows_of_plan
from pardnn.place.recipes.schedules import SCHEDULES, Rows, rows_csv
from pardnn.place.recipes.units import units_of_plan
from pardnn.plan.check import capacities
from pardnn.plan.plan import Plan, order_rows, plan_arrays, planned_graph
from pardnn.plan.run_record import read_run
from pardnn.planner.algorithms import mixed_parts
from pardnn.planner.check_cut import proven_cluster
from pardnn.planner.costs import choice_of, costs_for
from pardnn.planner.recomputed import costs_of_planned
from pardnn.planner.submesh.read_back import machine_of_columns, on_submeshes_of, orders_of
from pardnn.report.export.drawing import dot_text, drawing_of, mermaid_text
from pardnn.report.export.model_explorer import model_explorer_json
from pardnn.report.export.trace import trace_json
from pardnn.report.page.contents import Report
from pardnn.report.page.report import report_of
from pardnn.report.page.simulated import Simulated
from pardnn.sim.bounds import lower_bound_seconds
from pardnn.sim.machine import fastest_seconds, machine_of, serial_seconds
from pardnn.sim.sharing import timeline_on

#: Formats that show times; a run can stand beside the plan in them.
TRACES = ("chrome", "perfetto")
_WRITERS: Mapping[str, Callable[[Simulated], bytes]] = {
    "dot": lambda found: dot_text(drawing_of(found)).encode(),
    "mermaid": lambda found: mermaid_text(drawing_of(found)).encode(),
    "model-explorer": model_explorer_json,
    "pp-csv": lambda found: rows_csv(_pipeline(found)).encode(),
}
FORMATS = (*TRACES, *_WRITERS)


@collector_paused()
def report(
    graph: Graph, plan: Plan, *, costs: str | None = None, run: str | Path | None = None
) -> Report:
    """Return the report of a plan: what was decided, what it costs, and what limits it.

    Args:
        graph: The graph that the plan is for.
        plan: A valid plan that names its cluster.
        costs: As for `plan`; None for the preset that the plan was made with, if it was one.
        run: A record of a run of this plan, of `pardnn run --record` or `parallelize(record=)`.

    Raises:
        MismatchError: E503, if the plan is for another graph, or the run of another plan.
        InvalidPlanError: E410, if it is not valid.
        FileError: E403 to E407, if the record cannot be read.
        UsageError: E212, if the plan names no cluster.
    """
    found = timed(graph, plan, costs)
    return report_of(found, None if run is None else read_run(run, plan))


@collector_paused()
def export(
    graph: Graph,
    plan: Plan,
    to: str,
    *,
    run: str | Path | None = None,
    costs: str | None = None,
) -> bytes:
    """Return a plan in the format of another tool.

    Args:
        graph: The graph that the plan is for.
        plan: A valid plan that names its cluster.
        to: One of `FORMATS`.
        run: A record of a run of this plan; a trace shows its times next to the predicted ones.
        costs: As for `plan`; None for the preset that the plan was made with, if it was one.

    Raises:
        UsageError: E212, if the plan names no cluster; E243, if there is no such format, or it
            shows no run; E244, if the plan is not a pipeline, as `pp-csv` needs.
        MismatchError: E503, if the plan is for another graph, or the run of another plan.
        InvalidPlanError: E410, if it is not valid.
        FileError: E403 to E407, if the record cannot be read.
    """
    if to == "memory-viz":
        raise UsageError(
            "torch's memory_viz page reads only pickles, which can run code: none is written.\n"
            "--to perfetto and `pardnn report` show each device's memory over time.",
            code="E243",
        )
    if to not in FORMATS:
        raise UsageError(f"no format {to!r:.40}: export writes {', '.join(FORMATS)}", code="E243")
    if run is not None and to not in TRACES:
        raise UsageError(
            f"{to} shows no times, so it cannot show a run.\nUse --to {' or '.join(TRACES)}, or "
            "leave out --run.",
            code="E243",
        )
    found = timed(graph, plan, costs)
    if to in TRACES:
        return trace_json(found, None if run is None else read_run(run, plan))
    return _WRITERS[to](found)


def timed(graph: Graph, plan: Plan, costs: str | None = None) -> Simulated:
    """Return a plan with its simulation, once it is proven.

    Args:
        graph: The graph that the plan is for.
        plan: What may be invalid, or of another graph.
        costs: As for `plan`; None for the preset that the plan was made with, if it was one.

    Raises:
        PardnnError: As `proven_cluster`.
    """
    proven_cluster(graph, plan)
    return simulated(graph, plan, costs)


def _pipeline(found: Simulated) -> Rows:
    """Return what each device of a pipeline does.

    Raises:
        UsageError: E244, if the plan is not a pipeline.
    """
    plan = found.plan
    pair = mixed_parts(plan.algorithm or "")
    name = pair[1] if pair else plan.algorithm or "hand"
    is_mixed = plan.partition is not None and plan.partition.submeshes > 1
    rows = None
    if name in SCHEDULES and is_mixed == (pair is not None):
        rows = _rows_of_submeshes(found, name) if is_mixed else rows_of_plan(
            _cut_step(found, found.graph), found.machine, found.arrays.place,
            order_rows(found.arrays), name,
        )  # fmt: skip
    if rows is None:
        why = (
            "was changed, or made with other --costs"
            if name in SCHEDULES
            else ("is not a pipeline")
        )
        raise UsageError(
            f"the plan by {plan.algorithm or name:.40} {why}, so it has no schedule of stages.\n"
            f"Make one: pardnn plan --microbatches N --algorithm {'|'.join(SCHEDULES)}.",
            code="E244",
        )
    return rows


def _rows_of_submeshes(found: Simulated, name: str) -> Rows | None:
    """Return what each submesh of a mixed plan does: its devices all do the same."""
    read = on_submeshes_of(
        found.whole, found.plan, found.graph, first_overwrites(found.graph), found.arrays.place
    )
    cluster = found.plan.cluster
    assert cluster is not None
    machine = machine_of_columns(read, cluster, found.machine)
    orders = orders_of(read, found.timeline.dispatch)
    return rows_of_plan(_cut_step(found, read.graph), machine, read.row, orders, name)


def _cut_step(found: Simulated, cut: Graph) -> CutStep:
    """Return a planned step beside the whole one; `cut` is the graph of its pieces."""
    pieces = found.plan.pieces
    batched = frozenset[str]() if pieces is None else frozenset(pieces.batch)
    count = 1 if pieces is None else len(pieces.points) - 1
    return CutStep(found.whole, found.whole_seconds, cut, batched, count)


def simulated(graph: Graph, plan: Plan, choice: str | None = None) -> Simulated:
    """Return a plan with its simulation, and what each of its ops belongs to.

    Args:
        graph: The graph that the plan is for.
        plan: A valid plan that names its cluster.
        choice: Of costs, as for `report`.
    """
    assert plan.cluster is not None
    placed = planned_graph(graph, plan)
    whole = costs_for(graph, plan.cluster, choice_of(plan, choice, graph, placed))
    costs = costs_of_planned(graph, plan, placed, whole)
    arrays, machine = plan_arrays(placed, plan), machine_of(costs, plan.cluster)
    on_whole = machine_of(whole, plan.cluster)
    serial = serial_seconds(on_whole)
    bound = serial / plan.num_devices
    if plan.keeps_bits:
        usable = capacities(plan.cluster, plan.reserve)
        bound = lower_bound_seconds(graph.arrays, on_whole, usable)
    units = units_of_plan(graph, plan, placed)
    return Simulated(
        whole=graph,
        graph=placed,
        plan=plan,
        arrays=arrays,
        machine=machine,
        timeline=timeline_on(plan.cluster, placed, machine, arrays),
        phase=units.phase,
        piece=units.piece,
        lower_bound_s=bound,
        serial_s=serial,
        whole_seconds=fastest_seconds(on_whole),
        costs=costs.source,
    )
