"""`pardnn.simulate` and `pardnn.check_plan`: the time and peaks of a plan, and its proof.

`plan.check` proves what needs no knowledge of operators, `planner.check_cut` that a cut plan
computes what the graph does, and here the predicted time is simulated again. Together they are the
whole proof, for plans from anywhere. Planners only call `plan.check`: they need not check again
what they have just cut.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from pardnn.cluster import Cluster
from pardnn.cost.costs import MEASURED_BEFORE, graph_costs
from pardnn.cost.presets import PRESET_NAMES
from pardnn.errors import PardnnError, UsageError
from pardnn.graph.ir import Graph
from pardnn.plan import check
from pardnn.plan.check import MAX_PROBLEMS, raise_problems
from pardnn.plan.memory import peak_bytes
from pardnn.plan.plan import Plan, plan_arrays, planned_graph
from pardnn.planner.check_cut import cut_problems, prove
from pardnn.planner.costs import choice_of, costs_for
from pardnn.report.results import SimulateResult
from pardnn.sim.engine import simulate as simulate_arrays
from pardnn.sim.machine import machine_of
from pardnn.sim.policy_peak import policy_peaks
from pardnn.sim.sharing import step_times, timeline_on

#: Of a predicted makespan: sums of floats may differ in their last bits between machines.
TOLERANCE = 1e-9


def simulate(
    graph: Graph, plan: Plan, *, policy: str = "order", costs: str | None = None
) -> SimulateResult:
    """Simulate a plan: step time, memory peaks, busy time and bytes sent.

    Args:
        graph: The graph that the plan is for.
        plan: A valid plan that names its cluster.
        policy: "order" runs the plan's own order. "fifo" and "priority" use only its placement, as
            an engine with its own scheduler does; time and peaks are then those of that engine.
        costs: As for `plan`. None takes the preset that the plan was made with, if any.

    Raises:
        MismatchError: E503, if the plan is for another graph.
        InvalidPlanError: E410, if the plan is not valid.
        UsageError: E212, if the plan names no cluster.
    """
    if policy not in ("order", "fifo", "priority"):
        raise UsageError(f"policy is {policy!r:.40}; it can be order, fifo or priority")
    if plan.cluster is None:
        raise UsageError(
            "the plan names no cluster, so its step time cannot be computed.\n"
            "Give one: --devices K, or --cluster FILE.",
            code="E212",
        )
    prove(graph, plan)  # its time may be asked for on another cluster
    whole, graph = graph, planned_graph(graph, plan)
    arrays = plan_arrays(graph, plan)
    known = costs_for(graph, plan.cluster, choice_of(plan, costs, whole, graph), whole=whole)
    machine = machine_of(known, plan.cluster)
    if policy == "order":
        timeline, period_s = step_times(plan.cluster, graph, machine, arrays)
    else:
        timeline = simulate_arrays(graph, machine, arrays, policy)  # pyright: ignore[reportArgumentType]
        period_s = None
    peaks = peak_bytes(graph, arrays)
    if policy != "order":
        peaks = policy_peaks(graph.arrays, arrays.place, plan.num_devices, timeline).tolist()
    return SimulateResult(
        policy=policy,  # pyright: ignore[reportArgumentType]
        makespan_s=timeline.makespan,
        period_s=period_s,
        peak_bytes=tuple(peaks),
        peak_along="order" if policy == "order" else "time",
        busy_s=tuple(timeline.busy(arrays.place, plan.num_devices).tolist()),
        transfer_bytes=timeline.transfer_bytes(graph),
    )


def plan_problems(graph: Graph, plan: Plan, cluster: Cluster | None = None) -> list[str]:
    """Return every rule that the plan breaks, up to `MAX_PROBLEMS`; empty if it is valid.

    Args:
        graph: The graph that the plan is for.
        plan: Any plan.
        cluster: What it has to run on; None for the plan's own.
    """
    for rule in (
        check.plan_problems(graph, plan, cluster), cut_problems(graph, plan), _time(graph, plan)
    ):  # fmt: skip
        problems = list(itertools.islice(rule, MAX_PROBLEMS))
        if problems:
            return problems
    return []


def check_plan(graph: Graph, plan: Plan, cluster: Cluster | None = None) -> None:
    """Raise unless the plan is valid for the graph.

    Args:
        graph: The graph.
        plan: Any plan.
        cluster: What it has to run on; None for the plan's own.

    Raises:
        InvalidPlanError: E410, with all problems in `details["problems"]`.
    """
    raise_problems(plan_problems(graph, plan, cluster))


def _time(graph: Graph, plan: Plan) -> Iterator[str]:
    """Compare the predicted time with a simulation; not if costs were measured, or of a CPU."""
    predicted, cluster = plan.predicted, plan.cluster
    costs = predicted and predicted.costs
    if predicted is None or costs is None or cluster is None:
        return
    names, measured = costs.split(", "), ("measured", MEASURED_BEFORE)
    if costs in measured or ("cpu" in names and set(names) <= set(PRESET_NAMES)):
        return
    planned = planned_graph(graph, plan)
    try:
        known = graph_costs(planned) if costs == "graph" else costs_for(planned, cluster, costs)
    except PardnnError as error:
        yield f"predicted.costs: {error.message}"
        return
    arrays, machine = plan_arrays(planned, plan), machine_of(known, cluster)
    found = timeline_on(cluster, planned, machine, arrays).makespan
    if abs(found - predicted.makespan_s) > TOLERANCE * found:
        stated = predicted.makespan_s
        yield f"predicted.makespan_s is {stated!r}, but it is {found!r} by {costs}"
