"""What devices hold under a sharding: goals, limits, and checks against them.

Goals say what a device should need: the plan shares fetched regions as long as goals are met.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from pardnn.errors import InfeasibleError, shown
from pardnn.graph.ir import Graph
from pardnn.place.ordering.memory_bounded import limits
from pardnn.plan.mesh import Mesh, owned_boxes
from pardnn.plan.partitioned_graph import FETCH
from pardnn.plan.plan import PlanArrays
from pardnn.planner.problem import Problem
from pardnn.planner.sharded.least_memory import least_of_partitions, least_peaks
from pardnn.shard.boxes import volume
from pardnn.shard.sharding import Sharding
from pardnn.sim.peak import live_bytes, one_device_peak, peaks
from pardnn.units import bytes_text, size_texts

#: Times its share of one device's peak that a device should need at most.
ROOM = 1.15
#: The detail of an error of a cut that tells the bytes of its fullest device.
PEAK = "peak_bytes"


def held_bytes(graph: Graph, sharding: Sharding) -> list[int]:
    """Return the bytes that each device holds all the time: its blocks of parameters and state.

    Args:
        graph: The graph.
        sharding: Of all its tensors; see `legalize`.
    """
    found = [0] * sharding.mesh.size
    for op in graph.ops:
        for tensor in op.outputs if op.memory == "residual" else ():
            shape, size = tensor.shape or (), math.prod(tensor.shape or ())
            boxes = owned_boxes(shape, sharding.layouts[tensor.name], sharding.mesh)
            if tensor.alias_of is not None or not size or boxes is None:
                continue
            for device, box in enumerate(boxes):
                found[device] += tensor.bytes * volume(box) // size
    return found


def check_held(problem: Problem, held: Sequence[int]) -> None:
    """Raise before partitioning if a device has no room for what it holds all the time."""
    for device, (size, usable) in enumerate(zip(held, problem.capacities, strict=True)):
        if usable is not None and size > usable:
            here, room = size_texts(size, usable)
            raise InfeasibleError(
                f"no plan fits. With every op cut over {len(held)} devices, device {device} holds "
                f"{here} of parameters and state; usable: {room}."
            )


def check_least(problem: Problem, sharding: Sharding, held: Sequence[int]) -> None:
    """Raise before partitioning if a device must hold more than it may.

    Args:
        problem: What is planned.
        sharding: See `legalize`.
        held: From `held_bytes`.
    """
    if all(usable is None for usable in problem.capacities):
        return
    sizes = np.add(held, least_peaks(problem.graph, sharding)).tolist()
    for device, (size, usable) in enumerate(zip(sizes, problem.capacities, strict=True)):
        if usable is not None and size > usable:
            here, room = size_texts(size, usable)
            raise InfeasibleError(
                f"no plan fits. With every op cut over {len(held)} devices, device {device} holds "
                f"{here} at once, or more; usable: {room}.",
                details={"device": device, PEAK: max(sizes), "usable_bytes": usable},
            )


def memory_goals(graph: Graph, local: Graph, mesh: Mesh) -> list[int]:
    """Return the bytes that each device should need at most.

    That is `ROOM` times its fraction of the one-device peak, and twice the largest fetched region.

    Args:
        graph: The graph.
        local: Its partitioned graph.
        mesh: Over which it is sharded.
    """
    fetched = max((t.bytes for op in local.ops if op.kind == FETCH for t in op.outputs), default=0)
    return goals_of(graph, mesh, fetched)


def goals_of(graph: Graph, mesh: Mesh, fetched: int) -> list[int]:
    """Return the same for a largest fetched region of this many bytes."""
    peak = ROOM * one_device_peak(graph.arrays)
    return [int(peak * fraction) + 2 * fetched for fraction in mesh.fractions()]


def no_partition_fits(local: Graph, plan: PlanArrays, capacities: Sequence[int | None]) -> bool:
    """Return whether one partition of a sharding tells that no other one fits.

    Args:
        local: The partitioned graph.
        plan: Its plain plan.
        capacities: Usable bytes of each device; None is unlimited.
    """
    usable = limits(capacities)
    if bool((peaks(local.arrays, plan) <= usable).all()):
        return False
    return bool((least_of_partitions(local, plan) > usable).any())


def check_memory(problem: Problem, local: Graph, plan: PlanArrays) -> None:
    """Raise if a device holds more than it may, naming the op at which it holds most."""
    cluster, usable = problem.cluster, problem.capacities
    held = live_bytes(local.arrays, plan)
    device_of = plan.place[plan.order_op]
    over = held - limits(usable)[device_of]
    worst = int(over.argmax())
    if over[worst] <= 0:
        return
    device, op = int(device_of[worst]), local.ops[int(plan.order_op[worst])]
    limit, reserve = cluster.devices[device].memory, problem.options.reserve
    where = f" ({op.source})" if op.source else ""
    here, room = size_texts(int(held[worst]), usable[device])
    raise InfeasibleError(
        f"no plan fits. With every op cut over {cluster.num_devices} devices, device {device} "
        f"holds {here} while {shown(op.name)}{where} runs; usable: {room} (limit "
        f"{bytes_text(limit)}, reserve {reserve:g}).",
        details={
            "device": device,
            "op": op.name,
            "source": op.source,
            "bytes": int(held[worst]),
            PEAK: int(held.max()),
            "usable_bytes": usable[device],
        },
    )
