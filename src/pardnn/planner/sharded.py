"""Plans that cut every op over all devices: search, spread, check, judge."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from pardnn.cluster import Cluster
from pardnn.cost.costs import Costs
from pardnn.errors import InfeasibleError, InvalidPlanError, UsageError, shown
from pardnn.gc_pause import collector_paused
from pardnn.graph.ir import Graph
from pardnn.plan.check import capacities
from pardnn.plan.partitioned_graph import FETCH
from pardnn.plan.plan import Plan, PlanArrays, plan_arrays, planned_graph
from pardnn.planner.algorithms import SHARDED
from pardnn.planner.costs import part_costs, scaled_costs
from pardnn.shard.sharding import Sharding

#: Ops of the graph x devices up to which `auto` considers `tofu`.
AUTO_PARTS = 200_000

#: Parts above which `tofu` judges one plan that fits and no second.
MANY_PARTS = 50_000

#: Ops of the graph for which a fetched region is kept for the next reader, where all are too many.
NEAR_OPS = 32

#: Parts of a transfer's time that are left between its begin and its end; each is tried.
LEADS = (1.0, 2.0)


class Spread(NamedTuple):
    """A sharded plan, judged.

    Attributes:
        plan: Without metadata.
        graph: Its partitioned graph.
        costs: Of that graph.
        arrays: The plan by numbers of that graph.
        makespan_s: Simulated.
        transfer_bytes: Sent in all.
        planning_s: Search and spreading.
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
    """Whether `auto` also considers cutting the ops of a graph."""
    parts = len(graph.ops) * cluster.num_devices
    return cluster.num_devices > 1 and parts <= AUTO_PARTS and can_shard(graph)


def decide_sharded(
    graph: Graph,
    cluster: Cluster,
    costs: Costs,
    *,
    algorithm: str,
    objective: str,
    reserve: float,
    unless_above: float | None = None,
) -> Spread:
    """Search a sharding, spread it, and judge the plan in its own order.

    Args:
        graph: A captured graph.
        cluster: What it runs on.
        costs: Of the graph.
        algorithm: A key of `SHARDED`.
        objective: "seconds" or "bytes".
        reserve: Fraction of each device's memory to leave unused.
        unless_above: Give up where an estimate of the makespan is not below this: measuring the
            parts takes longer than planning.

    Raises:
        UsageError: E213, if the graph does not say what its calls are.
        InfeasibleError: E301, if the plan does not fit, or was given up.
    """
    if not can_shard(graph):
        raise UsageError(
            f"{algorithm} cuts ops, but the graph {shown(graph.name)} does not say what they call: "
            "its ops have no `arguments`.\nCapture it: pardnn capture FILE.py:FUNCTION -o g.json.",
            code="E213",
        )
    started = time.perf_counter()
    found: list[Spread] = []
    failure: InfeasibleError | None = None
    for sharding in _shardings(graph, cluster, costs, algorithm, objective, reserve):
        try:
            found.append(spread_sharding(graph, cluster, costs, sharding, reserve=reserve))
        except InfeasibleError as error:
            failure = failure or error
        if found and algorithm == "tofu" and found[0].graph.arrays.num_ops > MANY_PARTS:
            break
    if not found:
        assert failure is not None
        raise failure
    is_timed = objective == "seconds"
    best = min(found, key=lambda s: s.makespan_s if is_timed else s.transfer_bytes)
    if unless_above is not None and best.makespan_s >= unless_above:
        raise InfeasibleError("cutting every op is slower by an estimate")
    planning = time.perf_counter() - started
    if costs.source == "measured":
        best = _measured(graph, cluster, costs, best, reserve)
    return best._replace(planning_s=planning)


def _shardings(
    graph: Graph, cluster: Cluster, costs: Costs, algorithm: str, objective: str, reserve: float
) -> Iterator[Sharding]:
    """Yield what an algorithm finds, the most promising first; the judge decides."""
    module, function = SHARDED[algorithm]
    search: Callable[..., Sharding] = getattr(importlib.import_module(module), function)
    if algorithm != "tofu":
        yield search(graph, cluster)
        return
    usable = [size for size in capacities(cluster, reserve) if size is not None]
    if objective == "seconds":
        capacity = min(usable, default=None)
        yield search(graph, cluster, "seconds", costs=costs, capacity=capacity)
        if capacity is not None:  # the search estimates peaks
            yield search(graph, cluster, "seconds", costs=costs, capacity=0.8 * capacity)
    yield search(graph, cluster, "bytes")


@collector_paused()
def spread_sharding(
    graph: Graph, cluster: Cluster, costs: Costs, sharding: Sharding, *, reserve: float = 0.0
) -> Spread:
    """Complete a sharding to a plan judged by the costs of the graph, or an estimate of them.

    Args:
        graph: A captured graph.
        cluster: As many devices as the mesh.
        costs: Of the graph. Measured ones are scaled to the parts, others made anew for them.
        sharding: What cannot be cut as it says is left whole.
        reserve: Fraction of each device's memory to leave unused.

    Raises:
        InfeasibleError: E301, if the plan does not fit.
    """
    from pardnn.shard.spmd.legalize import legalize

    started = time.perf_counter()
    usable = capacities(cluster, reserve)
    plan, parts, arrays = _frugal(graph, legalize(graph, sharding), usable)
    _check_memory(parts, arrays, cluster, reserve)
    is_measured = costs.source == "measured"
    chosen = scaled_costs(graph, costs, parts) if is_measured else part_costs(parts, cluster, costs)
    plan, arrays, makespan, sent = timed(graph, parts, plan, arrays, chosen, cluster, reserve)
    return Spread(
        plan=plan,
        graph=parts,
        costs=chosen,
        arrays=arrays,
        makespan_s=makespan,
        transfer_bytes=sent,
        planning_s=time.perf_counter() - started,
    )


