"""Plans with microbatches: the batch is cut in pieces, and the cut graph placed like any other."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence

from pardnn.errors import InfeasibleError, UsageError
from pardnn.graph.build import build_graph
from pardnn.place.recipes.pipeline import CutStep
from pardnn.place.recipes.schedules import suitable
from pardnn.plan.plan import plan_from_arrays
from pardnn.planner.algorithms import BEST, BEST_WHOLE, SHARDED
from pardnn.planner.costs import partitioned_costs, scaled_costs
from pardnn.planner.portfolio import Outcome
from pardnn.planner.problem import Problem
from pardnn.planner.sharded import ShardedPlan
from pardnn.shard.microbatch.rewrite import cut_batch
from pardnn.sim.engine import simulate
from pardnn.sim.machine import fastest_seconds, machine_of

#: Code of the error that a step has no batch of so many pieces.
NO_BATCH = "E226"
#: Numbers of pieces without a better plan after which `auto` tries no more.
PATIENCE = 2
#: Ops of a cut graph above which `auto` tries no more pieces.
MANY_OPS = 60_000

Decide = Callable[[Problem, Sequence[str]], Outcome]


def decide_microbatched(problem: Problem, names: Sequence[str], decide: Decide) -> Outcome:
    """Return the best plan of the numbers of pieces that are asked for.

    Args:
        problem: What to plan; its options say how many pieces.
        names: Algorithms to run.
        decide: Runs them on a problem, and returns the best outcome.

    Raises:
        InfeasibleError: E301, if none fits.
        UsageError: E226, if the batch cannot be cut in so many; E225, if state lies cut.
    """
    wanted = problem.options.microbatches
    assert wanted is not None
    placing = [name for name in names if name not in SHARDED]
    if not placing:
        raise UsageError(
            "the state lies cut over all devices, and microbatches are placed: no such plan leaves "
            "it where it is.\nPlan without microbatches.",
            code="E225",
        )
    if wanted == "auto":
        return _best(problem, names, placing, decide)
    return decide(problem, names) if wanted == 1 else _in_pieces(problem, wanted, placing, decide)


def _best(
    problem: Problem, names: Sequence[str], placing: Sequence[str], decide: Decide
) -> Outcome:
    best: Outcome | None = None
    failure: InfeasibleError | None = None
    worse, spent = 0, 0.0
    for count in _counts():
        try:
            found = (
                decide(problem, names)
                if count == 1
                else _in_pieces(problem, count, placing, decide)
            )
        except InfeasibleError as error:
            failure = failure or error
            continue
        except UsageError as error:
            if error.code != NO_BATCH:
                raise
            break
        spent += found.planning_s
        is_better = best is None or _score(problem, found) < _score(problem, best)
        best, worse = (found, 0) if is_better else (best, worse + 1)
        is_large = found.sharded is not None and len(found.sharded.graph.ops) > MANY_OPS
        if worse >= PATIENCE or is_large:
            break
    if best is None:
        assert failure is not None
        raise failure
    return best._replace(planning_s=spent)


def _counts() -> Iterator[int]:
    """Yield 1, 2, 4 and so on; an end is where the batch has fewer samples."""
    return itertools.islice((1 << power for power in itertools.count()), 8)


def _score(problem: Problem, outcome: Outcome) -> float:
    is_timed = problem.options.objective == "seconds"
    return outcome.makespan_s if is_timed else outcome.transfer_bytes


def _in_pieces(problem: Problem, count: int, placing: Sequence[str], decide: Decide) -> Outcome:
    """Cut the batch, and place the pieces; what was measured of the whole ops is scaled first."""
    graph, cluster, costs = problem.graph, problem.cluster, problem.costs
    pieces = cut_batch(graph, count)
    cut = build_graph(graph.name, pieces.ops)
    cut = dataclasses.replace(cut, is_captured=graph.is_captured)
    is_measured = costs.source == "measured"
    if is_measured:
        known = scaled_costs(graph, costs, cut)
    else:
        known = partitioned_costs(graph, cut, cluster, costs)
    step = CutStep(graph, fastest_seconds(problem.machine), cut, frozenset(pieces.batch), count)
    inner = dataclasses.replace(problem, graph=cut, costs=known, cut=step)
    if problem.options.algorithm in (BEST, BEST_WHOLE):
        placing = [*placing, *suitable(cluster.num_devices, count)]
    outcome = decide(inner, placing)
    if is_measured:
        known = partitioned_costs(graph, cut, cluster, costs)
        timeline = simulate(cut, machine_of(known, cluster), outcome.plan)
        outcome = outcome._replace(makespan_s=timeline.makespan)
    plan = dataclasses.replace(plan_from_arrays(cut, outcome.plan), pieces=pieces)
    return outcome._replace(
        sharded=ShardedPlan(
            plan=plan, graph=cut, costs=known, arrays=outcome.plan, makespan_s=outcome.makespan_s,
            transfer_bytes=outcome.transfer_bytes, planning_s=outcome.planning_s,
        ),
        notes=(f"batch in {count} pieces", *outcome.notes),
    )  # fmt: skip
