"""A sharding completed to a plan: partitioned, within memory, with transfers beside computation."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pardnn.cost.costs import Costs
from pardnn.errors import InfeasibleError, InvalidPlanError, shown
from pardnn.gc_pause import collector_paused
from pardnn.graph.build import made_graph
from pardnn.graph.ir import Graph
from pardnn.place.ordering.fit import fits
from pardnn.plan.mesh import meets, placements
from pardnn.plan.plan import Plan, PlanArrays, plan_arrays
from pardnn.planner.costs import Progress, partitioned_costs, scaled_costs
from pardnn.planner.problem import Problem
from pardnn.planner.sharded.memory import (
    check_held,
    check_least,
    check_memory,
    goals_of,
    held_bytes,
    memory_goals,
    no_partition_fits,
)
from pardnn.planner.sharded.sharding_seconds import sharding_seconds
from pardnn.shard.sharding import Sharding
from pardnn.shard.spmd.comm_overlap import Overlapped, OverlapScheduler, overlapped_plan
from pardnn.shard.spmd.legalize import legalize
from pardnn.shard.spmd.partitioner import spmd_partition
from pardnn.shard.spmd.relays import relay_axes
from pardnn.sim.engine import simulate
from pardnn.sim.machine import machine_of
from pardnn.sim.peak import peaks

#: Ops of the partitioned graph above which `tofu` simulates one plan that fits and no second.
MANY_LOCAL_OPS = 50_000

#: Ops of the graph for which a fetched region is kept for the next consumer, where keeping all
#: takes too much memory.
NEAR_OPS = 32

#: Multiples of a transfer's time that are left between its begin and its end; each is tried.
LEADS = (1.0, 2.0)
#: Times an estimate of a cut's seconds that its plan is taken to need at least: of GPT-2's 24 cuts
#: on 4 and 8 devices, simulated seconds were 0.89 to 1.27 of the estimate.
OPTIMISM = 0.8
#: The same once a cut of the graph was simulated, times the least ratio of simulated to estimated
#: seconds so far, if that is below 1: of five models on 4, 8 and 16 devices it was 0.95 at least.
LIKENESS = 0.9
#: The part of what a cut sends that is not hidden behind computing, at least, up to so many local
#: ops, which take a few seconds: of a U-Net's cuts on 4 devices it was 0.49 for `zero-3` and 0.56
#: for `equal-chop`, where `tofu`, which sends half as much, took 1.03 times its estimate.
NOT_HIDDEN, FEW_LOCAL_OPS = 0.4, 20_000
#: Local ops that a search partitions in all; some 4,000 take a second.
MOST_WORK = 400_000
#: Times the best plan's seconds, above which relays are not tried: they leave work as it is.
RELAYING = 1.1
#: Times the seconds of a plan without overlap that it is taken to need with transfers beside
#: computation, at least: of 32 cuts of GPT-2, BERT, T5 and a mixture of experts on 4 to 16 devices
#: it was 0.76 to 1.00.
LEAST_OVERLAPPED = 0.7
#: Times the simulated makespan of direct fetches, up to which slices cross slow links once and are
#: passed on: the simulator gives each pair of devices a link of its own, in machines groups of
#: devices share one, so that what crosses it less often is faster there.
RELAYED = 1.02


class ShardedPlan(NamedTuple):
    """A sharded plan, simulated.

    Attributes:
        plan: Without metadata; where `arrays` alone has its lists, without them (`plan_of`).
        graph: Its partitioned graph.
        costs: Of that graph.
        arrays: The plan by numbers of that graph.
        makespan_s: Simulated.
        transfer_bytes: Sent in all.
        planning_s: Wall time of search and partitioning.
        estimated_s: Simulated by estimates, where costs were measured since.
    """

    plan: Plan
    graph: Graph
    costs: Costs
    arrays: PlanArrays
    makespan_s: float
    transfer_bytes: int
    planning_s: float
    estimated_s: float | None = None


@collector_paused()
def plan_of_sharding(
    problem: Problem, sharding: Sharding, *, unless_above: float | None = None
) -> ShardedPlan:
    """Complete a sharding to a plan, simulated by the costs of the graph, or an estimate of them.

    Measured costs are scaled to the local ops; others are computed for them.

    Args:
        problem: A captured graph, and as many devices as the mesh.
        sharding: Tensors that cannot be sharded this way are left whole.
        unless_above: Seconds; the plan is given up if its devices compute for as long, or if an
            estimate is much above.

    Raises:
        InfeasibleError: E301, if the plan does not fit, moves state that is to stay, or was given
            up.
    """
    started = time.perf_counter()
    _, legal = problem.kept(
        ("legal", id(sharding)), lambda: (sharding, legalize(problem.graph, sharding))
    )
    check_fixed(problem, legal)
    held, estimated_s = held_bytes(problem.graph, legal), None
    if unless_above is not None:
        check_held(problem, held)
        estimated_s = _check_estimate(problem, legal, unless_above)
        check_least(problem, legal, held)
        _count_work(problem, legal)
    reuses = _reuses(problem, legal, held)
    found, reuses = _completed(problem, legal, reuses, unless_above=unless_above)
    axes = relay_axes(problem.cluster, legal.mesh)
    if axes and (unless_above is None or found.makespan_s < RELAYING * unless_above):
        try:
            relayed, _ = _completed(problem, legal, reuses, axes)
        except (InfeasibleError, InvalidPlanError):  # it takes more memory, or would deadlock
            relayed = found
        if relayed.makespan_s <= RELAYED * found.makespan_s:
            found = relayed
    if estimated_s is not None:
        problem.log.note_ratio(found.makespan_s / estimated_s)
    return found._replace(planning_s=time.perf_counter() - started)


def _check_estimate(problem: Problem, legal: Sharding, unless_above: float) -> float | None:
    """Return the estimated seconds of a plan; None where there is no estimate.

    Raises:
        InfeasibleError: E301, if it takes too long; with the estimate among the details.
    """
    if legal.mesh.shares or problem.costs.source == "graph":  # which states whole ops' seconds
        return None
    _, found = problem.kept(
        ("seconds", id(legal)),
        lambda: (legal, sharding_seconds(problem.graph, legal, problem.cluster, problem.costs)),
    )
    estimated, known = sum(found), problem.log.least_ratio
    least = estimated * (OPTIMISM if known is None else LIKENESS * min(1.0, known))
    if len(problem.graph.ops) * legal.mesh.size <= FEW_LOCAL_OPS:
        least = min(least, found.computing + NOT_HIDDEN * found.sending)
    is_linked = math.isfinite(estimated)  # else partitioning tells which link lacks
    if found.computing >= unless_above:
        why = f"the slowest device computes for {found.computing:.4g} s"
    elif is_linked and least >= unless_above:
        why = f"it takes an estimated {estimated:.4g} s"
    else:
        return estimated if is_linked else None
    raise InfeasibleError(why, details={"estimated_s": estimated})


def _count_work(problem: Problem, legal: Sharding) -> None:
    """Raise if the search has partitioned enough."""
    log = problem.log
    log.partitioned_ops += len(problem.graph.ops) * legal.mesh.size
    if log.partitioned_ops > MOST_WORK:
        raise InfeasibleError(f"not tried: the search has already partitioned {MOST_WORK} ops")


def _reuses(problem: Problem, sharding: Sharding, held: Sequence[int]) -> tuple[int, ...]:
    """Return for how many ops to keep a fetched region, in the order to try; -1: varied in turn.

    Regions are kept for all ops only if `memory_goals` may then be met: not if what devices hold
    all the time already exceeds them.
    """
    graph, mesh, number = problem.graph, sharding.mesh, len(problem.graph.ops)
    largest = max((t.bytes for op in graph.ops for t in op.outputs), default=0)
    goals = goals_of(graph, mesh, largest)
    is_over = any(size > goal for size, goal in zip(held, goals, strict=True))
    is_large = number * mesh.size > MANY_LOCAL_OPS
    return (*(() if is_large or is_over else (number,)), NEAR_OPS, 0, -1)


def _completed(
    problem: Problem,
    legal: Sharding,
    reuses: tuple[int, ...],
    relay_axes: int = 0,
    unless_above: float | None = None,
) -> tuple[ShardedPlan, tuple[int, ...]]:
    """Partition, check memory, and let transfers overlap computation.

    Args:
        problem: What is planned.
        legal: From `legalize`.
        reuses: What to try; see `_reuses`.
        relay_axes: See `spmd_partition`.
        unless_above: See `plan_of_sharding`.

    Returns:
        The plan, and those of `reuses` that relays have to try: they take no less memory.
    """
    tried, plan, local, arrays = _within_memory(problem, legal, reuses, relay_axes, unless_above)
    _check_links(problem, local, arrays)
    check_memory(problem, local, arrays)
    chosen = _local_costs(problem, local)
    plan, arrays, makespan, sent = _overlapped(problem, local, plan, arrays, chosen)
    return ShardedPlan(plan, local, chosen, arrays, makespan, sent, 0.0), tried


def _local_costs(problem: Problem, local: Graph) -> Costs:
    """Return the costs of a partitioned graph; where the graph's are measured, scaled ones."""
    if problem.costs.is_measured:
        return scaled_costs(problem.graph, problem.costs, local)
    return partitioned_costs(problem.graph, local, problem.cluster, problem.costs)


