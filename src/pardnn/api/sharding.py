"""Plans that cut every op over all devices: search, spread, check, judge."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from pardnn.api.algorithms import SHARDED
from pardnn.api.costing import part_costs, scaled_costs
from pardnn.cluster import Cluster
from pardnn.cost.costs import Costs
from pardnn.errors import InfeasibleError, UsageError, shown
from pardnn.graph.ir import Graph
from pardnn.plan.check import capacities
from pardnn.plan.partition import planned_graph
from pardnn.plan.plan import Plan, PlanArrays, plan_arrays
from pardnn.shard.sharding import Sharding

#: Ops of the graph x devices up to which `auto` considers `tofu`.
AUTO_PARTS = 200_000


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
    module, function = SHARDED[algorithm]
    search: Callable[..., Sharding] = getattr(importlib.import_module(module), function)
    started = time.perf_counter()
    sharding = search(graph, cluster, "bytes")
    return spread_sharding(
        graph,
        cluster,
        costs,
        sharding,
        reserve=reserve,
        started=started,
        unless_above=unless_above,
    )


def spread_sharding(
    graph: Graph,
    cluster: Cluster,
    costs: Costs,
    sharding: Sharding,
    *,
    reserve: float = 0.0,
    started: float | None = None,
    unless_above: float | None = None,
) -> Spread:
    """Complete a sharding to a judged plan.

    Args:
        graph: A captured graph.
        cluster: As many devices as the mesh.
        costs: Of the graph; those of the parts are made the same way.
        sharding: What cannot be cut as it says is left whole.
        reserve: Fraction of each device's memory to leave unused.
        started: When planning began, by `time.perf_counter`; None for now.
        unless_above: As for `decide_sharded`.

    Raises:
        InfeasibleError: E301, if the plan does not fit.
    """
    from pardnn.shard.spread import spread
    from pardnn.shard.valid import valid_sharding
    from pardnn.sim.engine import simulate
    from pardnn.sim.machine import machine_of

    started = time.perf_counter() if started is None else started
    plan = spread(graph, valid_sharding(graph, sharding))
    planning = time.perf_counter() - started
    parts = planned_graph(graph, plan)
    arrays = plan_arrays(parts, plan)
    _check_memory(parts, arrays, cluster, reserve)
    if unless_above is not None and costs.source == "measured":
        guess = machine_of(scaled_costs(graph, costs, parts), cluster)
        if simulate(parts, guess, arrays).makespan >= unless_above:
            raise InfeasibleError("cutting every op is slower by an estimate")
    chosen = part_costs(parts, cluster, costs)
    timeline = simulate(parts, machine_of(chosen, cluster), arrays)
    return Spread(
        plan=plan,
        graph=parts,
        costs=chosen,
        arrays=arrays,
        makespan_s=timeline.makespan,
        transfer_bytes=timeline.transfer_bytes(parts),
        planning_s=planning,
    )


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
