"""Pieces whose ops are cut over all devices: gradient accumulation with data parallelism.

Problem: a cut of the whole batch holds the activations of all of a device's samples at once.
Idea: the graph of the pieces is cut as the step would be, and its ops keep their order, one piece
after the other, so that a device holds the activations of its part of one piece.
Complexity: that of a cut of the graph of the pieces, for each number of pieces.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Sequence

from pardnn.errors import UsageError
from pardnn.planner.microbatches.best import Best
from pardnn.planner.microbatches.in_pieces import completed, problem_in_pieces
from pardnn.planner.outcome import Decide, Outcome
from pardnn.planner.problem import Problem
from pardnn.planner.sharded.decide import AUTO_LOCAL_OPS, MORE_LOCAL_OPS
from pardnn.planner.sharded.memory import PEAK
from pardnn.shard.mesh_of_cluster import mesh_of
from pardnn.shard.microbatch.analysis import analyse_batch
from pardnn.shard.recipes.accumulation import ACCUMULATING
from pardnn.shard.recipes.product import PRODUCTS
from pardnn.time_limit import seconds_left

#: Code of the error that a step has no batch of so many pieces.
NO_BATCH = "E226"
#: Recipes that share the samples among all devices.
SHARING = ("data-parallel", "zero-1", "zero-2", "zero-3")
#: Numbers of pieces that are tried, each twice the one before.
MOST_DOUBLINGS = 7
#: Cuts in pieces that `auto` tries, from whole parameters on every device to what holds least.
HOLDING_LESS = ("zero-1", "zero-2", "zero-3", "tofu")
#: Seconds that no plan takes: what cannot fit is then given up before it is partitioned.
LONGEST_S = 1e9


def decide_cut_pieces(problem: Problem, names: Sequence[str], decide: Decide) -> Outcome:
    """Return the best plan that cuts every op of every piece.

    Args:
        problem: What to plan; its options say how many pieces, two at least.
        names: Of `SHARDED`.
        decide: Runs them on a problem, and returns the best outcome.

    Raises:
        InfeasibleError: E301, if none fits.
        UsageError: E226, if the batch cannot be cut into that many.
    """
    wanted = problem.options.microbatches
    if wanted != "auto":
        assert wanted is not None
        return _of(problem, wanted, names, decide)
    best = Best(problem)
    best.try_(lambda: decide(problem, names))
    for number in counts():
        try:
            best.try_(lambda number=number: _of(problem, number, names, decide))
        except UsageError as error:
            if error.code != NO_BATCH or (best.found is None and best.failure is None):
                raise
            break
        if best.is_done(number):
            break
    return best.best()


def better_cut_pieces(problem: Problem, best: Outcome | None, decide: Decide) -> Outcome | None:
    """Return the best of an outcome and cuts in pieces; None if there is none.

    Takes as few pieces as fit, since more take longer. If the whole batch was tried too, cuts that
    had room for it are left out.

    Args:
        problem: What was planned, with as many pieces as its options say.
        best: The best plan without such cuts; None if none fits.
        decide: Runs algorithms on a problem, and returns the best outcome.
    """
    wanted, found, k = (
        problem.options.microbatches,
        Best(problem, best),
        problem.cluster.num_devices,
    )
    names = [
        name
        for name in HOLDING_LESS
        if k > 1 and (wanted != "auto" or name in problem.log.without_room)
    ]

    def has_no_room(number: int, name: str) -> bool:
        within = dataclasses.replace(problem, below=min(found.seconds, LONGEST_S))
        with contextlib.suppress(UsageError):  # too few samples, or no such cut
            found.try_(lambda: _of(within, number, (name,), decide))
        return found.failed is not None and PEAK in found.failed.details

    for number in counts() if wanted == "auto" else (wanted or 1,):
        local_ops = len(problem.graph.ops) * k * number
        most = AUTO_LOCAL_OPS if found.found is None else MORE_LOCAL_OPS
        if not names or local_ops > most or seconds_left() <= 0:
            break
        names = [name for name in names if has_no_room(number, name)]
    return None if found.found is None else found.best()


def counts() -> Iterator[int]:
    """Yield 2, 4, 8 and so on; the caller stops when the batch has fewer samples."""
    return (1 << power for power in range(1, MOST_DOUBLINGS + 1))


def _of(problem: Problem, count: int, names: Sequence[str], decide: Decide) -> Outcome:
    """Return the best plan with this many pieces.

    Raises:
        UsageError: E226, if a piece has fewer samples than the devices that share it.
    """
    _check_samples(problem, count, names)
    totals = all(name in ACCUMULATING for name in names)
    pieces, inner = problem_in_pieces(problem, count, None, totals=totals)
    return completed(problem, inner, pieces, decide(inner, names))


def _check_samples(problem: Problem, count: int, names: Sequence[str]) -> None:
    """Raise if pieces have fewer samples than the devices that share each."""
    shared = [name for name in names if name in (*PRODUCTS, *SHARING)]
    samples = analyse_batch(problem.graph, count).points[-1] if shared else 0
    for name in shared:
        shape = mesh_of(problem.cluster).shape
        sharing = math.prod(shape[:-1] if name in PRODUCTS else shape)
        if samples // count < sharing:
            most = samples // sharing
            instead = f"Ask for at most {most}" if most > 1 else "Plan without microbatches"
            raise UsageError(
                f"{samples} samples in {count} pieces leave {samples // count} in some pieces, "
                f"too few for {name} to share among {sharing} devices.\n"
                f"{instead}.",
                code=NO_BATCH,
            )
