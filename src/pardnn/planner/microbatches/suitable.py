"""Which algorithms of a portfolio suit a step: some can only place equal pieces."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from pardnn.place.baselines.modulo import has_pieces
from pardnn.place.ordering.pieces import pieces_of
from pardnn.place.polish.polish import FEW_OPS
from pardnn.planner.algorithms import OF_PIECES
from pardnn.planner.problem import Problem
from pardnn.sim.machine import fastest_seconds

#: What places pieces by simple rules: of more than `FEW_OPS` ops in pieces, in 64 cases of 7 models
#: on 4 to 16 devices, it took at least 1.42 times the best plan, too long to be improved.
RULES = frozenset({"contiguous", "single", "round-robin", "layer-round-robin"})
#: What orders ops by a list and then fits them to the memory: in 14 cases of as many ops under a
#: limit, where `pardnn` came to more than 1.3 times the best plan, these came to 1.77 to 5.6 times.
LISTS = frozenset({"heft", "m-etf", "linear-clustering", "m-topo"})


def suitable_for(problem: Problem, names: Sequence[str]) -> tuple[str, ...]:
    """Return those of several algorithms that suit the pieces of a step; a single one in any case.

    Where a plan is known, simple rules do not suit many ops in pieces.

    Args:
        problem: What to plan.
        names: Algorithms.
    """
    if len(names) == 1:
        return tuple(names)
    left_out = RULES if _is_large(problem) else frozenset[str]()
    return tuple(
        name
        for name in names
        if name not in left_out and (name not in OF_PIECES or _suits(problem, name))
    )


def needs_a_near_one(problem: Problem, name: str) -> bool:
    """Whether an algorithm is tried only if one before it came near a known plan.

    Args:
        problem: What to plan.
        name: The algorithm.
    """
    is_limited = any(size is not None for size in problem.capacities)
    return name in LISTS and is_limited and _is_large(problem)


def _is_large(problem: Problem) -> bool:
    """Whether there are many ops in pieces, and a known plan."""
    is_cut, is_known = problem.cut is not None, math.isfinite(problem.below)
    return is_cut and is_known and len(problem.graph.ops) > FEW_OPS


def _suits(problem: Problem, name: str) -> bool:
    if name == "modulo":
        return has_pieces(problem.graph, problem.machine)
    seconds = fastest_seconds(problem.machine)
    return pieces_of(problem.graph, np.where(np.isfinite(seconds), seconds, 0.0)) is not None
