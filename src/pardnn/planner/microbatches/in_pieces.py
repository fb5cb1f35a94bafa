"""A step as a problem of its pieces: the batch is cut, and costs are those of the pieces."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

from pardnn.cost.costs import Costs
from pardnn.gc_pause import collector_paused
from pardnn.graph.build import made_graph
from pardnn.graph.ir import Graph
from pardnn.place.recipes.pipeline import CutStep
from pardnn.plan.pieces import Pieces
from pardnn.plan.plan import Plan
from pardnn.planner.costs import partitioned_costs, scaled_costs
from pardnn.planner.outcome import Outcome
from pardnn.planner.problem import Problem
from pardnn.planner.recomputed import rewritten_costs
from pardnn.planner.search.log import SearchLog
from pardnn.planner.search.polished import polished
from pardnn.planner.sharded.complete import ShardedPlan
from pardnn.planner.steering.constrained import constrained
from pardnn.shard.microbatch.rewrite import cut_batch
from pardnn.sim.engine import simulate
from pardnn.sim.machine import fastest_seconds, machine_of


@collector_paused()
def problem_in_pieces(
    problem: Problem, count: int, accumulators: int | None, *, totals: bool = False
) -> tuple[Pieces, Problem]:
    """Cut the batch; what was measured of the whole ops is scaled.

    With an accumulator for each piece it is kept: rows and general placements ask for the same.
    With one for all it is where stages are searched for twice, without limits and under them.

    Args:
        problem: The step with its batch whole.
        count: Number of pieces.
        accumulators: See `cut_batch`.
        totals: See `cut_batch`.
    """
    key, is_again = (count, accumulators == 1), accumulators == 1 and problem.free is not None
    is_kept = (accumulators in (None, count) or is_again) and not totals
    known = problem.in_pieces.get(key) if is_kept else None
    if known is None:
        pieces = cut_batch(problem.graph, count, accumulators, totals=totals)
        known = pieces, _cut(problem, pieces)
    if is_kept:
        problem.in_pieces[key] = known
    pieces, inner = known
    log = SearchLog(within=problem.log, part=f"{count} pieces, ")
    return pieces, dataclasses.replace(inner, cluster=problem.cluster, log=log)


def _cut(problem: Problem, pieces: Pieces) -> Problem:
    graph, cluster, costs = problem.graph, problem.cluster, problem.costs
    cut = made_graph(graph.name, pieces.ops)
    cut = dataclasses.replace(cut, is_captured=graph.is_captured)
    if costs.is_measured:
        known = scaled_costs(graph, costs, cut)
    else:
        known = partitioned_costs(graph, cut, cluster, costs)
    return _of_pieces(problem, pieces, cut, known)


def _of_pieces(problem: Problem, pieces: Pieces, cut: Graph, costs: Costs) -> Problem:
    step = CutStep(
        problem.graph, fastest_seconds(problem.machine), cut, frozenset(pieces.batch),
        len(pieces.points) - 1, problem.step.stages,
    )  # fmt: skip
    return constrained(dataclasses.replace(problem, graph=cut, costs=costs, cut=step))


def polished_pieces(problem: Problem, outcome: Outcome) -> Outcome:
    """Improve a placement of a cut batch by local search.

    Args:
        problem: The step with its batch whole.
        outcome: From `completed`, without second calls and without state on the host.
    """
    return other_placement(
        problem, outcome, "local search from stages", lambda inner, found: polished(inner, [found])
    )


def other_placement(
    problem: Problem, outcome: Outcome, trying: str, place: Callable[[Problem, Outcome], Outcome]
) -> Outcome:
    """Return a cut batch in another placement.

    Args:
        problem: The step with its batch whole.
        outcome: From `completed`, without second calls and without state on the host.
        trying: What is tried, for people.
        place: Returns the other placement of the same in pieces.
    """
    begun, made = time.perf_counter(), outcome.sharded
    assert made is not None
    pieces = made.plan.pieces
    assert pieces is not None
    inner = _of_pieces(problem, pieces, made.graph, made.costs)
    log = SearchLog(within=problem.log, part=f"{len(pieces.points) - 1} pieces, ")
    log.trying(trying)
    found = place(dataclasses.replace(inner, log=log), outcome._replace(sharded=None))
    plan = Plan(placement={}, order=(), pieces=pieces)
    return found._replace(
        planning_s=time.perf_counter() - begun,
        sharded=made._replace(
            plan=plan, arrays=found.plan, makespan_s=found.makespan_s,
            transfer_bytes=found.transfer_bytes,
        ),
    )  # fmt: skip


def completed(problem: Problem, inner: Problem, pieces: Pieces, outcome: Outcome) -> Outcome:
    """Return an outcome with its pieces; placements are timed as measured where whole ops were.

    Args:
        problem: The step with its batch whole.
        inner: The same in pieces.
        pieces: Which.
        outcome: Of `inner`.
    """
    notes = (f"batch in {len(pieces.points) - 1} pieces", *outcome.notes)
    sharded = outcome.sharded
    if sharded is not None and sharded.plan.partition is not None:  # its local ops have their costs
        plan = dataclasses.replace(sharded.plan, pieces=pieces)
        return outcome._replace(sharded=sharded._replace(plan=plan), notes=notes)
    cluster, cut, known = problem.cluster, inner.graph, inner.costs
    is_measured = problem.costs.is_measured
    plan = outcome.sharded.plan if outcome.sharded else Plan(placement={}, order=())
    if is_measured:
        progress = inner.log.timing(outcome.algorithm)
        known = partitioned_costs(problem.graph, cut, cluster, problem.costs, progress=progress)
    if outcome.sharded is not None:  # with state on the host, or second calls of ops
        cut, whole = outcome.sharded.graph, cut
        known = rewritten_costs(whole, known, plan, cluster, cut)
    if is_measured:
        timeline = simulate(cut, machine_of(known, cluster), outcome.plan)
        outcome = outcome._replace(makespan_s=timeline.makespan)
    plan = dataclasses.replace(plan, pieces=pieces)
    return outcome._replace(
        sharded=ShardedPlan(
            plan=plan, graph=cut, costs=known, arrays=outcome.plan, makespan_s=outcome.makespan_s,
            transfer_bytes=outcome.transfer_bytes, planning_s=outcome.planning_s,
        ),
        notes=notes,
    )  # fmt: skip
