"""`pardnn.simulate`."""

from __future__ import annotations

from pardnn.errors import UsageError
from pardnn.graph.ir import Graph
from pardnn.plan.file import check_fingerprint
from pardnn.plan.memory import peak_bytes
from pardnn.plan.plan import Plan, plan_arrays, planned_graph
from pardnn.planner.check_plan import check_plan
from pardnn.planner.costs import costs_for
from pardnn.report.results import SimulateResult
from pardnn.sim.engine import simulate as simulate_arrays
from pardnn.sim.machine import machine_of
from pardnn.sim.period import period
from pardnn.sim.policy_peak import policy_peaks


def simulate(
    graph: Graph, plan: Plan, *, policy: str = "order", costs: str | None = None
) -> SimulateResult:
    """Simulate a plan.

    Args:
        graph: The graph that it is for.
        plan: A valid plan that names its cluster.
        policy: "order" runs the plan's own lists; "fifo" and "priority" use only its placement, as
            an engine with its own scheduler does: time and peaks are then those of its run.
        costs: As for `plan`.

    Raises:
        MismatchError: E503, if the plan is for another graph.
        InvalidPlanError: E410, if it is not valid.
        UsageError: E212, if the plan names no cluster.
    """
    if policy not in ("order", "fifo", "priority"):
        raise UsageError(f"policy is {policy!r:.40}; it can be order, fifo or priority")
    if plan.cluster is None:
        raise UsageError(
            "the plan names no cluster, so its time is not defined.\n"
            "Give one: --devices K, or --cluster FILE.",
            code="E212",
        )
    check_fingerprint(plan, graph)
    check_plan(graph, plan)
    graph = planned_graph(graph, plan)
    arrays = plan_arrays(graph, plan)
    machine = machine_of(costs_for(graph, plan.cluster, costs), plan.cluster)
    timeline = simulate_arrays(graph, machine, arrays, policy)  # pyright: ignore[reportArgumentType]
    peaks = peak_bytes(graph, arrays)
    if policy != "order":
        peaks = policy_peaks(graph.arrays, arrays.place, plan.num_devices, timeline).tolist()
    return SimulateResult(
        policy=policy,  # pyright: ignore[reportArgumentType]
        makespan_s=timeline.makespan,
        period_s=period(graph.arrays, machine, arrays).seconds if policy == "order" else None,
        peak_bytes=tuple(peaks),
        peak_along="order" if policy == "order" else "time",
        busy_s=tuple(timeline.busy(arrays.place, plan.num_devices).tolist()),
        transfer_bytes=timeline.transfer_bytes(graph),
    )
