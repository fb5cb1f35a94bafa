"""Warm starts (ours): candidates near the placement of an earlier, similar graph.

Ops with the same name stay where they ran, which is where the state that they read is; the others
go where they finish first, in the order of bottom levels. List scheduling then moves ops that are
not tied to state.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64
from numpy import ndarray

from pardnn.place.pardnn.list_scheduling import Homes, list_schedule
from pardnn.place.pardnn.problem import Problem
from pardnn.place.pardnn.step1_makespan import Candidate, improved, simulated
from pardnn.sim.levels import bottom_levels


class KnownPlaces(NamedTuple):
    """What is known about the placement beforehand.

    Attributes:
        pins: The device of each op that can be on no other; -1 for the others.
        near: The device on which each op ran before; -1 for those that did not.
        alone: Whether only placements near that one are tried.
    """

    pins: Int64[ndarray, " n"]
    near: Int64[ndarray, " n"]
    alone: bool = False


def started_near(problem: Problem, known: KnownPlaces) -> Iterator[Candidate]:
    """Yield placements near one that ran before.

    Args:
        problem: The problem, with the same pins.
        known: What is known.
    """
    a = problem.arrays
    if problem.machine.num_devices == 1:
        return
    home = problem.fixed.copy()
    ran = np.flatnonzero(known.near >= 0)[::-1]  # so that the first of a group counts
    ran = ran[problem.runs[a.group[ran], known.near[ran]] & (problem.fixed[a.group[ran]] < 0)]
    home[a.group[ran]] = known.near[ran]
    key = -bottom_levels(a, problem.machine, adjacency=problem.adjacency)
    made = list_schedule(problem, key, Homes(np.empty(0, dtype=np.int64), np.empty(0), home))
    start = simulated(problem, made.place)
    yield start
    yield improved(problem, start, problem.fixed)
