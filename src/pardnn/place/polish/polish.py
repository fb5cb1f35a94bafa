"""Polish: local search from a plan, by small changes; never worse.

First, components of ops that exchange much data are moved as a whole (`components`). Then HEFT is
run a few times with the bottom levels of the placement so far, in which edges within a device cost
nothing. Then, repeatedly, an op on a longest path (of inputs, messages and queues) goes to the
device and the place in its queue where the longest path through it is shortest; every device and
the places near its time are evaluated without a simulation. Groups change device as a whole, and
ops change places with others that run at about the same time; these changes are simulated. A change
is kept if the step is slower than the best one seen by no more than a tolerance, which falls to
zero (record-to-record travel). The search ignores contention and memory; after each round the plan
is completed, fitted to the memory if it must be, and kept if the simulator finds it faster. If
links carry one transfer at a time, some rounds assume slower links, to account for queues.

References: Mastrolilli, Gambardella, "Effective neighbourhood functions for the flexible job shop
problem", J. Scheduling 2000 (an op taken out of its queue lengthens no path, so both its ends are
known); Dueck, "New optimization heuristics", J. Computational Physics 1993.

The period of consecutive steps is minimised likewise: each device begins when it does in the best
plan's late steps, and the objective is the longest time from a device's begin to its end. No plan's
period exceeds this value, and with its own begins the best plan's period equals it (Collatz and
Wielandt; Baccelli et al., 1992): a plan that is shorter with the same begins is better, and gives
the next begins.

Deterministic for a seed and a budget of work, unless a time limit ends it. O(K (fan-in + fan-out))
per op evaluated, O(ops + edges) per change at worst, mostly far less.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float64, Int64
from numpy import ndarray

from pardnn.graph.csr import GraphArrays
from pardnn.graph.ir import Graph
from pardnn.kernels.sorting import inverse_permutation
from pardnn.place.baselines.heft import heft_kernel
from pardnn.place.colocation import closed_arrays, runnable
from pardnn.place.ordering.fit import fit_candidate, fits, holds_residuals
from pardnn.place.ordering.memory_bounded import limits
from pardnn.place.ordering.schedule import first_overwrites, ordered_plan
from pardnn.place.polish.components import levels, refine, with_heavy_ones
from pardnn.place.polish.effort import NEAR, SECONDS_OF_WORK, Gains, is_far, work_for
from pardnn.place.polish.neighbourhood import (
    State,
    Task,
    fill_kernel,
    global_order,
    state_of,
    task_of,
)
from pardnn.place.polish.search import search_kernel
from pardnn.plan.plan import PlanArrays
from pardnn.sim.bounds import lower_bound_seconds, work_seconds
from pardnn.sim.engine import run_lists
from pardnn.sim.levels import bottom_levels
from pardnn.sim.machine import Machine, with_slower_links
from pardnn.sim.peak import residual_bytes
from pardnn.sim.period import period
from pardnn.sim.timeline import static_timeline
from pardnn.time_limit import seconds_left

#: The work is spent in so many rounds; the simulator looks at the plan after each.
ROUNDS = 8
#: Passes of HEFT by the bottom levels of the placement so far.
PASSES = 8
#: Where memory binds, passes and rounds end after so many without a faster plan: fitting one takes
#: longer than finding it.
PATIENCE = 2
#: Above this many ops, half as many of both: completing a plan then takes as long as a round.
MANY_OPS = 20_000
#: Tolerance at the start of a round: at most this fraction of the makespan, and at most this many
#: average ops. Measured, layered, fork-join and recurrent graphs at CCR 10: best at 0.005 to 0.02
#: for 1,000 ops, at 0 for 10,000. On 74 graphs of up to 20 ops the mean gap to the optimum fell
#: from 1.6 % with at most 0.01 to 0.4 % with at most 0.25.
TOLERANCE, TOLERANCE_OPS = 0.25, 5.0
#: Ops up to which the best two plans are polished to the end. Simulated, eight models as written on
#: 2, 4 and 8 devices: with stages among three starts 1.1 % faster than from two, 20 % at most, and
#: none slower; 0.9 % if the best alone goes on, with one 3 % slower.
FEW_OPS = 5_000
#: Two makespans that differ by less, relatively, are equal.
EQUAL = 1e-9
#: Part of the makespan that a plan may lose to have fewer messages, and no more than what these
#: take: what a message takes of its ranks is not simulated.
FOR_FEWER = 5e-3
#: Serial links: by what message times are multiplied in turn.
SLOWER = (1.0, 2.0, 1.4, 3.0)


def polish(
    graph: Graph,
    machine: Machine,
    plan: PlanArrays,
    capacities: list[int | None],
    *,
    seed: int = 0,
    work: int | None = None,
    near: bool = False,
    by_period: bool = False,
) -> PlanArrays:
    """Return a plan that is no slower, and fits if the given one does.

    No round begins after the time limit of the search (`pardnn.time_limit`).

    Args:
        graph: The graph.
        machine: Durations and links.
        plan: A valid plan.
        capacities: Usable bytes of each device; None is unlimited.
        seed: Of the choice of changes.
        work: Ops whose times are computed again; None for `work_for`.
        near: Leave out HEFT, which places all ops again, and moves of whole components.
        by_period: Whether to minimise the period instead of the makespan.
    """
    job = _job_of(graph, machine, capacities, by_period)
    work = work_for(len(graph.ops)) if work is None else work
    return _improved(job, _found(job, plan), seed, work, near=near)[0].plan


def polish_best(
    graph: Graph,
    machine: Machine,
    plans: Sequence[PlanArrays],
    capacities: list[int | None],
    *,
    seed: int = 0,
    work: int | None = None,
    known_s: float = math.inf,
    by_period: bool = False,
) -> tuple[PlanArrays, int]:
    """Polish several plans, each with a quarter of the work, and then the best with half.

    In small graphs the second best plan gets a half, too: the first part says little about which of
    two is better. In large graphs plans far above a polished one are left as they are. The second
    part moves only ops there (the rest gained nothing); none if the first gains too little.

    Args:
        graph: The graph.
        machine: Durations and links.
        plans: Valid plans, the best first.
        capacities: As in `polish`.
        seed: As in `polish`.
        work: For two plans in all; None for `work_for`.
        known_s: Seconds of the best plan known; rounds that cannot get there are left out.
        by_period: As in `polish`.

    Returns:
        The best plan found, and which of `plans` it came from. Of two about as fast it is the one
        with fewer messages, but never slower than the best of `plans`.
    """
    whole = work_for(len(graph.ops)) if work is None else work
    job = _job_of(graph, machine, capacities, by_period)
    is_large = job.arrays.num_ops > FEW_OPS
    given, found, gains = [_found(job, plan) for plan in plans], list[_Found](), Gains(0)
    for one in given:
        below = min((known_s, *(each.seconds for each in found)))
        if is_large and found and is_far(one.seconds, given[0].seconds, found[0].seconds, below):
            found.append(one)
            continue
        # The part that follows has as many rounds, of twice the work.
        better, late = _improved(job, one, seed, whole // 4, known_s=below, later=2)
        found.append(_found(job, better.plan))
        is_best = found[-1].seconds <= min(each.seconds for each in found)
        gains = late if is_best else gains
    ranked = sorted(range(len(plans)), key=lambda number: found[number].seconds)
    origin, best = ranked[0], found[ranked[0]]
    is_stuck = best.seconds >= given[origin].seconds
    is_stuck |= not gains.may_reach(best.seconds, known_s, 2 * gains.rounds)
    if best.seconds > NEAR * known_s or (is_large and is_stuck):
        return best.plan, origin
    most, half = min(one.seconds for one in given), whole // 2
    for number in _going_on(job, found, ranked):
        later, _ = _improved(job, found[number], seed + 1, half, near=is_large, known_s=known_s)
        if later.seconds < best.seconds:
            origin, best = number, _found(job, later.plan)
    return _with_fewer_messages(job, best, most).plan, origin


def _improved(
    job: _Job,
    best: _Found,
    seed: int,
    work: int,
    *,
    near: bool = False,
    known_s: float = math.inf,
    later: int = 0,
) -> tuple[_Found, Gains]:
    """Return a plan that is no slower, and what rounds gained.

    Args:
        job: What is planned.
        best: A valid plan.
        seed: As in `polish`.
        work: As in `polish`.
        near: As in `polish`.
        known_s: Seconds of a known plan; in a large graph rounds end that seem not to get there.
        later: How many times as many rounds may follow.
    """
    arrays, machine = job.arrays, job.machine
    known_s = known_s if arrays.num_ops > FEW_OPS else math.inf
    least = work_seconds(machine) if job.by_period else lower_bound_seconds(arrays, machine)
    bound = least * (1 + 1e-9)
    half = 2 if arrays.num_ops > MANY_OPS else 1
    passes, rounds = 0 if near or job.by_period else PASSES // half, ROUNDS // half
    tolerance, gains = min(TOLERANCE, TOLERANCE_OPS / arrays.num_ops), Gains(rounds)
    if not near and machine.num_devices > 1 and best.seconds > bound:
        best = _refined(job, best, 2 * (work // rounds))
    place, state, idle = best.plan.place, 1 + seed % 2147483646, 0
    for step in range(passes + rounds if machine.num_devices > 1 else 0):
        left, after = seconds_left(), passes + rounds - step + later * rounds
        if left <= 0 or best.seconds <= bound or not gains.may_reach(best.seconds, known_s, after):
            break
        idle = 0 if step == passes else idle
        if idle == PATIENCE:
            continue
        if step < passes:
            place, order = ranked_by(job, place)
        else:
            slower = SLOWER[step % len(SLOWER)] if machine.serial else 1.0
            work_now = int(min(work // rounds, left / SECONDS_OF_WORK))
            place, order, state = _searched(job, best, slower, work_now, tolerance, state)
        found, memory_binds = _better(job, best, place, order)
        if step >= passes:
            gains = gains._replace(gains=(*gains.gains, best.seconds / found.seconds))
        idle = idle + 1 if memory_binds and found is best else 0
        best = found
    return best, gains


def _going_on(job: _Job, found: Sequence[_Found], ranked: Sequence[int]) -> list[int]:
    """Return which plans are polished further, of all in order of their seconds."""
    first = found[ranked[0]].seconds
    others = [n for n in ranked[1:] if found[n].seconds > first * (1 + EQUAL)]
    return [ranked[0], *(others[:1] if job.arrays.num_ops <= FEW_OPS else [])]


def load_kernels(arrays: GraphArrays, machine: Machine) -> None:
    """Compile what `polish` runs, or load it from the cache; any small graph will do."""
    nowhere = np.zeros(arrays.num_ops, dtype=np.int64)
    state = state_of(nowhere, arrays.topological, machine.num_devices)
    task = task_of(arrays, machine)
    fill_kernel(task, state)
    refine(task, state, np.zeros(arrays.num_ops, dtype=np.int64), 1)
    search_kernel(task, state, 1, TOLERANCE, 1)


class _Job(NamedTuple):
    arrays: GraphArrays  # with closed groups
    machine: Machine
    capacities: list[int | None]
    overwrites: Int64[ndarray, "w 2"]
    runs: Bool[ndarray, "g k"]
    residual: Int64[ndarray, " n"]  # bytes
    room: Int64[ndarray, " k"]
    by_period: bool


class _Found(NamedTuple):
    """A plan.

    Attributes:
        plan: The plan.
        seconds: Its makespan or period.
        order: All ops as they are dispatched.
        begin: When each device begins, seconds; None: all at 0.
    """

    plan: PlanArrays
    seconds: float
    order: Int64[ndarray, " n"]
    begin: Float64[ndarray, " k"] | None


def _job_of(graph: Graph, machine: Machine, capacities: list[int | None], by_period: bool) -> _Job:
    arrays = closed_arrays(graph)
    residual = residual_bytes(arrays, np.arange(arrays.num_ops))
    return _Job(arrays, machine, capacities, first_overwrites(graph), runnable(arrays, machine),
                residual, limits(capacities), by_period)  # fmt: skip


def _found(job: _Job, plan: PlanArrays) -> _Found:
    seconds, begin = _judged(job, plan)
    timeline = run_lists(job.arrays, job.machine, plan, begin)
    return _Found(plan, seconds, global_order(job.arrays, timeline.dispatch), begin)


def _judged(job: _Job, plan: PlanArrays) -> tuple[float, Float64[ndarray, " k"] | None]:
    """Return the objective of a plan, in seconds, and when its devices begin."""
    if not job.by_period:
        return run_lists(job.arrays, job.machine, plan).makespan, None
    found = period(job.arrays, job.machine, plan)
    return found.seconds, found.ready


def _better(
    job: _Job, best: _Found, place: Int64[ndarray, " n"], order: Int64[ndarray, " n"]
) -> tuple[_Found, bool]:
    """Return the better of the best plan and a placement with an order, if that fits.

    Also whether memory limits delayed the latter.
    """
    a, machine = job.arrays, job.machine
    state = state_of(place, order, machine.num_devices)
    task = task_of(a, machine, begin=best.begin)
    fill_kernel(task, state)
    # Neither contention nor memory makes it any faster.
    if end_of(task, state) - task.begin.max() >= best.seconds:
        return best, False
    if not holds_residuals(job.residual, place, job.room):
        return best, True
    seconds = machine.seconds[machine.device_class[place], np.arange(a.num_ops)]
    timeline = static_timeline(
        a, machine, place, state.finish - seconds, state.finish, state.position
    )
    plan = ordered_plan(a, machine.num_devices, place, timeline, job.overwrites)
    memory_binds = not fits(a, plan, job.capacities)
    if memory_binds:
        fitted = fit_candidate(
            a, machine, place, timeline, job.capacities, job.overwrites,
            below=np.inf if job.by_period else best.seconds,
        )  # fmt: skip
        if fitted is None:
            return best, True
        plan = fitted
    found, begin = _judged(job, plan)
    return (_Found(plan, found, order, begin) if found < best.seconds else best), memory_binds


def end_of(task: Task, state: State) -> float:
    """Return when the last op ends, with what counts after it, seconds."""
    return float((state.finish + task.after[state.place]).max())


def ranked_by(
    job: _Job, place: Int64[ndarray, " n"]
) -> tuple[Int64[ndarray, " n"], Int64[ndarray, " n"]]:
    """Return HEFT's placement, and its order, by the bottom levels of another placement."""
    a, n = job.arrays, job.arrays.num_ops
    position = inverse_permutation(a.topological)
    order = np.lexsort((position, -bottom_levels(a, job.machine, place)))
    found = np.full(n, -1, dtype=np.int64)
    heft_kernel(
        a, job.machine, job.runs, order, found, np.zeros(n), np.zeros(n), residual_bytes(a),
        job.room,
    )  # fmt: skip
    return found, order


