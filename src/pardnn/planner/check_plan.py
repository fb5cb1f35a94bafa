"""The whole proof of a plan, wherever it comes from: `pardnn check`, and all that read a plan file.

`plan.check` proves what needs no knowledge of operators; `check_cut` that a cut plan computes what
the graph does; here the predicted time is simulated again. Planners call `plan.check` alone: what
they have cut just now, they need not cut again.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from pardnn.cluster import Cluster
from pardnn.cost.costs import graph_costs
from pardnn.cost.presets import PRESET_NAMES
from pardnn.errors import PardnnError
from pardnn.graph.ir import Graph
from pardnn.plan import check
from pardnn.plan.check import MAX_PROBLEMS, raise_problems
from pardnn.plan.plan import Plan, plan_arrays, planned_graph
from pardnn.planner.check_cut import cut_problems
from pardnn.planner.costs import costs_for
from pardnn.sim.engine import simulate
from pardnn.sim.machine import machine_of

#: Of a predicted makespan: sums of floats may differ in their last bits between machines.
TOLERANCE = 1e-9


def plan_problems(graph: Graph, plan: Plan, cluster: Cluster | None = None) -> list[str]:
    """Return every rule that the plan breaks, up to `MAX_PROBLEMS`; empty if it is valid.

    Args:
        graph: The graph that the plan is for.
        plan: Any plan.
        cluster: What it must run on; the plan's own if None.
    """
    for rule in (
        check.plan_problems(graph, plan, cluster), cut_problems(graph, plan), _time(graph, plan)
    ):  # fmt: skip
        problems = list(itertools.islice(rule, MAX_PROBLEMS))
        if problems:
            return problems
    return []


def check_plan(graph: Graph, plan: Plan, cluster: Cluster | None = None) -> None:
    """Raise unless the plan is valid for the graph.

    Args:
        graph: The graph.
        plan: Any plan.
        cluster: What it must run on; the plan's own if None.

    Raises:
        InvalidPlanError: E410, with all problems in `details["problems"]`.
    """
    raise_problems(plan_problems(graph, plan, cluster))


def _time(graph: Graph, plan: Plan) -> Iterator[str]:
    """Simulate the step by the costs that the plan names; measured ones, of a CPU too, pass."""
    predicted, cluster = plan.predicted, plan.cluster
    costs = predicted and predicted.costs
    if predicted is None or costs is None or cluster is None:
        return
    names = costs.split(", ")
    if costs == "measured" or ("cpu" in names and set(names) <= set(PRESET_NAMES)):
        return
    planned = planned_graph(graph, plan)
    try:
        known = graph_costs(planned) if costs == "graph" else costs_for(planned, cluster, costs)
    except PardnnError as error:
        yield f"predicted.costs: {error.message}"
        return
    found = simulate(planned, machine_of(known, cluster), plan_arrays(planned, plan)).makespan
    if abs(found - predicted.makespan_s) > TOLERANCE * found:
        yield f"predicted.makespan_s is {predicted.makespan_s!r}, but it is {found!r} by {costs}"
