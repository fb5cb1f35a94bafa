"""Plans with second calls of ops, for steps that fit no other way or are slower when they fit."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence

import numpy as np

from pardnn.cluster import Cluster
from pardnn.cost.costs import Costs
from pardnn.errors import InfeasibleError
from pardnn.graph.ir import Graph
from pardnn.place.ordering.low_memory_orders import eager_free_positions, file_positions
from pardnn.place.ordering.memory_bounded import memory_bounded_plan
from pardnn.place.ordering.schedule import first_overwrites, free_plan
from pardnn.place.recompute.placed import recomputed_plan
from pardnn.place.recompute.search import WORK
from pardnn.plan.plan import (
    Plan,
    PlanArrays,
    on_devices,
    plan_arrays,
    plan_from_arrays,
    planned_graph,
)
from pardnn.plan.recompute import first_call
from pardnn.plan.rewritten.offload import graph_with_host
from pardnn.planner.algorithms import whole_op_algorithms
from pardnn.planner.costs import partitioned_costs
from pardnn.planner.portfolio import Decide, Outcome
from pardnn.planner.problem import Problem
from pardnn.planner.search_log import SearchLog
from pardnn.planner.sharded.complete import ShardedPlan
from pardnn.sim.engine import simulate
from pardnn.sim.machine import machine_of
from pardnn.time_limit import check_time

#: Limits, as multiples of the real ones, for which ops are placed before calls are added; None
#: for no limit.
LARGER = (1.25, 1.6, 2.5, None)
#: On several devices each of up to 15 placements and orders takes this part of the work of one
#: order on one device, so that all of them take about what two orders there do.
SHARE = 8


def decide_recomputed(problem: Problem, names: Sequence[str], decide: Decide) -> Outcome:
    """Return the faster one of a plan without second calls and one with them.

    Second calls are found for the placements of the same algorithms under larger limits and under
    none, in the order of the step, one that frees memory early, and the plan's own.

    Args:
        problem: What to plan.
        names: Algorithms to run.
        decide: Runs them on a problem, and returns the best outcome.

    Raises:
        InfeasibleError: E301, if none fits either way.
        UsageError: E225, if the state lies cut over all devices.
    """
    placing = whole_op_algorithms(names, "ops that are called again are whole", "recompute")
    started = time.perf_counter()
    best: Outcome | None = None
    failure: InfeasibleError | None = None
    try:
        best = decide(problem, names)
    except InfeasibleError as error:
        failure = error
    if best is not None and problem.cluster.num_devices == 1:
        return best  # nothing is faster than every op once
    for found in _candidates(problem, placing, decide):
        if best is None or found.makespan_s < best.makespan_s:
            best = found
            problem.log.keep(found, problem.options.objective)
    if best is None:
        assert failure is not None
        raise failure
    return best._replace(planning_s=time.perf_counter() - started)


def first_recomputed(
    problem: Problem, names: Sequence[str], decide: Decide, *, seconds: float, work: int = WORK
) -> Outcome | None:
    """Return the first plan with second calls that fits; `decide_recomputed` finds one, too.

    Args:
        problem: What to plan.
        names: Algorithms to run.
        decide: Runs them on a problem, and returns the best outcome.
        seconds: After which no further placement is tried.
        work: Of each search; less than `WORK` is a guess.
    """
    placing = whole_op_algorithms(names, "ops that are called again are whole", "recompute")
    return next(_candidates(problem, placing, decide, seconds=seconds, work=work), None)


def _candidates(
    problem: Problem,
    placing: Sequence[str],
    decide: Decide,
    *,
    seconds: float = np.inf,
    work: int = WORK,
) -> Iterator[Outcome]:
    """Yield plans with second calls that fit."""
    begin, k = time.monotonic(), problem.cluster.num_devices
    each = work if k == 1 else work // (SHARE * k)
    for placed in _placements(problem, placing, decide):
        for plan in _orders(problem, placed):
            check_time()
            if time.monotonic() - begin > seconds:
                return
            found = _with_calls(problem, placed, plan, each)
            if found is not None:
                yield found


def _placements(problem: Problem, placing: Sequence[str], decide: Decide) -> Iterator[Outcome]:
    """Yield placements that fit larger limits: second calls are to make them fit."""
    k, seen = problem.cluster.num_devices, set[bytes]()
    for factor in LARGER if k > 1 else LARGER[-1:]:
        check_time()
        devices = (
            dataclasses.replace(d, memory=d.memory and factor and int(d.memory * factor))
            for d in problem.cluster.devices
        )
        larger = dataclasses.replace(problem.cluster, devices=tuple(devices))
        try:
            log = SearchLog(within=problem.log, part="placed for a larger limit, ")
            placed = decide(dataclasses.replace(problem, cluster=larger, log=log), placing)
        except InfeasibleError:
            continue
        if placed.plan.place.tobytes() not in seen:
            seen.add(placed.plan.place.tobytes())
            yield placed


def _orders(problem: Problem, placed: Outcome) -> Iterator[PlanArrays]:
    """Yield the orders of a placement to which second calls are added."""
    graph, machine, place = problem.graph, problem.machine, placed.plan.place
    a, k, overwrites = graph.arrays, problem.cluster.num_devices, first_overwrites(graph)
    if k > 1:
        yield placed.plan
    positions = [file_positions(a), eager_free_positions(a)]
    if (positions[0] == positions[1]).all():
        positions.pop()
    for position in positions:
        if k == 1:
            yield free_plan(a, k, place, position)
        else:
            usable = problem.capacities
            yield memory_bounded_plan(a, machine, place, position, usable, overwrites)


def _with_calls(problem: Problem, placed: Outcome, arrays: PlanArrays, work: int) -> Outcome | None:
    """Return an outcome of one order with second calls; None if none fits."""
    graph, machine = problem.graph, problem.machine
    seconds = np.ascontiguousarray(machine.seconds[machine.device_class])
    plan = recomputed_plan(
        graph, plan_from_arrays(graph, arrays), seconds, problem.capacities,
        seed=problem.options.seed,
        work=work,
    )  # fmt: skip
    if plan is None:
        return None
    again = planned_graph(graph, plan)
    known, arrays = costs_again(graph, problem.costs, again), plan_arrays(again, plan)
    timeline = simulate(again, machine_of(known, problem.cluster), arrays)
    sent = timeline.transfer_bytes(again)
    count, share = len(plan.recompute or ()), _share(known, again)
    note = f"{count} ops are called a second time: {share:.2%} more seconds of computing"
    return placed._replace(
        plan=arrays, makespan_s=timeline.makespan, transfer_bytes=sent,
        sharded=ShardedPlan(
            plan=plan, graph=again, costs=known, arrays=arrays, makespan_s=timeline.makespan,
            transfer_bytes=sent, planning_s=placed.planning_s,
        ),
        notes=(*placed.notes, *((note,) if count else ())),
    )  # fmt: skip


def costs_of_planned(graph: Graph, plan: Plan, planned: Graph, costs: Costs) -> Costs:
    """Return the costs of the ops that a plan places.

    Args:
        graph: The graph that the plan is for.
        plan: A plan that names its cluster.
        planned: From `planned_graph`: in pieces, cut, or with second calls.
        costs: Of the ops of `graph`.
    """
    assert plan.cluster is not None
    there = on_devices(graph, plan)
    if not plan.keeps_bits:
        costs = partitioned_costs(graph, there, plan.cluster, costs)
    return rewritten_costs(there, costs, plan, plan.cluster, planned)


def rewritten_costs(
    graph: Graph, costs: Costs, plan: Plan, cluster: Cluster, planned: Graph
) -> Costs:
    """Return the costs of a graph with state on the host and second calls.

    Args:
        graph: Without them, see `on_devices`.
        costs: Of its ops.
        plan: Says what they are.
        cluster: Tells the device types.
        planned: With them.
    """
    if plan.offload is not None:
        there = graph_with_host(graph, plan.offload)
        costs = partitioned_costs(graph, there, cluster, costs)
        graph = there
    return costs if plan.recompute is None else costs_again(graph, costs, planned)


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