def _refined(job: _Job, best: _Found, max_work: int) -> _Found:
    """Return the plan with components of ops on other devices, if that is faster."""
    a, m = job.arrays, job.machine
    position, task = inverse_permutation(a.topological), task_of(a, m, job.room, best.begin)
    for component in levels(task):
        if max_work <= 0 or seconds_left() <= 0:
            break
        # Those first on which the others wait longest, as devices are linked: where it is faster.
        ranked = np.lexsort((position, -bottom_levels(a, m, best.plan.place)))
        states = [state_of(best.plan.place, each, m.num_devices) for each in (best.order, ranked)]
        for state in states:
            fill_kernel(task, state)
        state = min(states, key=functools.partial(end_of, task))
        max_work -= refine(task, state, component, max_work, m.serial > 0)
        best, _ = _better(job, best, state.place, state.order)
    return best


def _with_fewer_messages(job: _Job, best: _Found, most: float) -> _Found:
    """Return the plan with light ops where they exchange most data, if it is about as fast.

    Args:
        job: What is planned.
        best: The best plan.
        most: Seconds that no plan may take longer than.
    """
    task, before = task_of(job.arrays, job.machine), len(best.plan.message_tensor)
    place = with_heavy_ones(task, best.plan.place)
    if not before or np.array_equal(place, best.plan.place):
        return best
    found, _ = _better(job, best._replace(seconds=np.inf), place, best.order)
    fewer = before - len(found.plan.message_tensor)
    loss = min(FOR_FEWER * best.seconds, fewer * float(task.latency.max()))
    below = max(best.seconds, min(most, best.seconds + loss)) * (1 + EQUAL)
    return found if fewer > 0 and found.seconds <= below else best


def _searched(
    job: _Job, best: _Found, slower: float, work: int, tolerance: float, seed: int
) -> tuple[Int64[ndarray, " n"], Int64[ndarray, " n"], int]:
    """Return the best placement and order near the best plan, and the next seed."""
    m = with_slower_links(job.machine, slower)
    state = state_of(best.plan.place, best.order, m.num_devices)
    task = task_of(job.arrays, m, job.room, best.begin)
    seed = search_kernel(task, state, work, tolerance, seed)
    return state.place, state.order, seed
