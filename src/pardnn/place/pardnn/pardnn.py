"""ParDNN: place the ops of a training step on devices, then make the placement fit.

Step 1 (`step1_makespan`) minimises the simulated time: graph slicing (Algorithm 1, `slicing`),
mapping (Algorithm 2, `mapping`: `initial_merge`, then Eq. 4.2 in `level_aware_balancing`) and
refinement (`swaps`, `critical_path_switch`). Step 2 (`step2_memory`) satisfies the memory limits:
it tracks memory consumption (Eq. 4.3, `memory_tracking`), computes the bytes that would leave a
device with each op (M_pot, `memory_potential`) and moves ops until every device fits (Eqs. 4.4 and
4.5, `overflow_knapsack`).

Reference: Qararyah, Wahib, Dikbayir, Belviranli, Unat, "A computational-graph partitioning method
for training memory-constrained DNNs", Parallel Computing 2021, and Qararyah's thesis, chapter 4,
whose numbers are cited. Each file names its deviations.
"""

from __future__ import annotations

import math
import time

import numpy as np
from jaxtyping import Int64
from numpy import ndarray

from pardnn.errors import InfeasibleError
from pardnn.graph.csr import GraphArrays
from pardnn.graph.ir import Graph
from pardnn.place.colocation import colocated
from pardnn.place.decision import Decision
from pardnn.place.infeasible import infeasible
from pardnn.place.ordering.all_plans import all_placements, searched_plan
from pardnn.place.ordering.fit import fits
from pardnn.place.ordering.schedule import first_overwrites, ordered_plan
from pardnn.place.pardnn.problem import Problem, problem_of
from pardnn.place.pardnn.renumbering import (
    original_plan,
    renumbered,
    renumbered_overwrites,
    renumbering_by_priority,
)
from pardnn.place.pardnn.step1_makespan import MANY_OPS, Candidate, partition, timeline_of
from pardnn.place.pardnn.step2_memory import Task, fit_memory, nearest, overflows, start_of
from pardnn.place.pardnn.warm_start import KnownPlaces, started_near
from pardnn.plan.plan import PlanArrays
from pardnn.sim.adjacency import Adjacency, adjacency_of
from pardnn.sim.machine import Machine
from pardnn.sim.transfers import missing_link


def place_pardnn(
    graph: Graph,
    machine: Machine,
    capacities: list[int | None],
    *,
    seed: int = 0,
    known: KnownPlaces | None = None,
    below: float = math.inf,
) -> Decision:
    """Place and order a graph by ParDNN.

    Args:
        graph: The graph.
        machine: Durations and links.
        capacities: Usable bytes of each device; None is unlimited.
        seed: Not used: nothing is random.
        known: Where state is, and where ops ran before.
        below: Seconds of a known plan: if memory binds, the search ends early when it is far from
            this.

    Raises:
        InfeasibleError: E301, if no plan was found that fits; E302, if an op can run nowhere.
    """
    del seed
    overwrites = first_overwrites(graph)
    try:
        return place_arrays(graph.arrays, machine, capacities, overwrites, known, below)
    except _NothingFitsError as error:
        missing = missing_link(graph.arrays, machine, error.nearest.place)
        raise infeasible(graph, error.nearest, capacities, error.group, missing) from None


class _NothingFitsError(InfeasibleError):
    """No plan was found: what the search came nearest with."""

    def __init__(self, nearest: PlanArrays, group: Int64[ndarray, " n"]) -> None:
        super().__init__("no plan fits")
        self.nearest = nearest
        self.group = group


