"""Step 1 of ParDNN: the placement with the shortest simulated step, ignoring memory.

Slicing, mapping and refinement as in the thesis (section 4.1.1); then list scheduling from their
result. Placements are timed by the emulator under `priority`, and the best one seen is kept,
including that on one device, so no step makes the result worse.

Deviations: the last refinement. From three starts, the clusters, plain HEFT and a pipeline's stages
(`memory_packing`), list scheduling is repeated with its own result as the homes (see
`list_scheduling`). The estimate of the time that follows an op alternates: bottom levels, and the
time left in a schedule in which every op starts as late as it can without delaying the end (Li and
Willis's forward-backward passes, EJOR 1992), which counts the queues of the devices too.

The number of passes is bounded by work, not by time. Above `MAX_OPS`, and above `MANY_OPS` if plain
HEFT is `NEAR` a bound, it is constant, so that planning takes a fixed number of walks over the
graph: list scheduling with the placement fixed replaces the emulator, clusters are refined only if
they are not far behind HEFT after mapping, and only the best start is improved.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64, Int64
from numpy import ndarray

from pardnn.kernels.jit import kernel
from pardnn.kernels.sorting import inverse_permutation
from pardnn.place.ordering.low_memory_orders import file_positions
from pardnn.place.ordering.memory_bounded import limits
from pardnn.place.ordering.schedule import free_plan
from pardnn.place.pardnn.critical_path_switch import switch_critical_path
from pardnn.place.pardnn.list_scheduling import (
    Homes,
    ListSchedule,
    list_schedule,
    list_schedule_timeline,
)
from pardnn.place.pardnn.mapping import map_clusters, placement
from pardnn.place.pardnn.memory_packing import packed_place
from pardnn.place.pardnn.problem import Problem, heaviest_first
from pardnn.place.pardnn.slicing import slice_graph
from pardnn.place.pardnn.swaps import swap_clusters
from pardnn.place.pardnn.view_priority import with_bases
from pardnn.sim.bounds import work_seconds
from pardnn.sim.dynamic import emulate
from pardnn.sim.engine import run_lists
from pardnn.sim.levels import bottom_levels
from pardnn.sim.timeline import Timeline

#: Ops times passes of list scheduling that one start may cost, and the most passes.
PASS_OPS, MAX_PASSES = 600_000, 40
#: Ops above which the number of walks over the graph is constant, and the passes there.
MANY_OPS, MIN_PASSES = 50_000, 2
#: Graphs up to `MAX_OPS` get the whole search anyway, unless plain HEFT is `NEAR` the work
#: spread over all devices, which no plan beats: at 57,000 ops (TRN-2) a third faster plan for 1 s.
MAX_OPS, NEAR = 100_000, 1.01
#: Times the makespan of HEFT: large graphs whose clusters, mapped, are slower are not refined.
#: Measured on 24 graphs of 60,000 ops, on 64 machines in all: swaps and switches gain less than
#: 1 % on average, 6 % at most.
REFINED_WITHIN = 1.05
#: A start is given up after this many passes without a better schedule.
PATIENCE = 6
#: Passes before the estimate of what comes after an op changes.
TURN = 4
#: Rounds of critical-path switches without a faster step after which they end.
SWITCH_PATIENCE = 3


class Candidate(NamedTuple):
    """A placement and its simulated schedule.

    Attributes:
        place: Device of each op.
        order: Ops in the order of their starts, a topological one.
        makespan: Seconds.
        schedule: Times; those of messages too, unless `timeline_of` has yet to add them.
    """

    place: Int64[ndarray, " n"]
    order: Int64[ndarray, " n"]
    makespan: float
    schedule: Timeline | ListSchedule


def partition(problem: Problem) -> tuple[list[Candidate], dict[str, float]]:
    """Return candidates, the fastest first, and the seconds that each step took.

    Args:
        problem: The problem.
    """
    seconds: dict[str, float] = {}
    found: list[Candidate] = []
    few = problem.arrays.num_ops > MANY_OPS and problem.machine.num_devices > 1
    heft = ((_heft, "heft"),) if few else ()
    steps = (
        (_one_device, "single"),
        *heft,
        (_clustered, "clusters"),
        (_list_scheduled, "list_scheduling"),
    )
    for step, name in steps:
        begin = time.perf_counter()
        found += step(problem, found, seconds)
        seconds.setdefault(name, time.perf_counter() - begin)
    return sorted(found, key=lambda candidate: candidate.makespan), seconds


def is_short(problem: Problem, makespan: float) -> bool:
    """Return whether the number of passes is fixed: see the module's docstring.

    Args:
        problem: The problem.
        makespan: Seconds of a plan found without search.
    """
    n = problem.arrays.num_ops
    near = makespan <= NEAR * work_seconds(problem.machine)
    return n > MAX_OPS or (n > MANY_OPS and near)


def timeline_of(problem: Problem, candidate: Candidate) -> Timeline:
    """Return the complete timeline of a candidate."""
    schedule = candidate.schedule
    return (
        list_schedule_timeline(problem, schedule)
        if isinstance(schedule, ListSchedule)
        else schedule
    )


def emulated(problem: Problem, place: Int64[ndarray, " n"]) -> Candidate:
    """Simulate a placement under the emulator's `priority`."""
    key = _priorities(problem, place)
    return _timed(place, emulate(problem.arrays, problem.machine, place, key, problem.adjacency))


