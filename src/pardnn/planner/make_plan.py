"""From an algorithm's name to a complete, checked plan and what it says of itself."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable

import numpy as np

from pardnn.cluster import Cluster
from pardnn.cost.costs import Costs
from pardnn.errors import InfeasibleError, StuckError, UsageError
from pardnn.gc_pause import collector_paused
from pardnn.graph.csr import GraphArrays
from pardnn.graph.ir import Graph
from pardnn.plan.check import capacities, check_plan
from pardnn.plan.file import stamped
from pardnn.plan.plan import Plan, Predicted, plan_from_arrays
from pardnn.planner.algorithms import (
    ALGORITHMS,
    BEST,
    algorithms_to_try,
    check_algorithm,
    is_polished,
    rivals_to_ask,
)
from pardnn.planner.portfolio import Objective, Outcome, decide, decide_best
from pardnn.planner.sharded import may_shard
from pardnn.planner.warm_up import warm_up
from pardnn.report.results import CompareRow, PlanResult
from pardnn.version import __version__

__all__ = [
    "ALGORITHMS",
    "Objective",
    "Outcome",
    "check_algorithm",
    "check_reserve",
    "communication_ratio",
    "compare",
    "decide",
    "decide_best",
    "finished",
    "make_plan",
    "warm_up",
]


def check_reserve(reserve: float) -> None:
    """Raise unless the reserve is a fraction of the memory.

    Raises:
        UsageError: E211.
    """
    if not 0 <= reserve < 1:
        raise UsageError(f"reserve is {reserve}; it is a fraction from 0 to below 1", code="E211")


def make_plan(
    graph: Graph,
    cluster: Cluster,
    costs: Costs,
    *,
    algorithm: str = "auto",
    objective: Objective = "seconds",
    reserve: float = 0.1,
    seed: int = 0,
    time_limit: float | None = None,
) -> tuple[Plan, PlanResult]:
    """Decide, complete, check.

    Args:
        graph: The graph.
        cluster: What it runs on; memory limits are hard.
        costs: Durations of the graph's ops.
        algorithm: A key of `ALGORITHMS`, or "auto" for the best of `AUTO` and `tofu`, or
            "auto-whole" for the best of `AUTO` alone.
        objective: "seconds" minimises the makespan, "bytes" the bytes sent.
        reserve: Fraction of each device's memory to leave unused.
        seed: Of the algorithm.
        time_limit: Seconds after which `auto` tries nothing more.

    Raises:
        InfeasibleError: E301, if nothing fits.
        InvalidPlanError: E410, if an algorithm broke a rule (an error of ours).
    """
    check_algorithm(algorithm)
    check_reserve(reserve)
    if objective not in ("seconds", "bytes"):
        raise UsageError(f"objective is {objective!r:.40}; it can be seconds or bytes")
    names = algorithms_to_try(algorithm, len(graph.ops))
    if algorithm == BEST and may_shard(graph, cluster):
        names = (*names, "tofu")
    improve = objective == "seconds" and is_polished(algorithm, len(graph.ops))
    limited = any(device.memory is not None for device in cluster.devices)
    started = time.perf_counter()
    warm_up(names, limited=limited, polished=improve)
    compile_s = time.perf_counter() - started
    best = decide_best(
        graph,
        cluster,
        costs,
        names=names,
        objective=objective,
        reserve=reserve,
        seed=seed,
        time_limit=time_limit,
        improve=improve,
        rivals=rivals_to_ask(algorithm, len(graph.ops)) if improve else (),
    )
    return finished(
        graph,
        cluster,
        costs,
        best,
        objective=objective,
        reserve=reserve,
        seed=seed,
        compile_s=compile_s,
    )


@collector_paused()
def finished(
    graph: Graph,
    cluster: Cluster,
    costs: Costs,
    outcome: Outcome,
    *,
    objective: Objective = "seconds",
    reserve: float = 0.0,
    seed: int = 0,
    compile_s: float = 0.0,
) -> tuple[Plan, PlanResult]:
    """Return the checked plan of an outcome, with all that it says of itself.

    Raises:
        InvalidPlanError: E410, if it breaks a rule.
    """
    result = _measure(graph, cluster, costs, outcome, reserve, compile_s)
    spread = outcome.spread
    plan = dataclasses.replace(
        plan_from_arrays(graph, outcome.plan) if spread is None else spread.plan,
        versions={"pardnn": __version__},
        cluster=cluster,
        algorithm=outcome.algorithm,
        objective=objective,
        seed=seed,
        reserve=reserve,
        predicted=Predicted(
            makespan_s=result.makespan_s,
            peak_bytes=result.peak_bytes,
            transfer_bytes=result.transfer_bytes,
        ),
        notes=result.notes,
    )
    plan = stamped(plan, graph)
    check_plan(graph, plan, cluster)
    return plan, result


def _measure(
    graph: Graph,
    cluster: Cluster,
    costs: Costs,
    outcome: Outcome,
    reserve: float,
    compile_s: float,
) -> PlanResult:
    from pardnn.sim.bounds import degree_of_parallelism, lower_bound_seconds
    from pardnn.sim.engine import simulate
    from pardnn.sim.machine import machine_of, serial_seconds
    from pardnn.sim.peak import peaks

    machine = machine_of(costs, cluster)
    serial = serial_seconds(machine)
    if outcome.spread is None:
        bound = lower_bound_seconds(graph.arrays, machine, capacities(cluster, reserve))
    else:  # a cut op may take a k-th part of its time
        bound = serial / cluster.num_devices
        graph, costs = outcome.spread.graph, outcome.spread.costs
        machine = machine_of(costs, cluster)
    timeline = simulate(graph, machine, outcome.plan)
    idle = [device for device, row in enumerate(np.diff(outcome.plan.order_ptr)) if row == 0]
    notes = [*outcome.notes, *(outcome.spread.plan.notes if outcome.spread else ())]
    notes += [f"devices without ops: {', '.join(map(str, idle))}"] if idle else []
    return PlanResult(
        algorithm=outcome.algorithm,
        num_devices=cluster.num_devices,
        makespan_s=outcome.makespan_s,
        lower_bound_s=bound,
        gap=outcome.makespan_s / bound - 1 if bound > 0 else 0.0,
        serial_s=serial if np.isfinite(serial) else None,
        peak_bytes=tuple(peaks(graph.arrays, outcome.plan).tolist()),
        capacity_bytes=tuple(capacities(cluster, reserve)),
        busy_s=tuple(timeline.busy(outcome.plan.place, cluster.num_devices).tolist()),
        transfer_bytes=outcome.transfer_bytes,
        planning_s=outcome.planning_s,
        compile_s=compile_s,
        moved_ops=outcome.moved_ops,
        dop=degree_of_parallelism(graph.arrays, machine),
        ccr=communication_ratio(graph.arrays, costs, cluster),
        costs=costs.source,
        notes=tuple(notes),
    )


def communication_ratio(arrays: GraphArrays, costs: Costs, cluster: Cluster) -> float:
    """Return total communication / total computation: every data edge over the slowest link."""
    from pardnn.sim.levels import slowest_link
    from pardnn.sim.machine import fastest_seconds, machine_of

    machine = machine_of(costs, cluster)
    latency, per_byte = slowest_link(machine)
    work = float(fastest_seconds(machine).sum())
    edges = np.diff(arrays.consumer_ptr)
    communication = float((edges * (latency + arrays.tensor_bytes * per_byte)).sum())
    return communication / work if work > 0 else 0.0


def compare(
    graph: Graph,
    cluster: Cluster,
    costs: Costs,
    *,
    names: Iterable[str],
    reserve: float = 0.1,
    seed: int = 0,
) -> tuple[CompareRow, ...]:
    """Plan with several algorithms under one judge; a failure is a row, not an error."""
    rows: list[CompareRow] = []
    for name in names:
        try:
            _, result = make_plan(graph, cluster, costs, algorithm=name, reserve=reserve, seed=seed)
        except (InfeasibleError, StuckError, UsageError) as error:
            rows.append(_compared(name, None, str(error)))
        else:
            rows.append(_compared(name, result, None))
    return tuple(rows)


def _compared(name: str, result: PlanResult | None, error: str | None) -> CompareRow:
    return CompareRow(
        algorithm=name,
        makespan_s=result and result.makespan_s,
        peak_bytes=result and result.peak_bytes,
        planning_s=result and result.planning_s,
        fits=result is not None,
        error=error,
    )
