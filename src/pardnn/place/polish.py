"""Polish: a plan made faster by small changes, each judged by simulation; never worse.

A plan is a device per group and one global order of all ops; each op starts when its device is free
and its inputs have arrived. Again and again an op of the critical path (the chain of ops and
messages that ends last) is given to another device, exchanged with an op that runs at about the
same time, or moved earlier or later in the order. The time of the changed plan is simulated from
the first op concerned on, and given up as soon as an op ends too late for the rest. A change is
kept if the step is slower than the best one seen by no more than a tolerance, which falls to zero
(record-to-record travel).

References: Dueck, "New optimization heuristics", J. Computational Physics 1993; changes along the
critical path: van Laarhoven, Aarts, Lenstra, "Job shop scheduling by simulated annealing",
Operations Research 1992.

Before that, HEFT is run a few times by the bottom levels of the placement so far, in which edges
within a device cost nothing.

Deterministic for a seed and a number of changes. Links do not contend in the search; the judge
compares the results as they are. O(ops + edges) per change at worst.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int64
from numpy import ndarray

from pardnn.graph.csr import GraphArrays, transposed
from pardnn.graph.ir import Graph
from pardnn.place.baseline import closed_arrays, runnable
from pardnn.place.fitting import fit_candidate, fits
from pardnn.place.heft import heft_kernel, static_timeline
from pardnn.place.polish_kernel import Task, search_kernel, times_kernel
from pardnn.place.schedule import first_overwrites, ordered_plan
from pardnn.plan.plan import PlanArrays
from pardnn.sim.bounds import lower_bound_seconds
from pardnn.sim.engine import run_lists
from pardnn.sim.levels import bottom_levels
from pardnn.sim.machine import Machine, fastest_seconds

#: Simulated ops per call if no number of changes is given: 1 to 3 s.
WORK = 100_000_000
#: Changes per op, at most: small graphs need no more.
CHANGES_PER_OP = 100
#: The changes are tried in so many rounds; memory is looked at after each.
ROUNDS = 8
#: Tolerance at the start of a round, as a fraction of the makespan. Measured on 1,000 ops, K = 8,
#: CCR 1 and 10: makespan after / before 0.953 at 0, 0.945 at 0.005 and 0.01, 0.962 at 0.03.
TOLERANCE = 0.005
#: Passes of HEFT by the bottom levels of the placement so far.
PASSES = 8


def changes_for(num_ops: int) -> int:
    """Return the number of changes that are tried by default."""
    return min(WORK // num_ops, CHANGES_PER_OP * num_ops)


def polish(
    graph: Graph,
    machine: Machine,
    plan: PlanArrays,
    capacities: list[int | None],
    *,
    seed: int = 0,
    changes: int | None = None,
) -> PlanArrays:
    """Return a plan that is no slower and fits wherever the given one does.

    Args:
        graph: The graph.
        machine: Durations and links.
        plan: A valid plan.
        capacities: Usable bytes of each device; None is unlimited.
        seed: Of the choice of changes.
        changes: How many to try; None for `changes_for`.
    """
    arrays = closed_arrays(graph)
    overwrites = first_overwrites(graph)
    task = task_of(arrays, machine)
    bound = lower_bound_seconds(arrays, machine) * (1 + 1e-9)
    timeline = run_lists(arrays, machine, plan)
    best = _Found(plan, timeline.makespan, np.argsort(timeline.dispatch, kind="stable"))
    place = plan.place
    for _ in range(PASSES if machine.num_devices > 1 else 0):
        if best.makespan <= bound:
            return best.plan
        place, order = ranked_by(arrays, machine, task.runs, place)
        best = _better(best, arrays, machine, place, order, capacities, overwrites)
    each = (changes_for(arrays.num_ops) if changes is None else changes) // ROUNDS
    state = 1 + seed % 2147483646
    for _ in range(ROUNDS if machine.num_devices > 1 else 0):
        if best.makespan <= bound:
            break
        place, order = best.plan.place.copy(), best.order.copy()
        state = search_kernel(arrays, machine, task, place, order, each, TOLERANCE, state)
        best = _better(best, arrays, machine, place, order, capacities, overwrites)
    return best.plan


class _Found(NamedTuple):
    plan: PlanArrays
    makespan: float
    order: Int64[ndarray, " n"]


def _better(
    best: _Found,
    arrays: GraphArrays,
    machine: Machine,
    place: Int64[ndarray, " n"],
    order: Int64[ndarray, " n"],
    capacities: list[int | None],
    overwrites: Int64[ndarray, "w 2"],
) -> _Found:
    """Return the better of what was known and a placement with an order, if that fits."""
    plan = _planned(arrays, machine, place, order, capacities, overwrites)
    if plan is None:
        return best
    makespan = run_lists(arrays, machine, plan).makespan
    return _Found(plan, makespan, order) if makespan < best.makespan else best


def ranked_by(
    arrays: GraphArrays,
    machine: Machine,
    runs: Bool[ndarray, "g k"],
    place: Int64[ndarray, " n"],
) -> tuple[Int64[ndarray, " n"], Int64[ndarray, " n"]]:
    """Return HEFT's placement, and its order, by the bottom levels of another placement.

    Args:
        arrays: The graph, with closed groups.
        machine: Durations and links.
        runs: Which devices run which group.
        place: The other placement.
    """
    n = arrays.num_ops
    position = np.empty(n, dtype=np.int64)
    position[arrays.topological] = np.arange(n)
    order = np.lexsort((position, -bottom_levels(arrays, machine, place)))
    found = np.full(n, -1, dtype=np.int64)
    heft_kernel(arrays, machine, runs, order, found, np.zeros(n), np.zeros(n))
    return found, order


def task_of(arrays: GraphArrays, machine: Machine) -> Task:
    """Return what the search needs to know; `arrays` with closed groups."""
    n = arrays.num_ops
    free = machine._replace(
        latency=np.zeros_like(machine.latency),
        bandwidth=np.full_like(machine.bandwidth, np.inf),
    )
    members = transposed(np.arange(n + 1), arrays.group, int(arrays.group.max()) + 1)
    tail = bottom_levels(arrays, free) - fastest_seconds(machine)
    return Task(runnable(arrays, machine), *members, tail)


def _planned(
    arrays: GraphArrays,
    machine: Machine,
    place: Int64[ndarray, " n"],
    order: Int64[ndarray, " n"],
    capacities: list[int | None],
    overwrites: Int64[ndarray, "w 2"],
) -> PlanArrays | None:
    start, finish = np.zeros(len(order)), np.zeros(len(order))
    times_kernel(arrays, machine, place, order, start, finish)
    dispatch = np.empty(len(order), dtype=np.int64)
    dispatch[order] = np.arange(len(order))
    timeline = static_timeline(arrays, machine, place, start, finish, dispatch)
    plan = ordered_plan(arrays, machine.num_devices, place, timeline, overwrites)
    if fits(arrays, plan, capacities):
        return plan
    return fit_candidate(arrays, machine, place, timeline, capacities, overwrites)