def place_arrays(
    arrays: GraphArrays,
    machine: Machine,
    capacities: list[int | None],
    overwrites: Int64[ndarray, "w 2"],
    known: KnownPlaces | None = None,
    below: float = math.inf,
) -> Decision:
    """Place and order a graph that is given as arrays alone.

    Args:
        arrays: The graph.
        machine: Durations and links.
        capacities: Usable bytes of each device; None is unlimited.
        overwrites: From `first_overwrites`.
        known: Where state is, and where ops ran before.
        below: See `place_pardnn`.

    Raises:
        InfeasibleError: E301, if no plan was found that fits; E302, if an op can run nowhere.
    """
    if arrays.num_ops <= MANY_OPS:
        return _place(arrays, machine, capacities, overwrites, known, time.perf_counter(), below)
    begin = time.perf_counter()
    renumbering = renumbering_by_priority(arrays, machine)
    here = renumbered(arrays, renumbering)
    seconds = np.ascontiguousarray(machine.seconds[:, renumbering.op])
    written = renumbered_overwrites(overwrites, renumbering)
    if known is not None:
        known = known._replace(pins=known.pins[renumbering.op], near=known.near[renumbering.op])
    try:
        machine = machine._replace(seconds=seconds)
        found = _place(here, machine, capacities, written, known, begin, below)
    except _NothingFitsError as error:
        error.nearest = original_plan(error.nearest, renumbering)
        error.group = error.group[renumbering.op_here]
        raise
    return found._replace(plan=original_plan(found.plan, renumbering))


def _place(
    arrays: GraphArrays,
    machine: Machine,
    capacities: list[int | None],
    overwrites: Int64[ndarray, "w 2"],
    known: KnownPlaces | None,
    begin: float,
    below: float,
) -> Decision:
    group = colocated(arrays, overwrites)
    group.setflags(write=False)
    arrays = arrays._replace(group=group)
    pins = None if known is None else known.pins
    problem = problem_of(arrays, machine, _adjacency(arrays), pins)
    seconds = {"problem": time.perf_counter() - begin}
    is_near = known is not None and known.alone and machine.num_devices > 1
    candidates, by_step = ([], {}) if is_near else partition(problem)
    seconds |= by_step
    if known is not None:
        candidates = sorted([*candidates, *started_near(problem, known)], key=_makespan)
    best, limited = candidates[0], any(limit is not None for limit in capacities)
    task = Task(problem, problem, capacities, overwrites)
    begin, start = time.perf_counter(), None
    if limited:
        task = task._replace(units=_with_views(problem, overwrites, pins))
    if limited and arrays.num_ops > MANY_OPS:
        start = start_of(task, best)
    if start is None or not overflows(start):
        timeline = timeline_of(problem, best)
        plan = ordered_plan(arrays, machine.num_devices, best.place, timeline, overwrites)
        seconds["order"] = time.perf_counter() - begin
        if np.isfinite(best.makespan) and (not limited or fits(arrays, plan, capacities)):
            return Decision(plan, 0, seconds)
        begin = time.perf_counter()
    found = fit_memory(task, candidates, start, below)
    if found is None:
        placements = all_placements(arrays, machine, capacities, problem.runs)
        found = searched_plan(arrays, capacities, overwrites, placements).plan
    seconds["memory"] = time.perf_counter() - begin
    if found is None:
        raise _NothingFitsError(nearest(task), group)
    return Decision(found, int((found.place != best.place).sum()), seconds)


def _adjacency(arrays: GraphArrays) -> Adjacency:
    """Return the edges; walked by number where that is the order of the ops."""
    adjacency = adjacency_of(arrays)
    if arrays.num_ops <= MANY_OPS:
        return adjacency
    order = np.arange(arrays.num_ops)
    return adjacency._replace(order=order, reverse=order[::-1].copy())


def _makespan(candidate: Candidate) -> float:
    return candidate.makespan


def _with_views(
    problem: Problem, overwrites: Int64[ndarray, "w 2"], pins: Int64[ndarray, " n"] | None
) -> Problem:
    if bool((problem.arrays.tensor_alias < 0).all()):
        return problem
    group = colocated(problem.arrays, overwrites, with_views=True)
    group.setflags(write=False)
    try:
        arrays = problem.arrays._replace(group=group)
        return problem_of(arrays, problem.machine, problem.adjacency, pins)
    except InfeasibleError:
        # A view runs where what it views cannot; the plan is checked as it is either way.
        return problem
