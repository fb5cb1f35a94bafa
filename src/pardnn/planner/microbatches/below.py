"""What a known plan says of plans in pieces: which are cut, tried and improved at all."""

from __future__ import annotations

import dataclasses
import math

from pardnn.errors import InfeasibleError
from pardnn.graph.ir import Graph
from pardnn.place.polish.polish import FEW_OPS
from pardnn.plan.pieces import Pieces
from pardnn.planner.microbatches.best import TooManyPiecesError
from pardnn.planner.microbatches.in_pieces import problem_in_pieces
from pardnn.planner.problem import Problem
from pardnn.sim.bounds import lower_bound_seconds, work_seconds

#: Local search moves ops to other devices, so it may go below the bound of what it starts from: of
#: a mixture of experts on 4 devices, from 1F1B's 18.0 ms to 13.4. Only what is farther off is left
#: out.
FAR = 1.6
#: The same above `FEW_OPS`, where fitting and local search take seconds: of five models of 12
#: layers on 16 devices no plan from farther off came below the best one known.
FAR_OF_LARGE = 1.25


def far(graph: Graph) -> float:
    """Return how many times the best known seconds a plan may take to be improved.

    Args:
        graph: What is planned.
    """
    return FAR if len(graph.ops) <= FEW_OPS else FAR_OF_LARGE


def only_below(problem: Problem, seconds: float) -> Problem:
    """Return the problem of finding a faster plan; with second calls, slower ones lead there.

    Args:
        problem: What is planned.
        seconds: Of the known plan.
    """
    options = problem.options
    if options.recompute or options.offload or options.objective != "seconds":
        return problem
    return dataclasses.replace(problem, below=seconds)


def cut_below(
    problem: Problem, count: int, accumulators: int | None, below: float
) -> tuple[Pieces, Problem]:
    """Cut the batch, if a plan of its pieces may be faster than a known one.

    Where stages of as many pieces had too much work, with one accumulator for each sum, nothing is
    cut: more accumulators take no less.

    Args:
        problem: The step with its batch whole.
        count: Pieces.
        accumulators: See `cut_batch`.
        below: Seconds of the known plan.

    Raises:
        InfeasibleError: E301, if no plan may be.
    """
    known = problem.work_in_pieces.get(count, 0.0)
    if problem.options.objective == "seconds" and known >= below:
        why = f"no plan takes less than {known:.4g} s"
        problem.log.note(f"{count} pieces, all", None, why)
        raise TooManyPiecesError(why)
    pieces, inner = problem_in_pieces(problem, count, accumulators)
    if accumulators == 1:
        problem.work_in_pieces[count] = work_seconds(inner.machine)
    check_may_be_below(inner, below)
    return pieces, inner


def check_may_be_below(inner: Problem, seconds: float) -> None:
    """Raise if no plan of a cut graph can be faster than a known one.

    Small calls keep a device less busy than one large call, so the more pieces there are, the
    longer all devices compute, whatever the plan.

    Args:
        inner: The cut graph as a problem.
        seconds: Of the known plan.

    Raises:
        InfeasibleError: E301, if none can; `TooManyPiecesError` if the work alone takes as long.
    """
    if inner.options.objective != "seconds" or not math.isfinite(seconds):
        return
    work = work_seconds(inner.machine)
    bound = max(work, lower_bound_seconds(inner.graph.arrays, inner.machine))
    if bound >= seconds:
        why = f"no plan takes less than {bound:.4g} s"
        inner.log.note("all", None, why)
        raise TooManyPiecesError(why) if work >= seconds else InfeasibleError(why)
