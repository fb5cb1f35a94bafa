"""Search over orders of a placed step whose pieces are alike, within the memory of the devices.

`safe_schedule` makes every order from keys, so all of them fit if the reference order (one piece
after the other) does. The first keys come from modulo schedules: with several periods, with weight
gradients delayed more and more, and with devices that wait more or less for the next op by key.
Then the best are changed at random (`improved`). The search is deterministic for a seed and a
budget of work. The best by the estimate are completed to plans, and the simulator decides.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64, Int64
from numpy import ndarray

from pardnn.graph.csr import GraphArrays
from pardnn.kernels.sorting import inverse_permutation
from pardnn.place.ordering.edges import Edges, edges_of, placed_bound, tails
from pardnn.place.ordering.fit import fits
from pardnn.place.ordering.memory_bounded import limits, memory_bounded_plan
from pardnn.place.ordering.memory_safe import safe_schedule
from pardnn.place.ordering.modulo import Model, model_of, modulo_keys, modulo_times
from pardnn.place.ordering.pieces import Pieces
from pardnn.place.ordering.storages import Reserve, Storages, reserve_of, storages_of
from pardnn.plan.plan import PlanArrays
from pardnn.sim.engine import run_lists
from pardnn.sim.machine import Machine
from pardnn.time_limit import check_time

#: Ops started in all, and so many schedules at least and at most: a second or two.
WORK, LEAST_SCHEDULES, MOST_SCHEDULES = 1_200_000, 24, 2_500
#: Periods, in units of the busiest device's work on one piece; delays of what no other device waits
#: for, in periods; by how many periods an op may be started before another that comes first.
PERIODS = (1.0, 1.2, 1.5, 2.0, 3.0)
DELAYS = (0.0, 0.5, 1.0, 2.0, 3.0, 4.0, 6.0, 1e6)
SLACKS = (0.0, 1 / 6, 1 / 3, 2 / 3, 4 / 3, 8 / 3, 16 / 3, np.inf)
#: Those that are tried of each placement; all others only of the best.
FEW = list(itertools.product((1.0, 1.5), (0.0, 2.0, 1e6), (0.0, 8 / 3, np.inf)))
#: Those that tell which placements are promising, where not all can be tried of each; and how many.
PROBES, MOST_PLACEMENTS = [(1.0, 2.0, 8 / 3), (1.0, 2.0, np.inf), (1.0, 1e6, np.inf)], 2
#: Schedules that the simulator judges; how many of them are changed at random.
JUDGED, STARTS = 4, 3
#: As `SLACKS`, in seconds of a usual op; the part by which a change may be worse, at first.
NOISY_SLACKS, TOLERANCE = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, np.inf), 0.04


class Placed(NamedTuple):
    """A placed step, ready to be scheduled again and again."""

    arrays: GraphArrays
    pieces: Pieces
    reference: Int64[ndarray, " n"]
    edges: Edges
    storages: Storages
    reserve: Reserve
    model: Model
    tail: Float64[ndarray, " n"]  # seconds from each op's start on, by data and messages
    bound: float  # seconds


class Scheduled(NamedTuple):
    """A schedule: the smaller, the better."""

    makespan: float
    mean_start: float
    start: Float64[ndarray, " n"]
    order: Int64[ndarray, " n"]

    def is_better(self, other: Scheduled) -> bool:
        """Return whether it ends earlier, or at the same time with ops started earlier."""
        return (self.makespan, self.mean_start) < (other.makespan, other.mean_start)


def placed(
    arrays: GraphArrays,
    machine: Machine,
    place: Int64[ndarray, " n"],
    pieces: Pieces,
    reference: Int64[ndarray, " n"],
    capacities: Sequence[int | None],
) -> Placed:
    """Return a placed step.

    Args:
        arrays: The graph.
        machine: Durations and links.
        place: Device of each op.
        pieces: Pieces of the step.
        reference: Position of each op in the reference order of `safe_schedule`.
        capacities: Usable bytes per device.
    """
    edges = edges_of(arrays, machine, place)
    storages = storages_of(arrays, place, machine.num_devices)
    reserve = reserve_of(arrays, storages, place, reference, limits(capacities))
    model = model_of(pieces, edges, reference)
    order = np.argsort(reference)
    bound, tail = placed_bound(edges, order), tails(edges, order, 0)
    return Placed(arrays, pieces, reference, edges, storages, reserve, model, tail, bound)


def scheduled(
    step: Placed, key: Float64[ndarray, " n"], slack: float, most: float = np.inf
) -> Scheduled:
    """Return the schedule of some keys; see `safe_schedule`.

    Args:
        step: The placed step.
        key: Of each op.
        slack: By how much keys may be passed over.
        most: Seconds; a schedule that takes longer may be given up, and counts as infinite.
    """
    start, order = np.zeros(len(key)), np.zeros(len(key), dtype=np.int64)
    # Times are sums in another order than tails.
    makespan = safe_schedule(
        step.edges, step.storages, step.reserve, step.arrays.workspace, key, slack,
        step.tail, most * (1 + 1e-9), start, order,
    )  # fmt: skip
    return Scheduled(makespan, float(start.mean()), start, order)


def by_modulo(
    step: Placed, choices: Sequence[tuple[float, float, float]], count: int
) -> list[Scheduled]:
    """Return the best schedules of different makespans or starts, the best first.

    Args:
        step: The placed step.
        choices: Period, delay and slack, as in `PERIODS`, `DELAYS` and `SLACKS`.
        count: How many are returned at most.
    """
    found: dict[tuple[float, float], Scheduled] = {}
    most = np.inf  # seconds of the last of the best so far
    for period, of_period in itertools.groupby(choices, lambda choice: choice[0]):
        seconds = period * step.model.period
        times = modulo_times(step.edges, step.model, seconds)
        for delay, of_delay in itertools.groupby(of_period, lambda choice: choice[1]):
            key = modulo_keys(
                step.pieces, step.edges, step.model, step.reference, times, seconds, delay
            )
            for _, _, slack in of_delay:
                check_time()
                one = scheduled(step, key, slack * step.model.period, most)
                found.setdefault((one.makespan, one.mean_start), one)
                most = sorted(found)[count - 1][0] if len(found) >= count else np.inf
    return [found[score] for score in sorted(found)[:count]]


def improved(step: Placed, best: Scheduled, schedules: int, seed: int) -> Scheduled:
    """Return the best schedule found near one by random changes of its keys.

    Keys are between the times at which ops start and the latest times at which they could, which
    moves ops together with their paths. Both get noise, and ops that no other device waits for are
    sometimes shifted against the others. A schedule that is worse by no more than a tolerance,
    which falls to zero, is changed further.

    Args:
        step: The placed step.
        best: What is changed.
        schedules: How many are tried.
        seed: Of the changes.
    """
    rng, n, now = np.random.default_rng(seed), len(best.start), best
    busy = step.edges.seconds[step.edges.seconds > 0]
    unit, filler = float(np.median(busy)), step.model.is_filler
    for turn in range(schedules):
        check_time()
        if best.makespan <= step.bound * (1 + 1e-9):
            break
        latest = now.makespan - tails(step.edges, now.order, 1)
        share = rng.choice([0.0, 0.25, 0.5, 0.75, 1.0])
        key = (1 - share) * now.start + share * latest
        key += rng.normal(0, rng.choice([0.0, 0.1, 0.3, 1.0]) * unit, n)
        key += 1e-9 * unit * step.reference
        if rng.random() < 0.5:
            shifted = filler if rng.random() < 0.5 else ~filler
            key += np.where(shifted, rng.choice([-2, -1, 1, 2, 4]) * unit, 0.0)
        most = max(now.makespan, best.makespan * (1 + TOLERANCE * (1 - turn / schedules)))
        one = scheduled(step, key, float(rng.choice(NOISY_SLACKS)) * unit, most)
        if one.makespan <= most:
            now = one
        if one.is_better(best):
            best = one
    return best


def plans_of(
    step: Placed,
    machine: Machine,
    schedules: Sequence[Scheduled],
    capacities: Sequence[int | None],
    overwrites: Int64[ndarray, "w 2"],
) -> list[tuple[float, PlanArrays]]:
    """Return simulated seconds and plan of each schedule whose plan fits.

    Args:
        step: The placed step.
        machine: Durations and links.
        schedules: Of that step.
        capacities: Usable bytes per device.
        overwrites: From `first_overwrites`.
    """
    found = list[tuple[float, PlanArrays]]()
    for one in schedules:
        check_time()
        if not np.isfinite(one.makespan):
            continue
        position = inverse_permutation(one.order)
        plan = memory_bounded_plan(
            step.arrays, machine, step.edges.place, position, capacities, overwrites
        )
        if fits(step.arrays, plan, capacities):
            found.append((run_lists(step.arrays, machine, plan).makespan, plan))
    return found


def promising(steps: Sequence[Placed]) -> list[Placed]:
    """Return the placements whose shortest schedule, of a few tried, is best."""
    probed = [by_modulo(step, PROBES, 1)[0].makespan for step in steps]
    return [steps[i] for i in np.argsort(probed, kind="stable")[:MOST_PLACEMENTS].tolist()]


def best_ordered(
    steps: Sequence[Placed],
    machine: Machine,
    capacities: Sequence[int | None],
    overwrites: Int64[ndarray, "w 2"],
    *,
    seed: int = 0,
) -> PlanArrays | None:
    """Return the fastest plan found of several placements of a step; None if none fits.

    Args:
        steps: The placed steps.
        machine: Durations and links.
        capacities: Usable bytes per device.
        overwrites: From `first_overwrites`.
        seed: Of the random changes.
    """
    left = max(min(WORK // len(steps[0].reference), MOST_SCHEDULES), LEAST_SCHEDULES)
    if len(FEW) * len(steps) > left:
        left -= len(PROBES) * len(steps)
        steps = promising(steps)
    judged = [
        (seconds, plan, step)
        for step in steps
        for seconds, plan in plans_of(
            step, machine, by_modulo(step, FEW, JUDGED), capacities, overwrites
        )
    ]
    if not judged:
        return None
    seconds, plan, step = min(judged, key=lambda one: one[0])
    if seconds <= step.bound * (1 + 1e-9):
        return plan
    left -= len(FEW) * len(steps)
    choices = list(itertools.product(PERIODS, DELAYS, SLACKS))
    if left > len(choices):
        found = by_modulo(step, choices, JUDGED)
        left -= len(choices)
        starts, each = found[:STARTS], left // STARTS
        better = [improved(step, one, each, seed + i) for i, one in enumerate(starts)]
        plans = plans_of(step, machine, [*found, *better], capacities, overwrites)
        best = min(plans, key=lambda one: one[0], default=(seconds, plan))
        plan = best[1] if best[0] < seconds else plan
    return plan
