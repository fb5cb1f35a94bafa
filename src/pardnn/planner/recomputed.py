"""Plans with second calls of ops, for steps that would otherwise not fit or be slower."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from pardnn.cluster import Cluster
from pardnn.cost.costs import Costs
from pardnn.errors import InfeasibleError
from pardnn.graph.ir import Graph
from pardnn.place.colocation import closed_arrays
from pardnn.place.infeasible import infeasible
from pardnn.place.ordering.fit import excess_bytes
from pardnn.place.ordering.least_peak import least_peak_positions
from pardnn.place.ordering.low_memory_orders import eager_free_positions, file_positions
from pardnn.place.ordering.memory_bounded import memory_bounded_plan
from pardnn.place.ordering.schedule import first_overwrites, free_plan
from pardnn.place.recompute.placed import recomputed_plan
from pardnn.place.recompute.search import WORK
from pardnn.plan.plan import (
    Plan,
    on_devices,
    plan_arrays,
    plan_from_arrays,
)
from pardnn.plan.rewritten.offload import graph_with_host
from pardnn.plan.rewritten.recompute import first_call, graph_with_calls
from pardnn.planner.algorithms import SHARDED
from pardnn.planner.costs import partitioned_costs
from pardnn.planner.outcome import Decide, Outcome, score
from pardnn.planner.problem import Problem
from pardnn.planner.search.log import SearchLog
from pardnn.planner.sharded.complete import ShardedPlan
from pardnn.sim.engine import simulate
from pardnn.sim.machine import machine_of
from pardnn.time_limit import check_time

#: Limits, as multiples of the real ones, for which ops are placed or cut before calls are added;
#: None for no limit.
LARGER = (1.25, 1.6, 2.5, None)
#: The same for cuts where several are tried: each takes as long as all placements.
LARGER_OF_MANY_CUTS = (1.6, None)
#: On several devices each of up to 15 placements and orders takes this part of the work of one
#: order on one device, so that all of them take about two thirds of what an order there does.
SHARE = 24


def decide_recomputed(problem: Problem, names: Sequence[str], decide: Decide) -> Outcome:
    """Return the faster of a plan without second calls and one with them.

    Second calls are added to what the same algorithms place, cut or both under larger limits or
    none: in the plan's own order and, for placements, also in the order of the step and in one that
    frees memory early.

    Args:
        problem: What to plan.
        names: Algorithms to run.
        decide: Runs them on a problem, and returns the best outcome.

    Raises:
        InfeasibleError: E301, if none fits either way.
    """
    started = time.perf_counter()
    best: Outcome | None = None
    failure: InfeasibleError | None = None
    try:
        best = decide(problem, names)
    except InfeasibleError as error:
        failure = error
    if best is not None and problem.cluster.num_devices == 1:
        return best  # nothing is faster than every op once
    nearest: Outcome | None = None
    least = np.inf
    for found in _candidates(problem, names, decide):
        excess = _excess_bytes(problem, found)
        if excess > 0:
            nearest, least = (found, excess) if excess < least else (nearest, least)
        elif best is None or found.makespan_s < best.makespan_s:
            best = found
            problem.log.keep(found, score(problem, found))
    if best is None:
        assert failure is not None
        raise failure if nearest is None else _none_fits(problem, nearest)
    return best._replace(planning_s=time.perf_counter() - started)


def first_recomputed(
    problem: Problem, names: Sequence[str], decide: Decide, *, seconds: float, work: int = WORK
) -> Outcome | None:
    """Return the first plan with second calls that fits; `decide_recomputed` finds one, too.

    Args:
        problem: What to plan.
        names: Algorithms to run.
        decide: Runs them on a problem, and returns the best outcome.
        seconds: Time after which no further placement is tried.
        work: Of each search; less than `WORK` gives a rough answer.
    """
    tried = _candidates(problem, names, decide, seconds=seconds, work=work)
    return next((found for found in tried if _excess_bytes(problem, found) <= 0), None)


def _candidates(
    problem: Problem,
    names: Sequence[str],
    decide: Decide,
    *,
    seconds: float = np.inf,
    work: int = WORK,
) -> Iterator[Outcome]:
    """Yield plans with second calls; those of plans that did not fit may not fit either."""
    begin, k = time.monotonic(), problem.cluster.num_devices
    each = work if k == 1 else work // (SHARE * k)
    for made in _larger(problem, names, decide):
        for base in _orders(problem, made):
            check_time()
            if time.monotonic() - begin > seconds:
                return
            yield _with_calls(problem, made, base, each)


def _larger(problem: Problem, names: Sequence[str], decide: Decide) -> Iterator[Outcome]:
    """Yield plans for larger limits, to be made to fit by second calls."""
    k, seen = problem.cluster.num_devices, set[bytes]()
    cuts = [name for name in names if name in SHARDED]
    placing = [name for name in names if name not in SHARDED]
    tries = [(placing, factor) for factor in (LARGER if k > 1 else LARGER[-1:]) if placing]
    tries += [(cuts, factor) for factor in (LARGER_OF_MANY_CUTS if cuts[1:] else LARGER) if cuts]
    for algorithms, factor in tries:
        check_time()
        devices = (
            dataclasses.replace(d, memory=d.memory and factor and int(d.memory * factor))
            for d in problem.cluster.devices
        )
        larger = dataclasses.replace(problem.cluster, devices=tuple(devices))
        try:
            log = SearchLog(within=problem.log, part="placed for a larger limit, ")
            made = decide(dataclasses.replace(problem, cluster=larger, log=log), algorithms)
        except InfeasibleError:
            continue
        key = made.plan.place.tobytes() + (made.plan.order_op.tobytes() if made.sharded else b"")
        if key not in seen:
            seen.add(key)
            yield made


class _Base(NamedTuple):
    """A plan to which second calls are added, the graph of its ops, and their costs."""

    plan: Plan
    graph: Graph
    costs: Costs


def _orders(problem: Problem, made: Outcome) -> Iterator[_Base]:
    """Yield a plan in its order, and a placement in others, too."""
    if made.sharded is not None:
        yield _Base(made.sharded.plan, made.sharded.graph, made.sharded.costs)
        return
    graph, machine, place = problem.graph, problem.machine, made.plan.place
    a, k, overwrites = graph.arrays, problem.cluster.num_devices, first_overwrites(graph)
    if k > 1:
        yield _Base(plan_from_arrays(graph, made.plan), graph, problem.costs)
    positions = [file_positions(a), eager_free_positions(a)]
    if k == 1:
        positions.append(least_peak_positions(a))
    for position in {each.tobytes(): each for each in positions}.values():
        if k == 1:
            arrays = free_plan(a, k, place, position)
        else:
            usable = problem.capacities
            arrays = memory_bounded_plan(a, machine, place, position, usable, overwrites)
        yield _Base(plan_from_arrays(graph, arrays), graph, problem.costs)


def _with_calls(problem: Problem, made: Outcome, base: _Base, work: int) -> Outcome:
    """Return an outcome of one order with second calls, within the limits if possible."""
    graph, costs = base.graph, base.costs
    machine = machine_of(costs, problem.cluster)
    seconds = np.ascontiguousarray(machine.seconds[machine.device_class])
    plan = recomputed_plan(
        graph, base.plan, seconds, problem.capacities, seed=problem.options.seed, work=work
    )
    again = graph if plan.recompute is None else graph_with_calls(graph, plan.recompute)
    known, arrays = costs_again(graph, costs, again), plan_arrays(again, plan)
    timeline = simulate(again, machine_of(known, problem.cluster), arrays)
    sent = timeline.transfer_bytes(again)
    count, share = len(plan.recompute or ()), _share(known, again)
    note = f"{count} ops are called a second time: {share:.2%} more seconds of computing"
    return made._replace(
        plan=arrays, makespan_s=timeline.makespan, transfer_bytes=sent,
        sharded=ShardedPlan(
            plan=plan, graph=again, costs=known, arrays=arrays, makespan_s=timeline.makespan,
            transfer_bytes=sent, planning_s=made.planning_s,
        ),
        notes=(*made.notes, *((note,) if count else ())),
    )  # fmt: skip


def _excess_bytes(problem: Problem, found: Outcome) -> int:
    assert found.sharded is not None
    return excess_bytes(found.sharded.graph.arrays, found.plan, problem.capacities)


def _none_fits(problem: Problem, nearest: Outcome) -> InfeasibleError:
    """Return E301 for the plan with second calls that came closest."""
    assert nearest.sharded is not None
    graph = nearest.sharded.graph
    group = closed_arrays(graph).group
    count = len(nearest.sharded.plan.recompute or ())
    how = f", with {count} op{'s' * (count > 1)} called a second time," if count else ""
    return infeasible(graph, nearest.plan, problem.capacities, group, how=how)


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
        cluster: Has the device types.
        planned: With them.
    """
    if plan.offload is not None:
        there = graph_with_host(graph, plan.offload)
        costs = partitioned_costs(graph, there, cluster, costs)
        graph = there
    return costs if plan.recompute is None else costs_again(graph, costs, planned)


def costs_again(graph: Graph, costs: Costs, again: Graph) -> Costs:
    """Return the costs of a graph with second calls: each takes as long as the first.

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
    """Return the seconds of second calls as a fraction of all others, on the first device type."""
    seconds = next(iter(costs.seconds.values()))
    is_again = np.array([first_call(op.name) != op.name for op in again.ops])
    usable = np.where(np.isfinite(seconds), seconds, 0.0)
    total = float(usable[~is_again].sum())
    return float(usable[is_again].sum()) / total if total else 0.0
