"""Step 2 of ParDNN: a placement whose plan keeps every device within its memory.

Starts are placements of step 1, and placements packed by memory (`memory_packing`). Each is
repaired on orders that need little memory: consumption is tracked (Eq. 4.3, `memory_tracking`) and
overflows are resolved (Eqs. 4.4 and 4.5, `overflow_knapsack`). Then it is scheduled as fast as
memory allows (`ordering.fit`); list scheduling with the residual groups pinned turns plans that fit
into new starts. The simulator chooses.

Reference: thesis, section 4.1.2. The emulated scheduler of that section is `sim.dynamic`.

Deviations: the thesis repairs one placement; here several are repaired, because if memory binds,
the fastest placement is often not the best one to repair. Those expected to be fastest once they
fit come first. Above `MANY_OPS` ops only one is repaired, as in the thesis: the fastest, on its own
order. Everything else is tried only if that fails, or, up to `ATTEMPT_OPS`, if the result takes
more than `REPAIR_COSTS` times the unlimited makespan.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64
from numpy import ndarray

from pardnn.kernels.sorting import inverse_permutation
from pardnn.place.colocation import legal_placement
from pardnn.place.ordering.fit import excess_bytes, fit_candidate, fit_order, fits
from pardnn.place.ordering.low_memory_orders import eager_free_positions, file_positions
from pardnn.place.ordering.memory_bounded import fast_memory_bounded_plan, latest_slot_plan, limits
from pardnn.place.pardnn.memory_packing import (
    balanced_place,
    packed_place,
    residual_pins,
)
from pardnn.place.pardnn.memory_tracking import TrackedMemory, memory_profile_of, track_memory
from pardnn.place.pardnn.overflow_knapsack import resolve_overflow
from pardnn.place.pardnn.problem import Problem
from pardnn.place.pardnn.step1_makespan import (
    MANY_OPS,
    Candidate,
    improved,
    in_order,
    simulated,
    timeline_of,
)
from pardnn.plan.plan import PlanArrays
from pardnn.sim.engine import run_lists
from pardnn.sim.transfers import missing_link

#: Ops above which one repaired plan that fits is enough.
ATTEMPT_OPS = 60_000
#: Ops times starts that are worked on once some plan fits. Where memory is tight it decides: of
#: Word-RNN-2 and Char-CRN-2 at their largest batches, a quarter of it finds steps that take 1.1 to
#: 1.5 times as long, in half the time.
START_OPS = 240_000
#: Times the seconds of a plan that is there from which no more starts are worked on: later ones
#: were up to 1.8 times as fast as candidates (GPT-2 and ViT, 12 layers, 8 and 16 devices).
HOPELESS = 2.0
#: A large graph's repaired plan so much slower than the unlimited one is not the last word: where
#: residual bytes fill the devices, other starts have been twice as fast (TRN-2 on 4 V100).
REPAIR_COSTS = 1.1


class Task(NamedTuple):
    """What the memory step works on.

    Attributes:
        problem: The problem of step 1.
        units: The problem with views joined to what they view.
        capacities: Usable bytes per device.
        overwrites: From `first_overwrites`.
    """

    problem: Problem
    units: Problem
    capacities: Sequence[int | None]
    overwrites: Int64[ndarray, "w 2"]


class Fitting(NamedTuple):
    """A plan that fits, and its simulated seconds."""

    plan: PlanArrays
    makespan: float


def fit_memory(
    task: Task,
    candidates: list[Candidate],
    start: Start | None = None,
    below: float = math.inf,
) -> PlanArrays | None:
    """Return the fastest plan found that fits.

    Args:
        task: The task.
        candidates: Of step 1, fastest first.
        start: Of the first one, if it is known.
        below: Seconds of a known plan: the search ends early if it is far from this.
    """
    found: list[Fitting] = []
    if task.problem.arrays.num_ops > MANY_OPS:
        plan = _fit_fastest(task, start or start_of(task, candidates[0]))
        is_linked = plan is not None and _is_linked(task, plan.place)
        if is_linked and task.problem.arrays.num_ops > ATTEMPT_OPS:
            return plan
        _keep(task, found, plan)
        if found and found[0].makespan <= REPAIR_COSTS * candidates[0].makespan:
            return found[0].plan
    attempts = max(1, START_OPS // task.problem.arrays.num_ops)
    for candidate in candidates[:attempts]:
        _keep(task, found, fit_candidate(
            task.problem.arrays, task.problem.machine, candidate.place,
            timeline_of(task.problem, candidate), task.capacities, task.overwrites,
            below=_shortest(found),
        ))  # fmt: skip
    for number, unrepaired in enumerate(_starts(task, candidates)):
        if found and (number >= attempts or _shortest(found) >= HOPELESS * below):
            break
        _attempt(task, found, unrepaired.place, unrepaired.position)
    if not found:
        for position in _low_memory_orders(task):
            place = balanced_place(task.units, position, limits(task.capacities))
            _schedule(task, found, place, position)
    return _fastest(found).plan if found else None


def _fastest(found: list[Fitting]) -> Fitting:
    return min(found, key=lambda fitting: fitting.makespan)


def _shortest(found: list[Fitting]) -> float:
    """Return the seconds of the fastest plan; infinite before there is one."""
    return min((fitting.makespan for fitting in found), default=math.inf)


class Start(NamedTuple):
    """The fastest placement, and its memory along its own order."""

    position: Int64[ndarray, " n"]
    tracked: TrackedMemory


def start_of(task: Task, candidate: Candidate) -> Start:
    """Return the start of repair for a large graph: its fastest placement."""
    position = inverse_permutation(candidate.order)
    place = candidate.place  # groups are together
    if task.units is not task.problem:
        place = legal_placement(task.units.arrays, task.units.runs, place, candidate.order)
    capacity = limits(task.capacities)
    return Start(position, track_memory(task.units.arrays, place, position, capacity))


def overflows(start: Start) -> bool:
    """Return whether the plan of a start must overflow: it holds no less at any point."""
    return bool((start.tracked.least > start.tracked.profile.capacity).any())


def _fit_fastest(task: Task, start: Start) -> PlanArrays | None:
    """Repair the fastest placement on its own order, which the plan follows."""
    a, position, profile = task.problem.arrays, start.position, start.tracked.profile
    if not resolve_overflow(task.units, profile, start.tracked.live_ranges):
        return None
    place = profile.place
    timeline = timeline_of(task.problem, in_order(task.problem, place, position.astype(np.float64)))
    plan = fast_memory_bounded_plan(
        a, timeline, len(profile.capacity), place, position, task.capacities, task.overwrites
    )
    return plan if fits(a, plan, task.capacities) else None


def _attempt(
    task: Task, found: list[Fitting], start: Int64[ndarray, " n"], position: Int64[ndarray, " n"]
) -> None:
    """Repair a start, and then the result of list scheduling from it."""
    place = repaired(task, start, position)
    if place is None:
        return
    _schedule(task, found, place, position)
    pinned = improved(task.units, simulated(task.units, place), residual_pins(task.units, place))
    again = repaired(task, pinned.place, position)
    if again is not None:
        _schedule(task, found, again, position)


def _is_linked(task: Task, place: Int64[ndarray, " n"]) -> bool:
    return missing_link(task.problem.arrays, task.problem.machine, place) is None


def _keep(task: Task, found: list[Fitting], plan: PlanArrays | None) -> None:
    if plan is not None:
        makespan = run_lists(task.problem.arrays, task.problem.machine, plan).makespan
        if np.isfinite(makespan):
            found.append(Fitting(plan, makespan))


def _schedule(
    task: Task, found: list[Fitting], place: Int64[ndarray, " n"], position: Int64[ndarray, " n"]
) -> None:
    machine = task.problem.machine
    timeline = timeline_of(task.problem, simulated(task.problem, place))
    _keep(task, found, fit_order(
        task.problem.arrays, machine, place, timeline, position, task.capacities, task.overwrites,
        below=_shortest(found),
    ))  # fmt: skip


def _low_memory_orders(task: Task) -> Iterator[Int64[ndarray, " n"]]:
    yield eager_free_positions(task.problem.arrays)
    yield file_positions(task.problem.arrays)


class _Unrepaired(NamedTuple):
    """A placement to repair on an order, and the seconds expected of it once it fits."""

    place: Int64[ndarray, " n"]
    position: Int64[ndarray, " n"]
    seconds: float


def _starts(task: Task, candidates: list[Candidate]) -> list[_Unrepaired]:
    """Return placements of step 1 and packed ones, on each low-memory order, the best first.

    A placement that slightly overflows is hardly slower once it fits, while the fastest one may
    overflow by far: moved bytes are assumed to slow the step by their share of all bytes.
    """
    capacity, orders = limits(task.capacities), list(_low_memory_orders(task))
    arrays, runs = task.units.arrays, task.units.runs
    placements = [
        (legal_placement(arrays, runs, candidate.place), candidate.makespan)
        for candidate in candidates
    ]
    for whole, position in itertools.product((False, True), orders):
        place = packed_place(task.units, position, capacity, whole=whole)
        placements.append((place, simulated(task.problem, place).makespan))
    found: dict[tuple[bytes, bytes], _Unrepaired] = {}
    for (place, seconds), position in itertools.product(placements, orders):
        peak = memory_profile_of(arrays, place, position, capacity).top[:, 1]
        moves = np.maximum(peak - capacity, 0).sum() / max(peak.sum(), 1)
        start = _Unrepaired(place, position, seconds * (1 + moves))
        found.setdefault((place.tobytes(), position.tobytes()), start)
    return sorted(found.values(), key=lambda start: start.seconds)


def repaired(
    task: Task, place: Int64[ndarray, " n"], position: Int64[ndarray, " n"]
) -> Int64[ndarray, " n"] | None:
    """Return a placement that fits if run in an order, near a given one; None if none was found.

    Args:
        task: The task.
        place: Device of each op.
        position: Of each op in the order.
    """
    profile = memory_profile_of(task.units.arrays, place, position, limits(task.capacities))
    return profile.place if resolve_overflow(task.units, profile) else None


def nearest(task: Task) -> PlanArrays:
    """Return the plan with the smallest overflow among the starts of repair."""
    a, capacity = task.units.arrays, limits(task.capacities)
    plans: list[PlanArrays] = []
    for position in _low_memory_orders(task):
        place = packed_place(task.units, position, capacity)
        profile = memory_profile_of(a, place, position, capacity)
        resolve_overflow(task.units, profile)
        plans.append(latest_slot_plan(a, len(capacity), profile.place, position, task.overwrites))
    return min(plans, key=lambda plan: excess_bytes(a, plan, task.capacities))
