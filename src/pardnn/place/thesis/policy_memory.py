"""Step 2 for an engine with its own scheduler (thesis, section 4.1.2): fit the emulated schedule.

The thesis emulates the scheduler, tracks memory along the emulated times (Eq. 4.3), and moves ops
by the knapsack until no device overflows (Eqs. 4.4 and 4.5). This does the same: the scheduler is
`sim.dynamic` under `fifo` or `priority`, overflows are resolved along the order of its starts with
messages sent as soon as tensors exist (`memory_tracking`, eager), and the result is emulated again.
Bytes that the order does not account for, because ops and messages take time, are subtracted from
the capacity in the next round; at most `ROUNDS` rounds. `sim.policy_peak` decides.

Deviations: as in `overflow_knapsack`: overflows in the order of their size, not from the sink back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from jaxtyping import Float64, Int64
from numpy import ndarray

from pardnn.graph.csr import GraphArrays
from pardnn.graph.ir import Graph
from pardnn.place.colocation import closed_arrays, colocated, legal_placement
from pardnn.place.decision import Decision
from pardnn.place.ordering.fit import fit_candidate
from pardnn.place.ordering.low_memory_orders import file_positions
from pardnn.place.ordering.memory_bounded import limits
from pardnn.place.ordering.schedule import first_overwrites
from pardnn.place.pardnn.memory_packing import balanced_place, packed_place
from pardnn.place.pardnn.memory_tracking import track_memory
from pardnn.place.pardnn.overflow_knapsack import resolve_overflow
from pardnn.place.pardnn.problem import Problem, problem_of
from pardnn.sim.dynamic import emulate
from pardnn.sim.levels import bottom_levels
from pardnn.sim.machine import Machine
from pardnn.sim.policy_peak import policy_peaks
from pardnn.sim.timeline import Timeline
from pardnn.sim.transfers import missing_link

Scheduler = Literal["fifo", "priority"]

#: Emulations of one start.
ROUNDS = 8


def fit_scheduler(
    graph: Graph,
    machine: Machine,
    place: Int64[ndarray, " n"],
    capacities: Sequence[int | None],
    scheduler: Scheduler,
    *,
    pins: Int64[ndarray, " n"] | None = None,
    only: bool = False,
) -> Decision | None:
    """Return a plan near a placement that fits under a scheduler and in its own order; or None.

    Args:
        graph: The graph.
        machine: Durations and links.
        place: Device of each op; groups are together.
        capacities: Usable bytes of each device; None is unlimited.
        scheduler: Which ready op runs first.
        pins: The only device of each op that can be on no other; -1 for the others.
        only: Start from this placement alone, not also from placements packed by memory.
    """
    a, overwrites = graph.arrays, first_overwrites(graph)
    group = colocated(a, overwrites, with_views=True)
    group.setflags(write=False)
    units = problem_of(closed_arrays(graph)._replace(group=group), machine, pins=pins)
    for number in range(1 if only else 3):
        start = _start(units, place, limits(capacities), number)
        found = _repaired(units, start, limits(capacities), scheduler)
        if found is None or missing_link(a, machine, found) is not None:
            continue
        timeline = scheduled(a, machine, found, scheduler)
        plan = fit_candidate(a, machine, found, timeline, capacities, overwrites)
        if plan is not None:
            return Decision(plan, int((found != place).sum()))
    return None


def scheduled(
    arrays: GraphArrays, machine: Machine, place: Int64[ndarray, " n"], scheduler: Scheduler
) -> Timeline:
    """Return the emulation of a placement.

    Args:
        arrays: The graph.
        machine: Durations and links.
        place: Device of each op.
        scheduler: Which ready op runs first.
    """
    key: Float64[ndarray, " n"] | None = None
    if scheduler == "priority":
        key = -bottom_levels(arrays, machine, place)
    return emulate(arrays, machine, place, key)


def _start(
    units: Problem, place: Int64[ndarray, " n"], capacity: Int64[ndarray, " k"], number: int
) -> Int64[ndarray, " n"]:
    if number == 0:
        return legal_placement(units.arrays, units.runs, place)
    pack = packed_place if number == 1 else balanced_place
    return pack(units, file_positions(units.arrays), capacity)


def _repaired(
    units: Problem,
    place: Int64[ndarray, " n"],
    capacity: Int64[ndarray, " k"],
    scheduler: Scheduler,
) -> Int64[ndarray, " n"] | None:
    """Return a placement near another one that fits under a scheduler; None if none was found."""
    taken_off = np.zeros(len(capacity), dtype=np.int64)
    for _ in range(ROUNDS):
        timeline = scheduled(units.arrays, units.machine, place, scheduler)
        peaks = policy_peaks(units.arrays, place, len(capacity), timeline)
        if bool((peaks <= capacity).all()):
            return place
        tracked = track_memory(units.arrays, place, timeline.dispatch, capacity, eager=True).profile
        unseen = np.where(peaks > capacity, peaks - tracked.top[:, 1], 0)
        taken_off = np.maximum(taken_off, unseen)
        profile = tracked._replace(capacity=np.maximum(capacity - taken_off, 0))
        if not resolve_overflow(units, profile):
            return None
        place = profile.place
    return None
