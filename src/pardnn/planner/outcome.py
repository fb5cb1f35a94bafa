"""One algorithm's decision, simulated, and the score by which outcomes are compared."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from pardnn.cluster import Cluster
from pardnn.errors import InfeasibleError
from pardnn.graph.ir import Graph
from pardnn.plan.plan import Plan, PlanArrays, plan_from_arrays
from pardnn.planner.problem import Problem
from pardnn.planner.sharded.complete import ShardedPlan
from pardnn.sim.engine import simulate
from pardnn.sim.machine import Machine, machine_of
from pardnn.sim.sharing import step_times, timeline_on


class Outcome(NamedTuple):
    """One algorithm's decision, simulated.

    Attributes:
        algorithm: Its name.
        plan: Of the graph; of the partitioned graph if ops are sharded.
        moved_ops: Ops that a memory step moved to another device.
        makespan_s: Simulated, in the plan's own order, on devices that share nothing.
        transfer_bytes: Sent in all.
        planning_s: Wall time.
        sharded: The plan with its partitioned graph, if ops are sharded.
        notes: What a reader should know about it.
        lower_bound_s: That the algorithm proved; 0 if none.
    """

    algorithm: str
    plan: PlanArrays
    moved_ops: int
    makespan_s: float
    transfer_bytes: int
    planning_s: float
    sharded: ShardedPlan | None = None
    notes: tuple[str, ...] = ()
    lower_bound_s: float = 0.0


def plan_of(problem: Problem, outcome: Outcome) -> Plan:
    """Return the plan of an outcome by names, without metadata.

    Args:
        problem: What was planned.
        outcome: Of it.
    """
    made = outcome.sharded
    if made is None:
        return plan_from_arrays(problem.graph, outcome.plan)
    if made.plan.order:
        return made.plan
    return dataclasses.replace(plan_from_arrays(made.graph, made.arrays), pieces=made.plan.pieces)


def score(problem: Problem, outcome: Outcome) -> tuple[float, float]:
    """Return the score of an outcome; the best has the lowest."""
    sent = float(outcome.transfer_bytes)
    match problem.options.objective:
        case "seconds":
            return makespan_s(problem, outcome), sent
        case "bytes":
            return sent, makespan_s(problem, outcome)
        case "period":
            times = step_times(*_simulated(problem, outcome))
            return times.period, times.timeline.makespan


def makespan_s(problem: Problem, outcome: Outcome) -> float:
    """Return the seconds of a step on the devices of a problem, with what they share.

    Args:
        problem: What was planned.
        outcome: Of it.
    """
    if problem.cluster.sharing is None:
        return outcome.makespan_s
    return timeline_on(*_simulated(problem, outcome)).makespan


def _simulated(problem: Problem, outcome: Outcome) -> tuple[Cluster, Graph, Machine, PlanArrays]:
    cut, cluster = outcome.sharded, problem.cluster
    graph, costs = (problem.graph, problem.costs) if cut is None else (cut.graph, cut.costs)
    return cluster, graph, machine_of(costs, cluster), outcome.plan


def with_plan(problem: Problem, outcome: Outcome, plan: PlanArrays) -> Outcome:
    """Return an outcome with another plan, simulated."""
    timeline = simulate(problem.graph, problem.machine, plan)
    return outcome._replace(
        plan=plan,
        makespan_s=timeline.makespan,
        transfer_bytes=timeline.transfer_bytes(problem.graph),
    )


def missing_bytes(error: InfeasibleError) -> float:
    """Return how far a plan was from fitting; infinite if the error does not say."""
    needed = error.details.get("bytes", error.details.get("peak_bytes"))
    usable = error.details.get("usable_bytes")
    return math.inf if usable is None or needed is None else needed - usable


#: Runs algorithms on a problem, and returns the best outcome.
Decide = Callable[[Problem, Sequence[str]], Outcome]
