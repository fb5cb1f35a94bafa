"""The next plan of a running step, for another shape, flag or mode, with the state in place."""

from __future__ import annotations

import dataclasses

from pardnn.cluster import Cluster
from pardnn.errors import InfeasibleError, MismatchError, PardnnError, UsageError
from pardnn.graph.ir import Graph
from pardnn.plan.demands.named import said_of
from pardnn.plan.plan import Plan
from pardnn.plan.state_in_place import StateInPlace, bytes_alone
from pardnn.planner.algorithms import ALGORITHMS, BEST_WHOLE, SHARDED, mixed_parts
from pardnn.planner.costs import costs_for
from pardnn.planner.make_plan import make_plan
from pardnn.planner.options import PlanOptions
from pardnn.planner.problem import Problem
from pardnn.planner.start.earlier import started
from pardnn.shard.microbatch.analysis import most_pieces


def next_plan(
    graph: Graph,
    cluster: Cluster,
    options: PlanOptions,
    own: Plan | None,
    state: StateInPlace | None,
    start: Plan | None = None,
    *,
    is_first: bool = False,
) -> Plan:
    """Plan a graph of a step, with the state where it is if that fits.

    If it does not fit, the plan is free, and the runtime moves the state. Options were chosen for
    the first graph of a step. Where they make no sense for a later one, such as a batch of one
    sample or an evaluation, they are left out: missing names, layouts (state has and keeps them),
    pieces without samples; and an algorithm is replaced by the best of its kind.

    Args:
        graph: Captured again.
        cluster: What it runs on.
        options: Of the first plan.
        own: The first plan, if a user made it: its kind, algorithm and reserve count.
        state: What is on the devices; None for the first plan.
        start: A plan to start the first one from; what it decides and the user does not also
            applies to the others.
        is_first: Whether it is the first graph of its step; only then are useless options errors.

    Raises:
        InfeasibleError: E301, if no plan fits.
        UsageError: E2xx.
    """
    if own is not None:
        options = dataclasses.replace(
            options, algorithm=_algorithm(own), objective=own.objective, seed=own.seed,
            reserve=own.reserve,
            microbatches=len(own.pieces.points) - 1 if own.pieces else None,
            recompute=options.recompute or own.recompute is not None,
            offload=options.offload or own.offload is not None,
            constraints=own.constraints or options.constraints,
        )  # fmt: skip
    options = options if start is None else started(options, start)
    costs = costs_for(graph, cluster, options.costs)
    if state is None:
        return make_plan(Problem(graph, cluster, costs, options, start=start))[0]
    options = _possible(graph, options)
    tries = [options] if is_first else _meant(graph, options)
    failure: PardnnError | None = None
    for each in tries:
        for lies in (state, bytes_alone(graph, state)):
            try:
                return make_plan(Problem(graph, cluster, costs, each, lies))[0]
            except (InfeasibleError, MismatchError, UsageError) as error:
                failure = error
        if not isinstance(failure, UsageError):
            break
    assert failure is not None
    raise failure


def _meant(graph: Graph, options: PlanOptions) -> list[PlanOptions]:
    """Return options of another graph for this one; then fewer, if there is no plan with them."""
    said = said_of(graph, [each for each in options.constraints if each.kind != "layout"])
    unpieced = tuple(each for each in said if each.kind != "pieces" or each.price_s is not None)
    pieces = [each for each in said if each not in unpieced]
    counts = [most_pieces(graph, each.count or 1) for each in pieces]
    pieces = [dataclasses.replace(e, count=n) for e, n in zip(pieces, counts, strict=True) if n > 1]
    best = "tofu" if options.algorithm in SHARDED or mixed_parts(options.algorithm) else BEST_WHOLE
    return [
        dataclasses.replace(options, constraints=(*unpieced, *pieces)),
        dataclasses.replace(options, constraints=unpieced, algorithm=best, microbatches=None),
    ]


def _algorithm(own: Plan) -> str:
    """Return the algorithm of a plan; of one written by hand, the best of its kind."""
    known = SHARDED if own.partition is not None else ALGORITHMS
    name = own.algorithm or ""
    if name in known or (mixed_parts(name) and own.partition is not None):
        return name
    return BEST_WHOLE if own.partition is None else "tofu"


def _possible(graph: Graph, options: PlanOptions) -> PlanOptions:
    """Return the options with as many pieces as a short batch, or none, allows."""
    wanted = options.microbatches
    if not isinstance(wanted, int) or wanted == 1:
        return options
    number = most_pieces(graph, wanted)
    return dataclasses.replace(options, microbatches=number if number > 1 else None)
