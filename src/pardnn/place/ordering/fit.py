"""Fitting a placement: the fastest order found that keeps every device within its memory.

Tried in turn: the emulator's own order; the same order with messages moved towards the latest slot
that memory asks for; blends of it with orders that need little memory: the topological order of the
file (which eager execution follows), and that order with ops moved forward that free their inputs.
The simulator decides among those that fit. For a tiny graph, all plans are searched last.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64
from numpy import ndarray

from pardnn.graph.csr import GraphArrays
from pardnn.graph.ir import Graph
from pardnn.place.ordering.all_plans import searched_plan
from pardnn.place.ordering.least_peak import least_peak_positions
from pardnn.place.ordering.low_memory_orders import (
    blended_positions,
    eager_free_positions,
    file_positions,
)
from pardnn.place.ordering.memory_bounded import (
    InOrder,
    fitting_plan,
    limits,
    memory_bounded_plan,
)
from pardnn.place.ordering.schedule import first_overwrites, free_plan, ordered_plan
from pardnn.plan.plan import PlanArrays
from pardnn.sim.dynamic import emulate
from pardnn.sim.levels import bottom_levels
from pardnn.sim.machine import Machine
from pardnn.sim.peak import peaks, residual_bytes
from pardnn.sim.timeline import Timeline

#: Blends of two orders tried between the extremes; fewer for graphs above `MANY_OPS`.
BISECTIONS, FEW_BISECTIONS, MANY_OPS = 4, 1, 50_000


def fits(arrays: GraphArrays, plan: PlanArrays, capacities: Sequence[int | None]) -> bool:
    """Return whether no device of the plan exceeds its usable bytes.

    Args:
        arrays: The graph.
        plan: A plan.
        capacities: Usable bytes of each device; None is unlimited.
    """
    return excess_bytes(arrays, plan, capacities) <= 0


def excess_bytes(arrays: GraphArrays, plan: PlanArrays, capacities: Sequence[int | None]) -> int:
    """Return by how many bytes the fullest device exceeds its capacity; 0 or less if none does.

    Args:
        arrays: The graph.
        plan: A plan.
        capacities: Usable bytes of each device; None is unlimited.
    """
    return int((peaks(arrays, plan) - limits(capacities)).max())


def holds_residuals(
    residual: Int64[ndarray, " n"], place: Int64[ndarray, " n"], usable: Int64[ndarray, " k"]
) -> bool:
    """Return whether devices have room for what they hold all the time, in any order.

    Args:
        residual: Bytes of each op that outlive the step.
        place: Device of each op.
        usable: Bytes of each device; see `limits`.
    """
    held = np.zeros(len(usable), dtype=np.int64)
    np.add.at(held, place, residual)
    return bool((held <= usable).all())


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
    a, overwrites = graph.arrays, first_overwrites(graph)
    timeline = emulate(a, machine, place, -bottom_levels(a, machine, place))
    found = fit_candidate(a, machine, place, timeline, capacities, overwrites)
    return found or searched_plan(a, capacities, overwrites, [place]).plan


def fit_candidate(
    arrays: GraphArrays,
    machine: Machine,
    place: Int64[ndarray, " n"],
    timeline: Timeline,
    capacities: Sequence[int | None],
    overwrites: Int64[ndarray, "w 2"],
    *,
    below: float = np.inf,
) -> PlanArrays | None:
    """Return the fastest plan found for a placement that fits, its own timeline tried first.

    Args:
        arrays: The graph.
        machine: Durations and links.
        place: Device of each op, with groups together.
        timeline: Any complete timeline of this placement.
        capacities: Usable bytes per device.
        overwrites: From `first_overwrites`.
        below: Seconds; plans that take as long need not be found.
    """
    plan = ordered_plan(arrays, machine.num_devices, place, timeline, overwrites)
    if fits(arrays, plan, capacities):
        return plan
    residual = residual_bytes(arrays, np.arange(arrays.num_ops))
    if not holds_residuals(residual, place, limits(capacities)):
        return None
    is_alone = bool((place == place[0]).all())  # on one device all orders take as long
    below = np.inf if is_alone else below
    best = fit_near(arrays, machine, place, timeline, capacities, overwrites, below=below)
    if best is None and is_alone:
        plan = free_plan(arrays, machine.num_devices, place, least_peak_positions(arrays))
        best = plan if fits(arrays, plan, capacities) else None
    return best


def fit_moved(
    arrays: GraphArrays,
    machine: Machine,
    place: Int64[ndarray, " n"],
    timeline: Timeline,
    capacities: Sequence[int | None],
    overwrites: Int64[ndarray, "w 2"],
) -> tuple[PlanArrays, PlanArrays | None]:
    """Return a plan in the order of another placement, and that plan or one near it that fits.

    Args:
        arrays: The graph.
        machine: Durations and links.
        place: Device of each op, with groups together.
        timeline: Of the other placement.
        capacities: Usable bytes per device.
        overwrites: From `first_overwrites`.
    """
    position = timeline.dispatch.copy()
    kept = memory_bounded_plan(arrays, machine, place, position, capacities, overwrites)
    if fits(arrays, kept, capacities):
        return kept, kept
    return kept, fit_near(arrays, machine, place, timeline, capacities, overwrites)


def fit_near(
    arrays: GraphArrays,
    machine: Machine,
    place: Int64[ndarray, " n"],
    timeline: Timeline,
    capacities: Sequence[int | None],
    overwrites: Int64[ndarray, "w 2"],
    *,
    below: float = np.inf,
) -> PlanArrays | None:
    """Return the fastest plan found for a placement that fits, of those near a timeline's order.

    Args:
        arrays: The graph.
        machine: Durations and links.
        place: Device of each op, with groups together.
        timeline: Whose order of ops counts; it may be that of another placement.
        capacities: Usable bytes per device.
        overwrites: From `first_overwrites`.
        below: Seconds; plans that take as long need not be found.
    """
    blends = _Blends(arrays, machine, place, timeline, capacities, overwrites)
    own = blends.plan(0.0, timeline.dispatch, below)
    if own is not None:
        return own.plan if own.seconds < below else None
    best: PlanArrays | None = None
    for base in (file_positions(arrays), eager_free_positions(arrays)):
        found = blends.fastest(base, below)
        if found.plan is not None:
            best, below = found
    return best


def fit_order(
    arrays: GraphArrays,
    machine: Machine,
    place: Int64[ndarray, " n"],
    timeline: Timeline,
    base: Int64[ndarray, " n"],
    capacities: Sequence[int | None],
    overwrites: Int64[ndarray, "w 2"],
    *,
    below: float = np.inf,
) -> PlanArrays | None:
    """Return the fastest plan that fits, of those between a timeline's order and a low-memory one.

    Args:
        arrays: The graph.
        machine: Durations and links.
        place: Device of each op, with groups together.
        timeline: Any complete timeline of this placement.
        base: Positions in an order that needs little memory.
        capacities: Usable bytes per device.
        overwrites: From `first_overwrites`.
        below: Seconds; plans that take as long need not be found.
    """
    residual = residual_bytes(arrays, np.arange(arrays.num_ops))
    if not holds_residuals(residual, place, limits(capacities)):
        return None
    blends = _Blends(arrays, machine, place, timeline, capacities, overwrites)
    own = blends.plan(0.0, base, below)
    if own is not None:
        return own.plan if own.seconds < below else None
    return blends.fastest(base, below).plan


class _Blends(NamedTuple):
    """A placement, for plans whose order is between a timeline's and another one."""

    arrays: GraphArrays
    machine: Machine
    place: Int64[ndarray, " n"]
    timeline: Timeline
    capacities: Sequence[int | None]
    overwrites: Int64[ndarray, "w 2"]

    def plan(self, weight: float, base: Int64[ndarray, " n"], below: float) -> InOrder | None:
        """Return the plan of a blend, if it fits; see `fitting_plan`.

        Args:
            weight: Of the other order.
            base: Positions in the other order.
            below: Seconds; a plan that takes as long need not be made.
        """
        position = blended_positions(self.timeline.dispatch, base, weight)
        return fitting_plan(
            self.arrays, self.machine, self.place, position, self.capacities, self.overwrites,
            below=below,
        )  # fmt: skip

    def fastest(self, base: Int64[ndarray, " n"], below: float) -> InOrder:
        """Return the fastest plan that fits, if the timeline's own order does not.

        Weights are bisected, as if more of the low-memory order always needed less memory.

        Args:
            base: Positions in an order that needs little memory.
            below: Seconds that it takes less than; there may be no plan.
        """
        best = InOrder(None, below)
        low, high, weight = 0.0, 1.0, 1.0
        bisections = FEW_BISECTIONS if self.arrays.num_ops > MANY_OPS else BISECTIONS
        for _ in range(1 + bisections):
            found = self.plan(weight, base, best.seconds)
            if found is None and weight == 1.0:
                break
            if found is None:
                low = weight
            else:
                best, high = found if found.seconds < best.seconds else best, weight
            weight = (low + high) / 2
        return best