def simulated(problem: Problem, place: Int64[ndarray, " n"]) -> Candidate:
    """Simulate a placement by the emulator, or in a large graph by list scheduling."""
    if problem.arrays.num_ops <= MAX_OPS:
        return emulated(problem, place)
    return in_order(problem, place, _priorities(problem, place))


def _priorities(problem: Problem, place: Int64[ndarray, " n"]) -> Float64[ndarray, " n"]:
    key = -bottom_levels(problem.arrays, problem.machine, place, problem.adjacency)
    return with_bases(problem.views, key, place)


def in_order(
    problem: Problem, place: Int64[ndarray, " n"], key: Float64[ndarray, " n"]
) -> Candidate:
    """Simulate a placement that runs its ops in an order, without memory limits.

    Args:
        problem: The problem.
        place: Device of each op.
        key: Smallest first; never decreases along an edge.
    """
    fixed = np.empty(len(problem.runs), dtype=np.int64)
    fixed[problem.arrays.group] = place
    homes = Homes(np.empty(0, dtype=np.int64), np.empty(0), fixed)
    return _one_pass(problem, key, homes)


def _timed(place: Int64[ndarray, " n"], timeline: Timeline) -> Candidate:
    order = inverse_permutation(timeline.dispatch)
    return Candidate(place, order, timeline.makespan, timeline)


def _one_device(
    problem: Problem, found: list[Candidate], seconds: dict[str, float]
) -> Iterator[Candidate]:
    """One device: the fastest of those that can run every op."""
    totals = problem.machine.seconds.sum(axis=1)[problem.machine.device_class]
    device = int(totals.argmin())
    if not np.isfinite(totals[device]):
        return
    place = np.full(problem.arrays.num_ops, device, dtype=np.int64)
    if problem.arrays.num_ops <= MANY_OPS:
        yield emulated(problem, place)
        return
    # One device is never idle, in any order: the file's needs least memory.
    order = problem.arrays.topological
    finish, start = np.empty(len(place)), np.zeros(len(place))
    finish[order] = np.cumsum(problem.machine.seconds[problem.machine.device_class[device]][order])
    start[order[1:]] = finish[order[:-1]]
    made = ListSchedule(place, start, finish, order)
    yield Candidate(place, order, made.makespan, made)


def _heft(
    problem: Problem, found: list[Candidate], seconds: dict[str, float]
) -> Iterator[Candidate]:
    """List scheduling without homes."""
    anywhere = np.full(len(problem.runs), -1, dtype=np.int64)
    key = -bottom_levels(problem.arrays, problem.machine, adjacency=problem.adjacency)
    yield _one_pass(problem, key, Homes(np.empty(0, dtype=np.int64), np.empty(0), anywhere))


def _clustered(
    problem: Problem, found: list[Candidate], seconds: dict[str, float]
) -> Iterator[Candidate]:
    """Slicing, mapping, swaps and critical-path switches: the fastest of their placements."""
    k = problem.machine.num_devices
    clock = _Clock(seconds)
    clusters = slice_graph(problem, k)
    if problem.arrays.num_ops > MANY_OPS:
        clusters = heaviest_first(problem, clusters)
    clock.lap("slicing")
    device, cluster_graph = map_clusters(problem, clusters)
    clock.lap("mapping")
    best = simulated(problem, placement(problem, clusters, device))
    heft_makespan = found[-1].makespan if found else np.inf
    short = is_short(problem, heft_makespan)
    if short and best.makespan > REFINED_WITHIN * heft_makespan:
        clock.lap("refinement")
        yield best
        return
    swapped = swap_clusters(problem, clusters, cluster_graph, device)
    other = simulated(problem, placement(problem, clusters, swapped))
    best = min(best, other, key=lambda candidate: candidate.makespan)
    place, idle = best.place, 0
    for _ in range(1 if short else k):
        place, switched = switch_critical_path(problem, place)
        if switched == 0 or idle == SWITCH_PATIENCE:
            break
        other = simulated(problem, place)
        idle += 1
        if other.makespan < best.makespan:
            best, idle = other, 0
    clock.lap("refinement")
    yield best


