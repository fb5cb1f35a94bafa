"""Beyond the thesis: its models with every op cut over the devices, beside placed whole ops.

Placing whole ops can't be faster than the critical path of the step, and the thesis's models have
two to nine ops that could run side by side. A cut of every op has no such bound.
"""

from __future__ import annotations

import time
from typing import Any

from bench.thesis.batch import model
from bench.thesis.search import RESERVE, cluster_of, timed_plan
from pardnn.errors import InfeasibleError
from pardnn.place.thesis.steps import place_thesis
from pardnn.plan.check import capacities
from pardnn.planner.options import PlanOptions
from pardnn.planner.problem import Problem
from pardnn.planner.sharded.decide import decide_sharded
from pardnn.sim.machine import machine_of
from pardnn.sim.peak import peaks


def cut_row(name: str, batch_size: int, num_devices: int) -> dict[str, Any]:
    """Return samples/s, bytes and CPU seconds of a plan that cuts, and of one that places.

    Args:
        name: Of the captured graph.
        batch_size: Of the step.
        num_devices: Number of V100s.
    """
    graph, costs = model(name, batch_size)
    cluster = cluster_of(num_devices)
    placed = timed_plan(graph, machine_of(costs, cluster), capacities(cluster, RESERVE))
    try:
        usable = capacities(cluster, RESERVE)
        thesis = timed_plan(graph, machine_of(costs, cluster), usable, place_thesis).makespan
    except InfeasibleError:
        thesis = None
    row: dict[str, Any] = {
        "batch": batch_size, "ops": len(graph.ops), "placed": batch_size / placed.makespan,
        "placed_peak": max(placed.peak), "thesis": thesis and batch_size / thesis,
    }  # fmt: skip
    begin = time.process_time()
    try:
        problem = Problem(graph, cluster, costs, PlanOptions(objective="seconds", reserve=RESERVE))
        cut = decide_sharded(problem, "tofu")
    except InfeasibleError as error:
        return row | {"error": error.message}
    return row | {
        "planning_cpu_s": time.process_time() - begin,
        "cut": batch_size / cut.makespan_s,
        "cut_peak": int(peaks(cut.graph.arrays, cut.arrays).max()),
        "sent_bytes": cut.transfer_bytes,
        "parts": len(cut.graph.ops),
    }
