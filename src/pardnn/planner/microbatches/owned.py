"""A cut batch in rows: as many pieces as devices, or twice as many, and an owner of each state.

This is quick and often close to the best plan, so its time bounds the rest of the search.
"""

from __future__ import annotations

from collections.abc import Callable

from pardnn.errors import UsageError
from pardnn.place.polish.polish import polish
from pardnn.planner.microbatches.best import MOST_OPS_IN_PIECES, Best
from pardnn.planner.outcome import Decide, Outcome
from pardnn.planner.problem import Problem
from pardnn.sim.engine import simulate
from pardnn.time_limit import seconds_left

#: The algorithm that deals out pieces and states.
OWNERS = "owners"
#: Pieces per device that are tried: more pieces take less memory, and longer.
ROUNDS = (1, 2, 4)
#: Work of local search per op, in ops whose times are computed again: GPT-2, 12 layers, on 16
#: devices: with 50 a step takes 3.5 % less, with 1,000 4 %.
WORK_PER_OP = 300


def best_owned(problem: Problem, in_pieces: Callable[[int], Outcome]) -> tuple[Best, int]:
    """Return the best plan in rows with as few pieces as fit, and their number; 1 if none fits.

    Args:
        problem: The step with its batch whole.
        in_pieces: Cuts its batch, and spreads the pieces.
    """
    best, is_limited = Best(problem), any(size is not None for size in problem.capacities)
    count = 1
    for each in ROUNDS:
        number = each * problem.cluster.num_devices
        if number * len(problem.graph.ops) > MOST_OPS_IN_PIECES or number < 2:
            break
        try:
            is_better = best.try_(lambda number=number: in_pieces(number))
        except UsageError:  # no such pieces
            break
        count = number if is_better else count
        if not (best.had_no_room or (is_better and is_limited)):
            break
    return best, count


def in_rows(inner: Problem, decide: Decide) -> Outcome:
    """Spread the pieces of a cut graph, and improve the result by moves of single ops.

    Args:
        inner: The cut graph as a problem.
        decide: Runs algorithms on a problem.
    """
    outcome = decide(inner.with_options(algorithm=OWNERS), (OWNERS,))
    options, graph, machine = inner.options, inner.graph, inner.machine
    if outcome.sharded or not options.is_timed or options.policy != "order":
        return outcome
    if seconds_left() <= 0:
        return outcome
    work = WORK_PER_OP * len(graph.ops)
    plan = polish(
        graph,
        machine,
        outcome.plan,
        inner.capacities,
        seed=options.seed,
        work=work,
        near=True,
        by_period=options.objective == "period",
    )
    timeline = simulate(graph, machine, plan)
    sent = timeline.transfer_bytes(graph)
    return outcome._replace(plan=plan, makespan_s=timeline.makespan, transfer_bytes=sent)