def _check_seconds(problem: Problem, local: Graph, plan: PlanArrays, unless_above: float) -> None:
    """Raise if a device computes for so many seconds, or transfers beside that cannot save enough.

    Args:
        problem: What is planned.
        local: The partitioned graph that shares the most fetches: others send no less.
        plan: Its plain plan.
        unless_above: See `plan_of_sharding`.
    """
    costs = _local_costs(problem, local)
    is_move = np.array([op.kind.startswith("pardnn.") for op in local.ops])
    for number, device in enumerate(problem.cluster.devices):
        mine = (plan.place == number) & ~is_move
        busy = float(costs.on(device.type, device.speed)[mine].sum())
        if busy >= unless_above:
            raise InfeasibleError(f"device {number} computes for {busy:.4g} s")
    plain = simulate(local, machine_of(costs, problem.cluster), plan).makespan
    if LEAST_OVERLAPPED * plain >= unless_above:
        why = f"before transfers overlap, it takes {plain:.4g} s"
        raise InfeasibleError(why, details={"estimated_s": plain})


def check_fixed(problem: Problem, sharding: Sharding) -> None:
    """Raise if a tensor would be laid out otherwise than it lies, or than is demanded.

    Raises:
        InfeasibleError: E301.
    """
    fixed, stays = problem.fixed, problem.state is not None
    lies, first = "must be laid out", ""
    if stays:
        lies, first = "is laid out", "\nPlan this step first and keep its state for the other one."
    for name, layout in fixed.layouts.items() if fixed else ():
        found = sharding.layouts[name]
        if not meets(found, layout):
            raise InfeasibleError(
                f"{shown(name)} {lies} as ({', '.join(placements(layout))}), but an op of this "
                f"step that writes or views it needs it as ({', '.join(placements(found))}), in "
                f"every cut that was found.{first}",
                details={"tensor": name} if stays else {"tensor": name, "try": []},
            )


