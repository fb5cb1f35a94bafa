"""Plans with second calls of ops, for steps that fit no other way or are slower when they fit."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from pardnn.cost.costs import Costs
from pardnn.errors import InfeasibleError, UsageError
from pardnn.graph.ir import Graph
from pardnn.place.ordering.low_memory_orders import eager_free_positions, file_positions
from pardnn.place.ordering.schedule import free_plan
from pardnn.place.recompute.placed import recomputed_plan
from pardnn.plan.plan import Plan, PlanArrays, plan_arrays, plan_from_arrays, planned_graph
from pardnn.plan.recompute import first_call
from pardnn.planner.algorithms import SHARDED
from pardnn.planner.portfolio import Outcome
from pardnn.planner.problem import Problem
from pardnn.planner.sharded import ShardedPlan
from pardnn.sim.engine import simulate
from pardnn.sim.machine import machine_of

Decide = Callable[[Problem, Sequence[str]], Outcome]


def decide_recomputed(problem: Problem, names: Sequence[str], decide: Decide) -> Outcome:
    """Return the faster one of a plan without second calls and one with them.

    Second calls are found for the placements of the same algorithms without limits, in the order of
    the step, one that frees memory early, and the plan's own.

    Args:
        problem: What to plan.
        names: Algorithms to run.
        decide: Runs them on a problem, and returns the best outcome.

    Raises:
        InfeasibleError: E301, if none fits either way.
        UsageError: E225, if the state lies cut over all devices.
    """
    placing = [name for name in names if name not in SHARDED]
    if not placing:
        raise UsageError(
            "the state lies cut over all devices, and ops that are called again are whole: no such "
            "plan leaves it where it is.\nPlan without recompute.",
            code="E225",
        )
    started = time.perf_counter()
    best: Outcome | None = None
    failure: InfeasibleError | None = None
    try:
        best = decide(problem, names)
    except InfeasibleError as error:
        failure = error
    if best is not None and problem.cluster.num_devices == 1:
        return best  # nothing is faster than every op once
    free = dataclasses.replace(
        problem.cluster,
        devices=tuple(dataclasses.replace(d, memory=None) for d in problem.cluster.devices),
    )
    placed = decide(dataclasses.replace(problem, cluster=free), placing)
    for plan in _orders(problem, placed):
        found = _with_calls(problem, placed, plan)
        if found is not None and (best is None or found.makespan_s < best.makespan_s):
            best = found
    if best is None:
        assert failure is not None
        raise failure
    return best._replace(planning_s=time.perf_counter() - started)


def _orders(problem: Problem, placed: Outcome) -> Iterator[PlanArrays]:
    a, k = problem.graph.arrays, problem.cluster.num_devices
    for positions in (file_positions(a), eager_free_positions(a)):
        yield free_plan(a, k, placed.plan.place, positions)
    if k > 1:
        yield placed.plan


def _with_calls(problem: Problem, placed: Outcome, arrays: PlanArrays) -> Outcome | None:
    """Return an outcome of one order with second calls; None if none fits."""
    graph, machine, cluster = problem.graph, problem.machine, problem.cluster
    seconds = np.ascontiguousarray(machine.seconds[machine.device_class])
    plan = recomputed_plan(
        graph, plan_from_arrays(graph, arrays), seconds, problem.capacities,
        seed=problem.options.seed,
    )  # fmt: skip
    if plan is None:
        return None
    return judged(graph, plan, problem.costs, placed, cluster_machine=lambda c: machine_of(c, cluster))


def judged(
    graph: Graph,
    plan: Plan,
    costs: Costs,
    placed: Outcome,
    *,
    cluster_machine: Callable[[Costs], object],
) -> Outcome:
    """Return a plan with second calls, simulated.

    Args:
        graph: Without the calls.
        plan: For it.
        costs: Of its ops.
        placed: The outcome that it is made from.
        cluster_machine: What costs mean on the cluster.
    """
    again = planned_graph(graph, plan)
    known = costs_again(graph, costs, again)
    arrays = plan_arrays(again, plan)
    timeline = simulate(again, cluster_machine(known), arrays)
    sent = timeline.transfer_bytes(again)
    calls = plan.recompute or ()
    share = _share(known, again)
    notes = (f"{len(calls)} ops are called again, {share:.2%} of the step's seconds",) if calls else ()
    return placed._replace(
        plan=arrays, makespan_s=timeline.makespan, transfer_bytes=sent,
        sharded=ShardedPlan(
            plan=plan, graph=again, costs=known, arrays=arrays, makespan_s=timeline.makespan,
            transfer_bytes=sent, planning_s=placed.planning_s,
        ),
        notes=(*placed.notes, *notes),
    )  # fmt: skip


def costs_again(graph: Graph, costs: Costs, again: Graph) -> Costs:
    """Return the costs of a graph with second calls: each takes what the first one does.

    Args:
        graph: Without them.
        costs: Of its ops.
        again: With them.
    """
    number = {op.name: i for i, op in enumerate(graph.ops)}
    rows = [number.get(op.name, number.get(first_call(op.name), -1)) for op in again.ops]
    return Costs(
        seconds={kind: values[rows] for kind, values in costs.seconds.items()}, source=costs.source
    )


def _share(costs: Costs, again: Graph) -> float:
    """Return the seconds of second calls as a part of all others, on the first device type."""
    seconds = next(iter(costs.seconds.values()))
    is_again = np.array([first_call(op.name) != op.name for op in again.ops])
    usable = np.where(np.isfinite(seconds), seconds, 0.0)
    total = float(usable[~is_again].sum())
    return float(usable[is_again].sum()) / total if total else 0.0
