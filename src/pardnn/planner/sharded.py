"""Plans that shard every op over all devices: search, partition, check, simulate."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from pardnn.cluster import Cluster
from pardnn.cost.costs import Costs
from pardnn.errors import InfeasibleError, InvalidPlanError, UsageError, shown
from pardnn.gc_pause import collector_paused
from pardnn.graph.ir import Graph
from pardnn.place.ordering.fit import fits
from pardnn.plan.mesh import Mesh, placements
from pardnn.plan.partitioned_graph import FETCH
from pardnn.plan.plan import Plan, PlanArrays, plan_arrays, planned_graph
from pardnn.planner.algorithms import SHARDED
from pardnn.planner.check_descriptions import check_descriptions
from pardnn.planner.costs import partitioned_costs, scaled_costs
from pardnn.planner.problem import Problem
from pardnn.planner.shares import SLACKS, shared_shardings
from pardnn.shard.sharding import Sharding
from pardnn.shard.spmd.comm_overlap import Overlapped, OverlapScheduler, overlapped_plan
from pardnn.shard.spmd.legalize import legalize
from pardnn.shard.spmd.partitioner import spmd_partition
from pardnn.shard.spmd.relays import relay_axes
from pardnn.sim.engine import simulate
from pardnn.sim.machine import machine_of
from pardnn.sim.peak import live_bytes, one_device_peak, peaks

#: Ops of the graph x devices up to which `auto` considers `tofu`.
AUTO_LOCAL_OPS = 200_000

#: Ops of the partitioned graph above which `tofu` simulates one plan that fits and no second.
MANY_LOCAL_OPS = 50_000

#: Ops of the graph for which a fetched region is kept for the next consumer, where keeping all
#: takes too much memory.
NEAR_OPS = 32

#: Multiples of a transfer's time that are left between its begin and its end; each is tried.
LEADS = (1.0, 2.0)

#: Times the simulated makespan of direct fetches, up to which slices cross slow links once and are
#: passed on: the simulator gives each pair of devices a link of its own, in machines groups of
#: devices share one, so that what crosses it less often is faster there.
RELAYED = 1.02

#: Bytes of traffic per device that a byte of memory is worth, tried one after the other where
#: nothing fits.
MEMORY_PRICES = (1.0, 8.0, 64.0)


class ShardedPlan(NamedTuple):
    """A sharded plan, simulated.

    Attributes:
        plan: Without metadata.
        graph: Its partitioned graph.
        costs: Of that graph.
        arrays: The plan by numbers of that graph.
        makespan_s: Simulated.
        transfer_bytes: Sent in all.
        planning_s: Wall time of search and partitioning.
    """

    plan: Plan
    graph: Graph
    costs: Costs
    arrays: PlanArrays
    makespan_s: float
    transfer_bytes: int
    planning_s: float


def can_shard(graph: Graph) -> bool:
    """Whether a graph tells what its calls are: shapes and arguments, as captured ones do."""
    return any(
        op.arguments is not None and "args" in op.arguments and not op.is_source for op in graph.ops
    )


def may_shard(graph: Graph, cluster: Cluster) -> bool:
    """Whether `auto` also considers sharding the ops of a graph."""
    local_ops = len(graph.ops) * cluster.num_devices
    return cluster.num_devices > 1 and local_ops <= AUTO_LOCAL_OPS and can_shard(graph)


def decide_sharded(
    problem: Problem, algorithm: str, *, unless_above: float | None = None
) -> ShardedPlan:
    """Search a sharding, partition the graph, and simulate the plan in its own order.

    Args:
        problem: A captured graph, and what it runs on.
        algorithm: A key of `SHARDED`.
        unless_above: Give up where an estimate of the makespan is not below this: measuring the
            local ops takes longer than planning.

    Raises:
        UsageError: E213, if the graph does not say what its calls are.
        InfeasibleError: E301, if the plan does not fit, or was given up.
        DescriptionError: E220, if a user's description is not what its operator does.
    """
    if not can_shard(problem.graph):
        raise UsageError(
            f"{algorithm} cuts ops, but the graph {shown(problem.graph.name)} does not say what "
            "they call: its ops have no `arguments`.\n"
            "Capture it: pardnn capture FILE.py:FUNCTION -o g.json.",
            code="E213",
        )
    started = time.perf_counter()
    unchecked = check_descriptions(problem.graph)
    found = fitting_plans(problem, algorithm)
    is_timed = problem.options.objective == "seconds"
    best = min(found, key=lambda s: s.makespan_s if is_timed else s.transfer_bytes)
    if unless_above is not None and best.makespan_s >= unless_above:
        raise InfeasibleError("cutting every op is slower by an estimate")
    planning = time.perf_counter() - started
    if problem.costs.source == "measured":
        best = _measured(problem, best)
    plan = replace(best.plan, notes=(*best.plan.notes, *unchecked))
    return best._replace(plan=plan, planning_s=planning)


def fitting_plans(problem: Problem, algorithm: str) -> list[ShardedPlan]:
    """Return the plans that fit, of what an algorithm finds; `tofu` looks for memory before none.

    Args:
        problem: A captured graph, and what it runs on.
        algorithm: A key of `SHARDED`.

    Raises:
        InfeasibleError: E301, of the plan that needs least, if none fits.
    """
    found: list[ShardedPlan] = []
    failures: list[InfeasibleError] = []

    def tried(sharding: Sharding) -> None:
        try:
            found.append(plan_of_sharding(problem, sharding))
        except InfeasibleError as error:
            failures.append(error)

    for sharding in _shardings(problem, algorithm):
        tried(sharding)
        if found and algorithm == "tofu" and found[0].graph.arrays.num_ops > MANY_LOCAL_OPS:
            break
    if not found and algorithm == "tofu" and any(map(_exceeded, failures)):
        for sharding in _smaller_shardings(problem):
            tried(sharding)
            if found:
                break
    if not found:
        raise min(failures, key=lambda error: _exceeded(error) or math.inf)
    return found


def _exceeded(error: InfeasibleError) -> int | None:
    """Return the peak in bytes of a plan that does not fit; None if that is not the reason."""
    return error.details.get("peak_bytes")


def _smaller_shardings(problem: Problem) -> Iterator[Sharding]:
    """Yield shardings that take less memory: by shares, then at a rising price of memory.

    The prices do not depend on the limit, so what needs no more than some limit is also found at
    that limit.
    """
    size = problem.cluster.num_devices
    for slack in SLACKS if problem.fixed is None else ():
        yield from shared_shardings(problem, slack, "bytes")
    for price in MEMORY_PRICES:
        yield SHARDED["tofu"](
            problem.graph, problem.cluster, "bytes", memory_price=price * size, fixed=problem.fixed
        )


def _shardings(problem: Problem, algorithm: str) -> Iterator[Sharding]:
    """Yield what an algorithm finds, the most promising first; the simulator decides."""
    search, graph, cluster = SHARDED[algorithm], problem.graph, problem.cluster
    fixed = problem.fixed
    if algorithm != "tofu":
        yield search(graph, fixed or cluster)
        return
    if fixed is None:
        yield from shared_shardings(problem, SLACKS[0], problem.options.objective)
    if problem.options.objective == "seconds":
        limits = [size for size in problem.capacities if size is not None]
        capacity = min(limits, default=None)
        timed = functools.partial(
            search, graph, cluster, "seconds", costs=problem.costs, fixed=fixed
        )
        yield timed(capacity=capacity)
        if capacity is not None:  # the search estimates peaks
            yield timed(capacity=0.8 * capacity)
    yield search(graph, cluster, "bytes", fixed=fixed)


@collector_paused()
def plan_of_sharding(problem: Problem, sharding: Sharding) -> ShardedPlan:
    """Complete a sharding to a plan, simulated by the costs of the graph, or an estimate of them.

    Measured costs are scaled to the local ops, others made anew for them.

    Args:
        problem: A captured graph, and as many devices as the mesh.
        sharding: What cannot be sharded as it says is left whole.

    Raises:
        InfeasibleError: E301, if the plan does not fit, or moves state that is to stay.
    """
    started = time.perf_counter()
    legal = legalize(problem.graph, sharding)
    _check_fixed(problem, legal)
    found = _completed(problem, legal)
    axes = relay_axes(problem.cluster, legal.mesh)
    if axes:
        try:
            relayed = _completed(problem, legal, axes)
        except (InfeasibleError, InvalidPlanError):  # it takes more memory, or would deadlock
            relayed = found
        if relayed.makespan_s <= RELAYED * found.makespan_s:
            found = relayed
    return found._replace(planning_s=time.perf_counter() - started)


def _completed(problem: Problem, legal: Sharding, relay_axes: int = 0) -> ShardedPlan:
    """Partition, check memory, and let transfers overlap computation.

    Args:
        problem: What is planned.
        legal: From `legalize`.
        relay_axes: See `spmd_partition`.
    """
    graph, costs = problem.graph, problem.costs
    plan, local, arrays = _within_memory(problem, legal, relay_axes)
    _check_memory(problem, local, arrays)
    if costs.source == "measured":
        chosen = scaled_costs(graph, costs, local)
    else:
        chosen = partitioned_costs(graph, local, problem.cluster, costs)
    plan, arrays, makespan, sent = _overlapped(problem, local, plan, arrays, chosen)
    return ShardedPlan(plan, local, chosen, arrays, makespan, sent, 0.0)


def _check_fixed(problem: Problem, sharding: Sharding) -> None:
    """Raise if state that stays where it is would be laid out otherwise."""
    fixed = problem.fixed
    for name, layout in fixed.layouts.items() if fixed else ():
        found = sharding.layouts[name]
        if found != layout:
            raise InfeasibleError(
                f"{shown(name)} lies cut as ({', '.join(placements(layout))}), but an op of this "
                f"step that writes or views it needs it as ({', '.join(placements(found))}): no "
                "cut that was found leaves it where it is.\nPlan this step first and keep its "
                "state for the other one.",
                details={"tensor": name},
            )


def _within_memory(
    problem: Problem, sharding: Sharding, relay_axes: int
) -> tuple[Plan, Graph, PlanArrays]:
    """Return the plan that shares as many fetches as memory allows, with its partitioned graph.

    Tried are: each region is fetched once, again where the next consumer is far, for every
    consumer, and for every consumer in turn. The first wins that fits and keeps to `memory_goals`;
    else, as for tensors held whole, the first after sharing all that fits.
    """
    graph, limits = problem.graph, problem.capacities
    plain: tuple[Plan, Graph, PlanArrays] | None = None
    number = len(graph.ops)
    is_large = number * sharding.mesh.size > MANY_LOCAL_OPS
    for reuse in (*(() if is_large else (number,)), NEAR_OPS, 0, -1):
        plan = spmd_partition(
            graph, sharding, in_turn=reuse < 0, reuse=max(reuse, 0), relay_axes=relay_axes
        )
        local = planned_graph(graph, plan)
        arrays = plan_arrays(local, plan)
        goals = memory_goals(graph, local, sharding.mesh)
        wanted = [
            g if size is None else min(g, size) for g, size in zip(goals, limits, strict=True)
        ]
        if fits(local.arrays, arrays, wanted):
            return plan, local, arrays
        if plain is None and reuse < number and (reuse < 0 or fits(local.arrays, arrays, limits)):
            plain = plan, local, arrays
    assert plain is not None
    return plain


def _measured(problem: Problem, found: ShardedPlan) -> ShardedPlan:
    """Measure the local ops, and time the transfers once more."""
    chosen = partitioned_costs(problem.graph, found.graph, problem.cluster, problem.costs)
    plan, arrays, makespan, _ = _overlapped(problem, found.graph, found.plan, found.arrays, chosen)
    return found._replace(plan=plan, costs=chosen, arrays=arrays, makespan_s=makespan)


def _overlapped(
    problem: Problem, local: Graph, plan: Plan, arrays: PlanArrays, costs: Costs
) -> tuple[Plan, PlanArrays, float, int]:
    """Return the plan with transfers beside computation, if that is faster and takes no memory.

    Its peak may exceed that of the plain plan up to `memory_goals`, if no limit forbids it.

    Args:
        problem: What was planned.
        local: The partitioned graph.
        plan: The plain plan, of that graph.
        arrays: The same by numbers.
        costs: Of the partitioned graph.

    Returns:
        The plan, the same by numbers, its simulated makespan in seconds, and the bytes it sends.
    """
    cluster = problem.cluster
    machine = machine_of(costs, cluster)
    timeline = simulate(local, machine, arrays)
    best: Overlapped | None = None
    makespan = timeline.makespan
    assert plan.partition is not None
    goals = memory_goals(problem.graph, local, plan.partition.mesh)
    share = max(int(peaks(local.arrays, arrays).max()), *goals)
    limits = [share if size is None else min(share, size) for size in problem.capacities]
    rows = np.split(arrays.order_op, arrays.order_ptr[1:-1])
    seconds = [
        costs.on(device.type, device.speed)[row].tolist()
        for device, row in zip(cluster.devices, rows, strict=True)
    ]
    scheduler = OverlapScheduler(local, arrays, seconds, cluster)
    for lead in LEADS:
        overlapped = scheduler.schedule(lead)
        if not fits(local.arrays, overlapped.arrays, limits):
            continue
        found = simulate(local, machine, overlapped.arrays).makespan
        if found < makespan:
            best, makespan = overlapped, found
    sent = timeline.transfer_bytes(local)
    if best is None:
        return plan, arrays, makespan, sent
    return overlapped_plan(local, plan, best), best.arrays, makespan, sent


def memory_goals(graph: Graph, local: Graph, mesh: Mesh) -> list[int]:
    """Return the bytes that each device should need at most.

    That is 1.15 times its fraction of the one-device peak, and twice the largest fetched region.

    Args:
        graph: The graph.
        local: Its partitioned graph.
        mesh: Over which it is sharded.
    """
    fetched = max((t.bytes for op in local.ops if op.kind == FETCH for t in op.outputs), default=0)
    peak = 1.15 * one_device_peak(graph.arrays)
    return [int(peak * fraction) + 2 * fetched for fraction in mesh.fractions()]


def _check_memory(problem: Problem, local: Graph, plan: PlanArrays) -> None:
    """Raise if a device holds more than it may, naming the op at which it holds most."""
    cluster, usable = problem.cluster, problem.capacities
    limits = np.array([np.iinfo(np.int64).max if size is None else size for size in usable])
    held = live_bytes(local.arrays, plan)
    device_of = plan.place[plan.order_op]
    over = held - limits[device_of]
    worst = int(over.argmax())
    if over[worst] <= 0:
        return
    device, op = int(device_of[worst]), local.ops[int(plan.order_op[worst])]
    limit, reserve = cluster.devices[device].memory, problem.options.reserve
    where = f" ({op.source})" if op.source else ""
    raise InfeasibleError(
        f"no plan fits. With every op cut over {cluster.num_devices} devices, device {device} "
        f"holds {int(held[worst])} bytes while {shown(op.name)}{where} runs; usable are "
        f"{usable[device]} (limit {limit}, reserve {reserve:g}).",
        details={
            "device": device,
            "op": op.name,
            "source": op.source,
            "bytes": int(held[worst]),
            "peak_bytes": int(held.max()),
            "usable_bytes": usable[device],
        },
    )