def _within_memory(
    problem: Problem,
    sharding: Sharding,
    reuses: tuple[int, ...],
    relay_axes: int,
    unless_above: float | None,
) -> tuple[tuple[int, ...], Plan, Graph, PlanArrays]:
    """Return the plan that shares as many fetches as memory allows, with its partitioned graph.

    Tried are: each region is fetched once, again where the next consumer is far, for every
    consumer, and for every consumer in turn. The first wins that fits and keeps to `memory_goals`;
    else, as for tensors held whole, the first after sharing all that fits: at once where what
    devices hold all the time is more than the goals. With it are those of `reuses` from the one
    that it has on; that one alone where none keeps to the goals. Beside a known plan, one that does
    not fit is returned as soon as no other one can.
    """
    graph, limits = problem.graph, problem.capacities
    plain: tuple[tuple[int, ...], Plan, Graph, PlanArrays] | None = None
    number, is_new = len(graph.ops), True
    for i, reuse in enumerate(reuses):
        plan = spmd_partition(
            graph, sharding, in_turn=reuse < 0, reuse=max(reuse, 0), relay_axes=relay_axes
        )
        assert plan.partition is not None
        local = made_graph(graph.name, plan.partition.ops)
        arrays = plan_arrays(local, plan)
        if is_new and unless_above is not None:
            _check_seconds(problem, local, arrays, unless_above)
        is_new = False
        goals = memory_goals(graph, local, sharding.mesh)
        wanted = [
            g if size is None else min(g, size) for g, size in zip(goals, limits, strict=True)
        ]
        if fits(local.arrays, arrays, wanted):
            return reuses[i:], plan, local, arrays
        is_last = reuse == reuses[-1]
        if unless_above is not None and no_partition_fits(local, arrays, limits):
            return (reuse,), plan, local, arrays
        if plain is None and reuse < number and (is_last or fits(local.arrays, arrays, limits)):
            plain = (reuse,), plan, local, arrays
        held = zip(_held(local, plan), wanted, strict=True)
        if plain is not None and any(size > goal for size, goal in held):
            break
    assert plain is not None
    return plain


def _held(local: Graph, plan: Plan) -> list[int]:
    """Return the bytes that each device holds when a step ends."""
    found = [0] * plan.num_devices
    for op in local.ops:
        if op.memory == "residual":
            found[plan.placement[op.name]] += sum(t.bytes for t in op.outputs if not t.alias_of)
    return found


def measured(problem: Problem, found: ShardedPlan, progress: Progress | None = None) -> ShardedPlan:
    """Measure the local ops, and time the transfers once more.

    Args:
        problem: What was planned.
        found: By estimated costs of the local ops.
        progress: Called with the number of ops timed and in all.
    """
    given = (problem.graph, found.graph, problem.cluster, problem.costs)
    chosen = partitioned_costs(*given, progress=progress)
    plan, arrays, makespan, _ = _overlapped(problem, found.graph, found.plan, found.arrays, chosen)
    timed = found._replace(plan=plan, costs=chosen, arrays=arrays, makespan_s=makespan)
    return timed._replace(estimated_s=found.makespan_s)


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


def _check_links(problem: Problem, local: Graph, plan: PlanArrays) -> None:
    """Raise if the plan sends over a link that the cluster does not have."""
    latency = problem.cluster.arrays.latency
    is_missing = np.isinf(latency[plan.message_source, plan.message_target])
    if not is_missing.any():
        return
    first = int(is_missing.argmax())
    source, target = int(plan.message_source[first]), int(plan.message_target[first])
    tensors = [tensor.name for op in local.ops for tensor in op.outputs]
    name = tensors[int(plan.message_tensor[first])]
    raise InfeasibleError(
        f"with every op cut over {problem.cluster.num_devices} devices, {shown(name)} goes from "
        f"device {source} to device {target}, and the cluster has no link between them.\n"
        "Algorithms that place whole ops, such as auto-whole, can do without some links.",
        details={"tensor": name, "from": source, "to": target},
    )
