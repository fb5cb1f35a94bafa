"""What to reuse of an earlier plan: the plan itself, the device of each op, layouts of tensors.

A plan that ran before (state is where it put it) and a user's start plan are treated alike.
Ops, tensors and devices are matched by name, so the graph and the cluster may have changed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np
from jaxtyping import Int64
from numpy import ndarray

from pardnn.cluster import Cluster
from pardnn.errors import PardnnError, UsageError
from pardnn.graph.ir import Graph
from pardnn.plan.check import plan_problems
from pardnn.plan.mesh import Layout, layout_of
from pardnn.plan.partitioned_graph import Partition
from pardnn.plan.plan import Plan, PlanArrays, plan_arrays
from pardnn.plan.state_layout import STATE_KINDS
from pardnn.planner.algorithms import BEST, BEST_WHOLE, SHARDED
from pardnn.planner.options import PlanOptions
from pardnn.shard.sharding import FixedLayouts


def plan_before(graph: Graph, plan: Plan | None, cluster: Cluster) -> PlanArrays | None:
    """Return an earlier plan, if it is also valid for this graph and these devices, limits aside.

    Args:
        graph: The graph; in pieces, if that of the plan was.
        plan: The earlier plan.
        cluster: What it is to run on.
    """
    if plan is None or plan.partition is not None or len(plan.placement) != len(graph.ops):
        return None
    k = cluster.num_devices  # a damaged plan may have an order for more devices than its cluster
    if plan.num_devices != k or devices_now(plan, cluster) != list(range(k)):
        return None
    plan = dataclasses.replace(
        plan, graph_fingerprint=None, predicted=None, cluster=None, pieces=None, constraints=None
    )
    try:
        if plan_problems(graph, plan):
            return None
        return plan_arrays(graph, plan)
    except PardnnError:
        return None


def places_before(graph: Graph, plan: Plan | None, cluster: Cluster) -> Int64[ndarray, " n"]:
    """Return the device of each op that an earlier plan placed; -1 for the others."""
    if plan is None or plan.partition is not None:
        return np.full(len(graph.ops), -1, dtype=np.int64)
    device = dict(enumerate(devices_now(plan, cluster)))
    places = (device.get(plan.placement.get(op.name, -1), -1) for op in graph.ops)
    return np.fromiter(places, dtype=np.int64, count=len(graph.ops))


def devices_now(plan: Plan, cluster: Cluster) -> list[int]:
    """Return which device of a cluster each device of a plan is; -1 for those that are gone.

    They are matched by name, or by number if the plan names no cluster, or none of these devices:
    CPU ranks are called `cpu:0`, `cpu:1`, but were planned for as `gpu:0`, `gpu:1`.
    """
    now = {device.name: number for number, device in enumerate(cluster.devices)}
    if plan.cluster is None or not any(device.name in now for device in plan.cluster.devices):
        return [d if d < cluster.num_devices else -1 for d in range(plan.num_devices)]
    return [now.get(device.name, -1) for device in plan.cluster.devices]


def layouts_before(graph: Graph, plan: Plan | None, cluster: Cluster) -> FixedLayouts | None:
    """Return how an earlier cut lays out the state of a graph.

    None if it is no cut over all devices of this cluster, or of none of this state.
    """
    if plan is None or plan.partition is None or plan.partition.submeshes > 1:
        return None
    if devices_now(plan, cluster) != list(range(cluster.num_devices)):
        return None
    return fixed_state(graph, plan.partition)


def fixed_state(graph: Graph, partition: Partition) -> FixedLayouts | None:
    """Return how a cut lays out the state of a graph; None if it has none of it.

    A tensor of another shape than before is free.
    """
    layouts: dict[str, Layout] = {}
    for op in graph.ops:
        for tensor in op.outputs if op.kind in STATE_KINDS else ():
            layout = layout_of(partition.sharding.get(tensor.name, ()))
            if layout and _suits(layout, tensor.shape):
                layouts[tensor.name] = layout
    return FixedLayouts(partition.mesh, layouts) if layouts else None


def _suits(layout: Layout, shape: Iterable[int] | None) -> bool:
    """Whether a tensor has the dims that a layout cuts."""
    dims = len(tuple(shape or ()))
    return all(dim is None or dim < dims for dim in layout)


def started(options: PlanOptions, start: Plan) -> PlanOptions:
    """Return options completed by what a start plan decides and the user does not.

    Args:
        options: As the user gave them.
        start: The start plan.

    Raises:
        UsageError: E249, if the named algorithm cannot start from such a plan.
    """
    is_mixed = start.partition is not None and start.partition.submeshes > 1
    fitting = (BEST, *(SHARDED if start.partition is not None else (BEST_WHOLE,)))
    fitting = (BEST, start.algorithm) if is_mixed else fitting
    if is_mixed and (start.recompute is not None or start.offload is not None):
        raise UsageError(
            "planning cannot start yet from a plan that cuts ops inside submeshes and has second "
            "calls or state on the host.\nLeave out the start plan.",
            code="E249",
        )
    if options.algorithm not in fitting:
        kind = "cuts ops" if start.partition is not None else "places whole ops"
        kind = "cuts ops inside submeshes" if is_mixed else kind
        raise UsageError(
            f"{options.algorithm} does not start from a plan that {kind}.\n"
            "Use auto, which does, or leave out the start plan.",
            code="E249",
        )
    pieces = len(start.pieces.points) - 1 if start.pieces is not None else None
    is_open = options.microbatches is None and options.algorithm not in SHARDED
    return dataclasses.replace(
        options,
        microbatches=pieces if is_open else options.microbatches,
        recompute=options.recompute or start.recompute is not None,
        offload=options.offload or start.offload is not None,
        constraints=options.constraints or start.constraints or (),
    )