def _list_scheduled(
    problem: Problem, found: list[Candidate], seconds: dict[str, float]
) -> Iterator[Candidate]:
    if problem.machine.num_devices == 1:
        return
    clustered = found[-1]  # now: the list grows while this generator runs
    anywhere = np.full(len(problem.runs), -1, dtype=np.int64)
    if problem.arrays.num_ops > MANY_OPS:
        start = min(found[-2:], key=lambda start: start.makespan)
        if is_short(problem, start.makespan):
            yield improved(problem, start, anywhere)
            return
        heft = found[-2]
    else:
        (heft,) = _heft(problem, found, seconds)
        yield heft
    unlimited = limits([None] * problem.machine.num_devices)
    packed = packed_place(problem, file_positions(problem.arrays), unlimited)
    for start in (clustered, heft, emulated(problem, packed)):
        yield improved(problem, start, anywhere)


def improved(problem: Problem, start: Candidate, fixed: Int64[ndarray, " g"]) -> Candidate:
    """Return the fastest of the schedules that repeated list scheduling finds from a start.

    Args:
        problem: The problem.
        start: Any candidate.
        fixed: Device of each group, -1 where it is free.
    """
    few = is_short(problem, start.makespan)
    passes = MIN_PASSES if few else min(PASS_OPS // problem.arrays.num_ops, MAX_PASSES)
    best = current = start
    shortest, idle = np.inf, 0  # of the passes alone: the first may be worse than the start
    for number in range(passes):
        key, left = time_left(problem, current, by_queue=number // TURN % 2 == 0)
        key = with_bases(problem.views, key, problem.arrays.group)
        current = _one_pass(problem, key, Homes(current.place, left, fixed))
        idle += 1
        if current.makespan < shortest * (1 - 1e-12):
            shortest, idle = current.makespan, 0
        if current.makespan < best.makespan:
            best = current
        if idle == PATIENCE:
            break
    if few and best.makespan <= NEAR * work_seconds(problem.machine):
        return best  # the emulator takes 1.2 s per million ops
    other = emulated(problem, best.place)
    return other if other.makespan < best.makespan else best


def time_left(
    problem: Problem, current: Candidate, *, by_queue: bool
) -> tuple[Float64[ndarray, " n"], Float64[ndarray, " n"]]:
    """Return the next pass's keys, and the seconds from each op's start to the end of the step.

    Args:
        problem: The problem.
        current: A schedule.
        by_queue: Whether ops wait for those that follow on their device, too.
    """
    machine, successors = problem.machine, problem.adjacency.successors
    if not by_queue or not np.isfinite(current.makespan):  # infinite where a link is missing
        left = bottom_levels(problem.arrays, machine, current.place, problem.adjacency)
        return -left, left
    late = np.empty(len(current.order))
    _latest_starts_kernel(
        current.order, successors.ptr, successors.edge, machine.seconds, machine.device_class,
        machine.latency, machine.bandwidth, current.place, current.makespan, late,
    )  # fmt: skip
    return late, current.makespan - late


def _one_pass(problem: Problem, key: Float64[ndarray, " n"], homes: Homes) -> Candidate:
    made = list_schedule(problem, key, homes)
    if not problem.machine.serial:
        return Candidate(made.place, made.order, made.makespan, made)
    # The pass ignores contention on the links; the simulator does not.
    position = inverse_permutation(made.order)
    plan = free_plan(problem.arrays, problem.machine.num_devices, made.place, position)
    return _timed(made.place, run_lists(problem.arrays, problem.machine, plan))


class _Clock:
    """Adds the time since the last lap to a step's name."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self.seconds = seconds
        self.begin = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name] = now - self.begin
        self.begin = now


@kernel
def _latest_starts_kernel(
    order: Int64[ndarray, " n"],
    successor_ptr: Int64[ndarray, " p"],
    successor: Int64[ndarray, "x 3"],
    seconds: Float64[ndarray, "f n"],
    device_class: Int64[ndarray, " k"],
    latency: Float64[ndarray, "k k"],
    bandwidth: Float64[ndarray, "k k"],
    place: Int64[ndarray, " n"],
    makespan: float,
    late: Float64[ndarray, " n"],
) -> None:
    """Fill the latest starts that keep each device's order and the end of the step."""
    free = np.full(len(device_class), makespan)
    for i in range(len(order) - 1, -1, -1):
        op = order[i]
        d = place[op]
        finish = free[d]
        for e in range(successor_ptr[op], successor_ptr[op + 1]):
            q, comm = place[successor[e, 0]], 0.0
            if q != d:
                comm = latency[d, q] + max(successor[e, 2], 0) / bandwidth[d, q]
            finish = min(finish, late[successor[e, 0]] - comm)
        late[op] = finish - seconds[device_class[d], op]
        free[d] = late[op]
