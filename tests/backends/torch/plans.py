"""Plans for tests: random placements that keep groups together, completed by the scheduler."""

from __future__ import annotations

import dataclasses

import numpy as np

from pardnn.graph.ir import Graph
from pardnn.plan.check import check_plan
from pardnn.plan.file import stamped
from pardnn.plan.plan import Plan, plan_from_arrays
from pardnn.sim.machine import Machine
from tests.place.machines import schedule


def random_plan(graph: Graph, num_devices: int, seed: int = 0, num_clumps: int = 0) -> Plan:
    """Return a valid plan with every group on a random device.

    `num_clumps` puts runs of ops that stand together in the graph on one device; 0 scatters them.
    """
    rng = np.random.default_rng(seed)
    num_ops = graph.arrays.num_ops
    by_group = rng.integers(0, num_devices, num_ops)
    if num_clumps:
        clump = np.arange(num_ops) * num_clumps // num_ops
        by_group = rng.integers(0, num_devices, num_clumps)[clump]
    place = by_group[graph.arrays.group].astype(np.int64)
    plan = plan_from_arrays(graph, schedule(graph, machine(num_ops, num_devices), place))
    plan = stamped(dataclasses.replace(plan, messages=_held_by_name(plan)), graph)
    check_plan(graph, plan)
    return plan


def _held_by_name(plan: Plan) -> tuple:
    """Name the op until which a send is held where the plan says "end of the step"."""
    return tuple(
        dataclasses.replace(m, hold_until=m.hold_until or plan.order[m.source][-1])
        for m in plan.messages
    )


def machine(num_ops: int, num_devices: int) -> Machine:
    square = (num_devices, num_devices)
    return Machine(
        seconds=np.full((1, num_ops), 1e-4),
        device_class=np.zeros(num_devices, dtype=np.int64),
        latency=np.full(square, 1e-4),
        bandwidth=np.full(square, 1e9),
        serial=0,
    )
