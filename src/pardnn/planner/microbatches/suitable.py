"""Which algorithms of a portfolio suit a step: some can only place equal pieces."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pardnn.place.baselines.modulo import has_pieces
from pardnn.place.ordering.pieces import pieces_of
from pardnn.planner.algorithms import OF_PIECES
from pardnn.planner.problem import Problem
from pardnn.sim.machine import fastest_seconds


def suitable_for(problem: Problem, names: Sequence[str]) -> tuple[str, ...]:
    """Return those of several algorithms that suit the pieces of a step; a single one in any case.

    Args:
        problem: What to plan.
        names: Algorithms.
    """
    if len(names) == 1:
        return tuple(names)
    return tuple(name for name in names if name not in OF_PIECES or _suits(problem, name))


def _suits(problem: Problem, name: str) -> bool:
    if name == "modulo":
        return has_pieces(problem.graph, problem.machine)
    seconds = fastest_seconds(problem.machine)
    return pieces_of(problem.graph, np.where(np.isfinite(seconds), seconds, 0.0)) is not None
