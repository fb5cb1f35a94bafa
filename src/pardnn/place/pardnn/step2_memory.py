"""Step 2 of ParDNN: a placement whose plan keeps every device within its memory.

Starts are placements of step 1, and placements packed by memory. Each is repaired on orders that
need little memory (`overflow`), then scheduled as fast as its memory allows (`fitting`); list
scheduling with the residual groups pinned makes new starts of what fits. The judge chooses.

Deviations: the thesis repairs one placement; here several are, since where memory binds, the
fastest placement is often not the one that is best to repair: what is expected to be fastest once
it fits comes first. Above `MANY_OPS` ops it is one, as in the thesis: the fastest, repaired on its
own order. Only if that fails, or, up to `ATTEMPT_OPS`, if it takes more than `REPAIR_COSTS` times
the unlimited makespan, is all else tried.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64
from numpy import ndarray

from pardnn.place.ordering.fit import fit_candidate, fit_order, fits
from pardnn.place.ordering.low_memory_orders import eager_free_rank, file_rank
from pardnn.place.ordering.memory_bounded import limits, quickly_squeezed_plan, tight_plan
from pardnn.place.pardnn.memory_packing import (
    allowed_place,
    balanced_place,
    packed_place,
    residual_pins,
)
from pardnn.place.pardnn.memory_tracking import Held, curves_of, held_along
from pardnn.place.pardnn.overflow import resolve_overflow
from pardnn.place.pardnn.problem import Problem
from pardnn.place.pardnn.step1_makespan import (
    MANY_OPS,
    Candidate,
    improved,
    in_order,
    judged,
    timeline_of,
)
from pardnn.plan.plan import PlanArrays
from pardnn.sim.engine import run_lists
from pardnn.sim.peak import peaks

#: Ops above which one repaired plan that fits is enough.
ATTEMPT_OPS = 60_000
#: Ops times starts that are worked on once some plan fits. Where memory is tight it decides: of
#: Word-RNN-2 and Char-CRN-2 at their largest batches, a quarter of it finds steps that take 1.1 to
#: 1.5 times as long, in half the time.
START_OPS = 240_000
#: A large graph's repaired plan so much slower than the unlimited one is not the last word: where
#: residual bytes fill the devices, other starts have been twice as fast (TRN-2 on 4 V100).
REPAIR_COSTS = 1.1


class Task(NamedTuple):
    """What the memory step works on.

    Attributes:
        problem: The problem of step 1.
        units: The same with views joined to what they view.
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
    task: Task, candidates: list[Candidate], start: Start | None = None
) -> PlanArrays | None:
    """Return the fastest plan found that fits.

    Args:
        task: The task.
        candidates: Of step 1, fastest first.
        start: Of the first one, if it is known.
    """
    found: list[Fitting] = []
    if task.problem.arrays.num_ops > MANY_OPS:
        plan = _fit_fastest(task, start or start_of(task, candidates[0]))
        if plan is not None and task.problem.arrays.num_ops > ATTEMPT_OPS:
            return plan
        _keep(task, found, plan)
        if found and found[0].makespan <= REPAIR_COSTS * candidates[0].makespan:
            return found[0].plan
    attempts = max(1, START_OPS // task.problem.arrays.num_ops)
    for candidate in candidates[:attempts]:
        _keep(task, found, fit_candidate(
            task.problem.arrays, task.problem.machine, candidate.place,
            timeline_of(task.problem, candidate), task.capacities, task.overwrites,
        ))  # fmt: skip
    for number, unfit in enumerate(_promising(task, candidates)):
        if found and number >= attempts:
            break
        _attempt(task, found, unfit.place, unfit.rank)
    if not found:
        for rank in _frugal_ranks(task):
            place = balanced_place(task.units, rank, limits(task.capacities))
            _schedule(task, found, place, rank)
    best = min(found, key=lambda fitting: fitting.makespan, default=None)
    return best.plan if best else None


class Start(NamedTuple):
    """The fastest placement, and what it holds along its own order."""

    rank: Int64[ndarray, " n"]
    held: Held


def start_of(task: Task, candidate: Candidate) -> Start:
    """Return what repair of a large graph's fastest placement starts from."""
    rank = np.empty(task.problem.arrays.num_ops, dtype=np.int64)
    rank[candidate.order] = np.arange(len(rank))
    place = candidate.place  # groups are together
    if task.units is not task.problem:
        place = allowed_place(task.units, place, candidate.order)
    return Start(rank, held_along(task.units.arrays, place, rank, limits(task.capacities)))


def overflows(start: Start) -> bool:
    """Return whether its plan, too, is sure to hold too much: it holds no less at any point."""
    return bool((start.held.least > start.held.curves.most).any())


def _fit_fastest(task: Task, start: Start) -> PlanArrays | None:
    """Repair the fastest placement on its own order; the plan keeps to that order."""
    a, rank, curves = task.problem.arrays, start.rank, start.held.curves
    if not resolve_overflow(task.units, curves, start.held.lives):
        return None
    place = curves.place
    timeline = timeline_of(task.problem, in_order(task.problem, place, rank.astype(np.float64)))
    plan = quickly_squeezed_plan(
        a, timeline, len(curves.most), place, rank, task.capacities, task.overwrites
    )
    return plan if fits(a, plan, task.capacities) else None


def _attempt(task: Task, found: list[Fitting], start: ndarray, rank: ndarray) -> None:
    """Repair a start, and once more what list scheduling makes of it."""
    place = repaired(task, start, rank)
    if place is None:
        return
    _schedule(task, found, place, rank)
    pinned = improved(task.units, judged(task.units, place), residual_pins(task.units, place))
    again = repaired(task, pinned.place, rank)
    if again is not None:
        _schedule(task, found, again, rank)


def _keep(task: Task, found: list[Fitting], plan: PlanArrays | None) -> None:
    if plan is not None:
        makespan = run_lists(task.problem.arrays, task.problem.machine, plan).makespan
        if np.isfinite(makespan):
            found.append(Fitting(plan, makespan))


def _schedule(task: Task, found: list[Fitting], place: ndarray, rank: ndarray) -> None:
    machine = task.problem.machine
    timeline = timeline_of(task.problem, judged(task.problem, place))
    _keep(task, found, fit_order(
        task.problem.arrays, machine, place, timeline, rank, task.capacities, task.overwrites
    ))  # fmt: skip


def _frugal_ranks(task: Task) -> Iterator[ndarray]:
    yield eager_free_rank(task.problem.arrays)
    yield file_rank(task.problem.arrays)


class _Unfit(NamedTuple):
    """A placement to repair on an order; `seconds` are expected of what comes of it."""

    place: Int64[ndarray, " n"]
    rank: Int64[ndarray, " n"]
    seconds: float


def _promising(task: Task, candidates: list[Candidate]) -> list[_Unfit]:
    """Return placements of step 1 and packed ones, each on each frugal order, the best first.

    A placement that holds little too much is hardly slower once it fits, and the fastest one may
    hold far too much: what moves is taken to slow the step by its share of all bytes.
    """
    most, ranks = limits(task.capacities), list(_frugal_ranks(task))
    wishes: list[tuple[ndarray, float]] = []
    for candidate in candidates:
        place = allowed_place(task.units, candidate.place, task.units.arrays.topological)
        wishes.append((place, candidate.makespan))
    for whole, rank in itertools.product((False, True), ranks):
        place = packed_place(task.units, rank, most, whole=whole)
        wishes.append((place, judged(task.problem, place).makespan))
    found: dict[tuple[bytes, bytes], _Unfit] = {}
    for (place, seconds), rank in itertools.product(wishes, ranks):
        held = curves_of(task.units.arrays, place, rank, most).top[:, 1]
        moves = np.maximum(held - most, 0).sum() / max(held.sum(), 1)
        start = _Unfit(place, rank, seconds * (1 + moves))
        found.setdefault((place.tobytes(), rank.tobytes()), start)
    return sorted(found.values(), key=lambda start: start.seconds)


def repaired(
    task: Task, place: Int64[ndarray, " n"], rank: Int64[ndarray, " n"]
) -> Int64[ndarray, " n"] | None:
    """Return a placement near `place` that fits if run in an order; None if none was found."""
    curves = curves_of(task.units.arrays, place, rank, limits(task.capacities))
    return curves.place if resolve_overflow(task.units, curves) else None


def nearest(task: Task) -> PlanArrays:
    """Return the plan with the smallest overflow of those that repair starts from."""
    a, most = task.units.arrays, limits(task.capacities)
    plans: list[PlanArrays] = []
    for rank in _frugal_ranks(task):
        curves = curves_of(task.units.arrays, packed_place(task.units, rank, most), rank, most)
        resolve_overflow(task.units, curves)
        plans.append(tight_plan(a, len(most), curves.place, rank, task.overwrites))
    return min(plans, key=lambda plan: int((peaks(a, plan) - most).max()))
