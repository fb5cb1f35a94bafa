"""The fastest order found for a placement that keeps every device within its memory.

Tried in turn: the emulator's own order; the same order with messages moved towards the latest slot
that memory asks for; the topological order of the file, which is what eager execution does and
often needs little memory. The judge decides among those that fit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Int64
from numpy import ndarray

from pardnn.graph.csr import GraphArrays
from pardnn.graph.ir import Graph
from pardnn.place.schedule import first_overwrites, ordered_plan
from pardnn.place.squeeze import limits, squeezed_plan
from pardnn.plan.plan import PlanArrays
from pardnn.sim.dynamic import emulate
from pardnn.sim.engine import run_lists
from pardnn.sim.levels import bottom_levels
from pardnn.sim.machine import Machine
from pardnn.sim.peak import peaks
from pardnn.sim.timeline import Timeline


def fits(arrays: GraphArrays, plan: PlanArrays, capacities: Sequence[int | None]) -> bool:
    """Return whether no device of the plan exceeds its usable bytes."""
    return bool((peaks(arrays, plan) <= limits(capacities)).all())


def fit_schedule(
    graph: Graph,
    machine: Machine,
    place: Int64[ndarray, " n"],
    capacities: Sequence[int | None],
) -> PlanArrays | None:
    """Return the fastest plan found for a placement that fits; None if none was found.

    Args:
        graph: The graph.
        machine: Durations and links.
        place: Device of each op, with groups together.
        capacities: Usable bytes per device, None for unlimited; see `plan.check.capacities`.
    """
    a = graph.arrays
    timeline = emulate(a, machine, place, -bottom_levels(a, machine, place))
    return fit_candidate(a, machine, place, timeline, capacities, first_overwrites(graph))


def fit_candidate(
    arrays: GraphArrays,
    machine: Machine,
    place: Int64[ndarray, " n"],
    timeline: Timeline,
    capacities: Sequence[int | None],
    overwrites: Int64[ndarray, "w 2"],
) -> PlanArrays | None:
    """Return the fastest plan found for a placement that fits, its own timeline tried first.

    Args:
        arrays: The graph.
        machine: Durations and links.
        place: Device of each op, with groups together.
        timeline: Any complete timeline of this placement.
        capacities: Usable bytes per device.
        overwrites: From `first_overwrites`.
    """
    plan = ordered_plan(arrays, machine.num_devices, place, timeline, overwrites)
    if fits(arrays, plan, capacities):
        return plan
    best: PlanArrays | None = None
    shortest = np.inf
    for rank in _ranks(arrays, timeline.dispatch):
        plan = squeezed_plan(arrays, machine, place, rank, capacities, overwrites)
        if fits(arrays, plan, capacities):
            makespan = run_lists(arrays, machine, plan).makespan
            if makespan < shortest:
                best, shortest = plan, makespan
    return best


def _ranks(arrays: GraphArrays, dispatch: ndarray) -> Iterator[ndarray]:
    yield dispatch
    rank = np.empty(arrays.num_ops, dtype=np.int64)
    rank[arrays.topological] = np.arange(arrays.num_ops)
    yield rank