def _frugal(
    graph: Graph, sharding: Sharding, usable: Sequence[int | None]
) -> tuple[Plan, Graph, PlanArrays]:
    """Return the plan that shares as many fetches as memory allows.

    Tried are: each region is fetched once, again where the next reader is far, for every reader,
    and for every reader in turn. The first wins that fits and keeps to `memory_goal`; else, as for
    tensors held whole, the first after sharing all that fits.
    """
    from pardnn.shard.spmd.partitioner import spmd_partition
    from pardnn.sim.peak import peaks

    plain: tuple[Plan, Graph, PlanArrays] | None = None
    number = len(graph.ops)
    is_large = number * sharding.mesh.size > MANY_PARTS
    for reuse in (*(() if is_large else (number,)), NEAR_OPS, 0, -1):
        plan = spmd_partition(graph, sharding, in_turn=reuse < 0, reuse=max(reuse, 0))
        parts = planned_graph(graph, plan)
        arrays = plan_arrays(parts, plan)
        held = peaks(parts.arrays, arrays).tolist()
        fits = all(size is None or size >= peak for size, peak in zip(usable, held, strict=True))
        if fits and max(held) <= memory_goal(graph, parts, plan.num_devices):
            return plan, parts, arrays
        if plain is None and reuse < number and (fits or reuse < 0):
            plain = plan, parts, arrays
    assert plain is not None
    return plain


def _measured(
    graph: Graph, cluster: Cluster, costs: Costs, found: Spread, reserve: float
) -> Spread:
    """Measure the parts, and time the transfers once more."""
    chosen = part_costs(found.graph, cluster, costs)
    plan, arrays, makespan, _ = timed(
        graph, found.graph, found.plan, found.arrays, chosen, cluster, reserve
    )
    return found._replace(plan=plan, costs=chosen, arrays=arrays, makespan_s=makespan)


def timed(
    graph: Graph,
    parts: Graph,
    plan: Plan,
    arrays: PlanArrays,
    costs: Costs,
    cluster: Cluster,
    reserve: float,
) -> tuple[Plan, PlanArrays, float, int]:
    """Return the plan with transfers beside computation, if that is faster and takes no memory.

    Its peak may exceed that of the plain plan up to 1.15 times an equal share of the one-device
    peak and twice the largest fetched region, if no limit forbids it.

    Returns:
        The plan, the same by numbers, its simulated makespan in seconds, and the bytes it sends.
    """
    from pardnn.shard.spmd.comm_overlap import Overlapped, OverlapScheduler, overlapped_plan
    from pardnn.sim.engine import simulate
    from pardnn.sim.machine import machine_of
    from pardnn.sim.peak import peaks

    machine = machine_of(costs, cluster)
    timeline = simulate(parts, machine, arrays)
    best: Overlapped | None = None
    makespan = timeline.makespan
    share = max(peaks(parts.arrays, arrays).max(), memory_goal(graph, parts, plan.num_devices))
    limits = [
        share if usable is None else min(share, usable) for usable in capacities(cluster, reserve)
    ]
    rows = np.split(arrays.order_op, arrays.order_ptr[1:-1])
    seconds = [
        costs.on(device.type, device.speed)[row].tolist()
        for device, row in zip(cluster.devices, rows, strict=True)
    ]
    scheduler = OverlapScheduler(parts, arrays, seconds, cluster)
    for lead in LEADS:
        moved = scheduler.moved(lead)
        if (peaks(parts.arrays, moved.arrays) > limits).any():
            continue
        try:
            found = simulate(parts, machine, moved.arrays).makespan
        except InvalidPlanError:  # pieces that are received in turn may come to wait in a circle
            continue
        if found < makespan:
            best, makespan = moved, found
    sent = timeline.transfer_bytes(parts)
    if best is None:
        return plan, arrays, makespan, sent
    return overlapped_plan(parts, plan, best), best.arrays, makespan, sent


def memory_goal(graph: Graph, parts: Graph, num_devices: int) -> int:
    """Return the bytes that each device should need: 1.15 times its share, and two regions."""
    from pardnn.sim.peak import one_device_peak

    fetched = (t.bytes for op in parts.ops if op.kind == FETCH for t in op.outputs)
    share = 1.15 * one_device_peak(graph.arrays) / num_devices
    return int(share) + 2 * max(fetched, default=0)


def _check_memory(parts: Graph, plan: PlanArrays, cluster: Cluster, reserve: float) -> None:
    from pardnn.sim.peak import held_bytes

    usable = capacities(cluster, reserve)
    limits = np.array([np.iinfo(np.int64).max if size is None else size for size in usable])
    held = held_bytes(parts.arrays, plan)
    device_of = plan.place[plan.order_op]
    over = held - limits[device_of]
    worst = int(over.argmax())
    if over[worst] <= 0:
        return
    device, op = int(device_of[worst]), parts.ops[int(plan.order_op[worst])]
    where = f" ({op.source})" if op.source else ""
    raise InfeasibleError(
        f"no plan fits. With every op cut over {cluster.num_devices} devices, device {device} "
        f"holds {int(held[worst])} bytes while {shown(op.name)}{where} runs; usable are "
        f"{usable[device]} (limit {cluster.devices[device].memory}, reserve {reserve:g}).",
        details={
            "device": device,
            "op": op.name,
            "source": op.source,
            "bytes": int(held[worst]),
            "usable_bytes": usable[device],
        },
    )
