"""The next plan of a step that runs already: another shape, flag or mode, the state in place."""

from __future__ import annotations

import dataclasses

from pardnn.cluster import Cluster
from pardnn.errors import InfeasibleError, MismatchError, UsageError
from pardnn.graph.ir import Graph
from pardnn.plan.plan import Plan
from pardnn.plan.state_in_place import StateInPlace, bytes_alone
from pardnn.planner.algorithms import ALGORITHMS, SHARDED, mixed_parts
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
) -> Plan:
    """Plan a graph of a step, with the state where it is if that fits.

    Where it does not, the plan is free, and the runtime moves what lies elsewhere.

    Args:
        graph: Captured anew.
        cluster: What it runs on.
        options: Of the first plan.
        own: The first plan, if a user made it: its kind, algorithm and reserve count.
        state: What lies on the devices; None for the first plan.
        start: A plan to make the first one from; what it decides and the user does not counts for
            the others, too.

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
    if state is not None:
        if options.microbatches is not None:
            options = _possible(graph, options)
        try:
            return make_plan(Problem(graph, cluster, costs, options, state))[0]
        except (InfeasibleError, MismatchError, UsageError):
            state = bytes_alone(graph, state)
            return make_plan(Problem(graph, cluster, costs, options, state))[0]
    return make_plan(Problem(graph, cluster, costs, options, start=start))[0]


def _algorithm(own: Plan) -> str:
    """Return the algorithm of a plan; of one written by hand, the best of its kind."""
    known = SHARDED if own.partition is not None else ALGORITHMS
    name = own.algorithm or ""
    if name in known or (mixed_parts(name) and own.partition is not None):
        return name
    return "auto-whole" if own.partition is None else "tofu"


def _possible(graph: Graph, options: PlanOptions) -> PlanOptions:
    """Return the options with as many pieces as a short batch, or a step without one, allows."""
    wanted = options.microbatches
    if not isinstance(wanted, int) or wanted == 1:
        return options
    number = most_pieces(graph, wanted)
    return dataclasses.replace(options, microbatches=number if number > 1 else None)
