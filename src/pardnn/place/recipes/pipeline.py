"""Pipelines as experts build them: stages and a schedule, without search.

Problem: a recipe consists of stages and passes; a plan places and orders ops.
Idea: take stages of the whole step (`stages`) and the schedule's row for each device (`schedules`),
and assign every op of the cut graph to its unit (`units`). Ops of a unit run in the order of the
graph, the update after all units. Ops that an earlier unit needs run with that unit: all of a
batch's labels before the first gradient of a mean, all pieces before a batch norm.
Complexity: O((ops + edges) log ops).
Reference: see `schedules`.
Deviations: stages are balanced by seconds, and by seconds and the bytes that they hold; the fastest
plan that fits is kept.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float64, Int64
from numpy import ndarray

from pardnn.errors import InfeasibleError
from pardnn.graph.csr import GraphArrays
from pardnn.graph.ir import Graph
from pardnn.kernels.sorting import inverse_permutation
from pardnn.place.colocation import closed_arrays, legal_placement, runnable
from pardnn.place.decision import Decision
from pardnn.place.ordering.edges import edges_of, placed_bound
from pardnn.place.ordering.fit import excess_bytes
from pardnn.place.ordering.memory_bounded import memory_bounded_plan
from pardnn.place.ordering.schedule import first_overwrites
from pardnn.place.recipes.phases import BACKWARD, FORWARD, SOURCE, WEIGHT, Phases, phases_of
from pardnn.place.recipes.schedules import SCHEDULES, Rows, Schedule, unit_times
from pardnn.place.recipes.stages import Stages, stages_of
from pardnn.place.recipes.units import Units, units_of
from pardnn.sim.engine import run_lists
from pardnn.sim.levels import slowest_link
from pardnn.sim.machine import Machine

#: How stages are balanced: how much the bytes that they hold count beside their seconds, and how
#: much what they send does against the seconds of the slowest link.
BALANCES = ((0.0, 1.0), (0.7, 1.0), (0.0, 16.0), (0.7, 16.0))

#: Number of stages, seconds per byte that they send, and weight of memory.
Balance = tuple[int, float, float]
KnownStages = dict[tuple[Balance, frozenset[str]], Stages]
KnownUnits = dict[Balance, Units]

#: What a pass runs.
PHASES = {"F": (FORWARD,), "I": (BACKWARD,), "W": (WEIGHT,), "B": (BACKWARD, WEIGHT)}


@dataclass(frozen=True, eq=False)
class CutStep:
    """A step whose batch is cut, beside the whole one.

    Attributes:
        whole: The captured step.
        seconds: Of each of its ops.
        cut: The graph in pieces; the same where there is one piece.
        batched: Tensors of the whole graph that are in pieces.
        pieces: How many.
        stages: Of the whole step, by how they are balanced and which tensors are in pieces: the
            same for any number of pieces.
        units: Unit of each op, by how stages are balanced: schedules with the same number of stages
            share them.
    """

    whole: Graph
    seconds: Float64[ndarray, " n"]
    cut: Graph
    batched: frozenset[str]
    pieces: int
    stages: KnownStages = field(default_factory=KnownStages, repr=False)
    units: KnownUnits = field(default_factory=KnownUnits, init=False, repr=False)

    @functools.cached_property
    def phases(self) -> Phases:
        """Of each op of the whole graph."""
        return phases_of(self.whole, self.batched)


def place_pipeline(
    step: CutStep,
    machine: Machine,
    capacities: list[int | None],
    name: str,
    *,
    few: bool = False,
    below: float = np.inf,
) -> Decision:
    """Return the plan of a schedule by name.

    Args:
        step: What is placed.
        machine: Durations and links of the cut graph.
        capacities: Usable bytes of each device; None is unlimited.
        name: A key of `SCHEDULES`.
        few: Whether one piece may leave devices idle: only one stage works at a time, and fewer
            stages send less.
        below: Seconds; stages for which no order can take less are left out.

    Raises:
        InfeasibleError: E301, if it does not fit or is not below; E302, if an op can run nowhere.
        UsageError: E227, if the schedule needs more pieces.
    """
    schedule = SCHEDULES[name]
    arrays = closed_arrays(step.cut)
    runs, overwrites = runnable(arrays, machine), first_overwrites(step.cut)
    best, shortest, missing, longest = None, np.inf, np.inf, 0.0
    most = machine.num_devices
    halves = [most >> power for power in range(most.bit_length() - 1)] or [most]
    counts = halves if few and step.pieces == 1 else [most]
    for devices, units in ((k, units) for k in counts for units in staged(step, machine, name, k)):
        rows = schedule.rows(devices, step.pieces)
        place = legal_placement(arrays, runs, _devices(schedule, devices)[units.stage])
        if np.isfinite(below):
            bound = placed_bound(edges_of(arrays, machine, place), arrays.topological)
            if bound >= below:
                longest = max(longest, bound)
                continue
        rank = unit_ranks(arrays, units, schedule, rows)
        order = np.lexsort((inverse_permutation(arrays.topological), rank))
        position = inverse_permutation(order)
        plan = memory_bounded_plan(arrays, machine, place, position, capacities, overwrites)
        excess = excess_bytes(arrays, plan, capacities)
        if excess <= 0:
            makespan = run_lists(arrays, machine, plan).makespan
            best, shortest = (plan, makespan) if makespan < shortest else (best, shortest)
        missing = min(missing, excess)
    if best is not None:
        return Decision(best)
    if longest > 0:
        raise InfeasibleError(f"no order of the stages of {name} takes less than {longest:.4g} s")
    pieces = f"{step.pieces} piece{'s' if step.pieces > 1 else ''}"
    raise InfeasibleError(
        f"{name} in {pieces} does not fit: a device would hold {missing} bytes more than allowed.\n"
        "Use more microbatches, if there are more samples, or auto, which looks for other orders."
    )


def staged(step: CutStep, machine: Machine, name: str, devices: int) -> Iterator[Units]:
    """Yield the units of the ops, for each way to balance a schedule's stages.

    Args:
        step: What is placed.
        machine: Durations and links of the cut graph.
        name: A key of `SCHEDULES`.
        devices: On how many devices.
    """
    count = devices * SCHEDULES[name].chunks
    seconds = np.where(np.isfinite(step.seconds), step.seconds, 0.0)
    byte_seconds = slowest_link(machine)[1]
    for memory, traffic in BALANCES:
        key = count, traffic * byte_seconds, memory
        if key not in step.units:
            stages = step.stages.get((key, step.batched)) or stages_of(
                step.whole, step.phases, seconds, count, byte_seconds=key[1], memory=memory
            )
            step.stages[key, step.batched] = stages
            step.units[key] = units_of(step.whole, step.cut, stages)
        yield step.units[key]


def _devices(schedule: Schedule, devices: int) -> Int64[ndarray, " s"]:
    """Return the device of each stage."""
    stages = range(devices * schedule.chunks)
    return np.array([schedule.device_of(s, devices) for s in stages], dtype=np.int64)


def rows_of_plan(
    step: CutStep,
    machine: Machine,
    place: Int64[ndarray, " n"],
    orders: Sequence[Sequence[int]],
    name: str,
) -> Rows | None:
    """Return the units of each device in a plan; None if it does not follow the schedule.

    Its ops must be where the stages of the schedule are, and in the order of its units.

    Args:
        step: What was placed.
        machine: Durations and links of the cut graph.
        place: The device of each op of the cut graph.
        orders: The ops of each device, in their order.
        name: A key of `SCHEDULES`.
    """
    schedule, devices = SCHEDULES[name], machine.num_devices
    rows, device_of = schedule.rows(devices, step.pieces), _devices(schedule, devices)
    arrays = closed_arrays(step.cut)
    runs = runnable(arrays, machine)
    candidates = staged(step, machine, name, devices)
    if schedule.chunks == 1:  # devices are stages, whatever costs they were balanced by
        phase = step.phases.phase
        units = units_of(step.whole, step.cut, Stages(phase * 0, phase, 1))
        candidates = itertools.chain([units._replace(stage=place)], candidates)
    for units in candidates:
        if not np.array_equal(legal_placement(arrays, runs, device_of[units.stage]), place):
            continue
        rank = unit_ranks(arrays, units, schedule, rows)
        if all((np.diff(rank[list(row)]) >= 0).all() for row in orders):
            return rows
    return None


def unit_ranks(
    arrays: GraphArrays, units: Units, schedule: Schedule, rows: Rows
) -> Int64[ndarray, " n"]:
    """Return the turn of each op: that of its unit, or of an op that needs it if that is earlier.

    Ops that run once for all pieces come as late as their readers allow.

    Args:
        arrays: The cut graph.
        units: What its ops belong to.
        schedule: The schedule.
        rows: Its rows.
    """
    times = unit_times(rows, len(rows) * schedule.chunks)
    last = max(times.values()) + 1
    pieces = max(int(units.piece.max()), *(unit.piece for unit in times)) + 1
    turn = np.full((SOURCE + 1, len(rows) * schedule.chunks, pieces), last, dtype=np.int64)
    for unit, at in times.items():
        for phase in PHASES[unit.what]:
            turn[phase, unit.stage, unit.piece] = at
    rank = np.where(units.piece < 0, last, turn[units.phase, units.stage, units.piece])
    rank = np.where(units.phase == SOURCE, -1, rank).tolist()
    # Lists: an element of an array takes several times as long.
    outputs, inputs = arrays.output_ptr.tolist(), arrays.input_ptr.tolist()
    read, needed = arrays.input_tensor.tolist(), [last] * arrays.num_tensors
    afters, after = arrays.after_ptr.tolist(), arrays.after_op.tolist()
    for op in arrays.topological[::-1].tolist():
        now = min(rank[op], *needed[outputs[op] : outputs[op + 1]], last)
        rank[op] = now
        for tensor in read[inputs[op] : inputs[op + 1]]:
            needed[tensor] = min(needed[tensor], now)
        for first in after[afters[op] : afters[op + 1]]:
            rank[first] = min(rank[first], now)
    return np.array(rank, dtype=np.int64)
