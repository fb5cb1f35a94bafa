"""What was decided, as a checked plan, and its figures."""

from __future__ import annotations

import dataclasses

import numpy as np

from pardnn.gc_pause import collector_paused
from pardnn.plan.check import check_plan
from pardnn.plan.file import stamped
from pardnn.plan.plan import Plan, Predicted
from pardnn.plan.state_in_place import check_state_kept
from pardnn.planner.costs import communication_ratio
from pardnn.planner.kept_state import kept
from pardnn.planner.outcome import Outcome, plan_of
from pardnn.planner.problem import Problem
from pardnn.report.results import PlanResult
from pardnn.sim.bounds import degree_of_parallelism, lower_bound_seconds
from pardnn.sim.engine import simulate
from pardnn.sim.machine import machine_of, serial_seconds
from pardnn.sim.peak import peaks
from pardnn.sim.policy_peak import policy_peaks
from pardnn.sim.sharing import step_times
from pardnn.version import __version__


@collector_paused()
def finished(problem: Problem, outcome: Outcome) -> tuple[Plan, PlanResult]:
    """Return the checked plan of an outcome, with its metadata, and its figures.

    Args:
        problem: What was planned.
        outcome: What an algorithm decided.

    Raises:
        InvalidPlanError: E410, if it breaks a rule.
    """
    result = _measure(problem, outcome)
    graph, options = problem.graph, problem.options
    plan = dataclasses.replace(
        plan_of(problem, outcome),
        versions={"pardnn": __version__},
        cluster=problem.cluster,
        algorithm=outcome.algorithm,
        constraints=options.constraints or None,
        objective=options.objective,
        seed=options.seed,
        reserve=options.reserve,
        predicted=Predicted(
            makespan_s=result.makespan_s,
            peak_bytes=result.peak_bytes,
            transfer_bytes=result.transfer_bytes,
            costs=result.costs,
        ),
        notes=result.notes,
        tried=tuple(problem.log.tried) if len(problem.log.tried) > 1 else (),
    )
    check_plan(graph, plan, problem.cluster)
    if problem.state is not None:
        check_state_kept(graph, plan, problem.state, problem.cluster)
    # After the check, which would compute every op's digest once more to compare the fingerprint.
    return stamped(plan, graph), result


def _measure(problem: Problem, outcome: Outcome) -> PlanResult:
    """Return the figures of an outcome: of the partitioned graph, where ops are sharded."""
    graph, cluster, costs = problem.graph, problem.cluster, problem.costs
    machine, sharded = problem.machine, outcome.sharded
    serial = serial_seconds(machine_of(costs, cluster))
    if sharded is None:
        bound = lower_bound_seconds(graph.arrays, machine, problem.capacities)
        bound = max(bound, outcome.lower_bound_s)
    else:  # a sharded op may take a k-th part of its time
        bound = serial / cluster.num_devices
        graph, costs = sharded.graph, sharded.costs
        machine = machine_of(costs, cluster)
    timeline, period_s = step_times(cluster, graph, machine, outcome.plan)
    makespan_s = timeline.makespan
    rows = zip(cluster.devices, np.diff(outcome.plan.order_ptr).tolist(), strict=True)
    idle = [device.name for device, ops in rows if not ops]
    notes = [*outcome.notes, *(sharded.plan.notes if sharded else ())]
    notes += [f"without ops: {', '.join(idle)}"] if idle else []
    stays = 0 if problem.state is None else len(kept(problem.graph, problem.state))
    notes += _policy_notes(problem, outcome)
    notes += [f"state tensors that stay where they are: {stays}"] if stays else []
    return PlanResult(
        algorithm=outcome.algorithm,
        num_devices=cluster.num_devices,
        makespan_s=makespan_s,
        period_s=period_s,
        lower_bound_s=bound,
        gap=max(0.0, makespan_s / bound - 1) if bound > 0 else 0.0,  # both are rounded
        serial_s=serial if np.isfinite(serial) else None,
        peak_bytes=tuple(peaks(graph.arrays, outcome.plan).tolist()),
        capacity_bytes=tuple(problem.capacities),
        busy_s=tuple(timeline.busy(outcome.plan.place, cluster.num_devices).tolist()),
        transfer_bytes=outcome.transfer_bytes,
        planning_s=outcome.planning_s,
        measuring_s=problem.log.measuring_s,
        moved_ops=outcome.moved_ops,
        dop=degree_of_parallelism(graph.arrays, machine),
        ccr=communication_ratio(graph.arrays, costs, cluster),
        costs=costs.source,
        notes=tuple(notes),
    )


def _policy_notes(problem: Problem, outcome: Outcome) -> list[str]:
    """Return what the plan does under the engine's own scheduler."""
    policy, place = problem.options.policy, outcome.plan.place
    if policy == "order":
        return []
    a, k = problem.graph.arrays, problem.cluster.num_devices
    timeline = simulate(problem.graph, problem.machine, outcome.plan, policy)
    peaks = ", ".join(map(str, policy_peaks(a, place, k, timeline).tolist()))
    return [f"under {policy}: {timeline.makespan:.6g} s, simulated peaks {peaks} bytes"]
