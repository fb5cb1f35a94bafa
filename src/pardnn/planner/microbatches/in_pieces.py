"""A step as a problem of its pieces: the batch is cut, and costs are those of the pieces."""

from __future__ import annotations

import dataclasses

from pardnn.graph.build import build_graph
from pardnn.place.recipes.pipeline import CutStep
from pardnn.plan.pieces import Pieces
from pardnn.planner.constrained import constrained
from pardnn.planner.costs import partitioned_costs, scaled_costs
from pardnn.planner.problem import Problem
from pardnn.planner.search_log import SearchLog
from pardnn.shard.microbatch.rewrite import cut_batch
from pardnn.sim.machine import fastest_seconds


def problem_in_pieces(
    problem: Problem, count: int, accumulators: int | None
) -> tuple[Pieces, Problem]:
    """Cut the batch; what was measured of the whole ops is scaled."""
    graph, cluster, costs = problem.graph, problem.cluster, problem.costs
    pieces = cut_batch(graph, count, accumulators)
    cut = build_graph(graph.name, pieces.ops)
    cut = dataclasses.replace(cut, is_captured=graph.is_captured)
    if costs.is_measured:
        known = scaled_costs(graph, costs, cut)
    else:
        known = partitioned_costs(graph, cut, cluster, costs)
    step = CutStep(graph, fastest_seconds(problem.machine), cut, frozenset(pieces.batch), count)
    log = SearchLog(within=problem.log, part=f"{count} pieces, ")
    inner = dataclasses.replace(problem, graph=cut, costs=known, cut=step, log=log)
    return pieces, constrained(inner)
