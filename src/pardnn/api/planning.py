"""`pardnn.plan` and `pardnn.estimate`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pardnn.cluster import Cluster
from pardnn.graph.ir import Graph
from pardnn.plan.constraints import Constraint
from pardnn.plan.plan import Plan
from pardnn.plan.state_in_place import StateInPlace
from pardnn.planner.costs import costs_for
from pardnn.planner.estimate import estimate as estimate_problem
from pardnn.planner.make_plan import make_plan
from pardnn.planner.options import Objective, PlanOptions
from pardnn.planner.problem import Problem
from pardnn.planner.start.earlier import started
from pardnn.report.results import EstimateResult
from pardnn.sim.engine import Policy


def plan(
    graph: Graph,
    cluster: Cluster,
    algorithm: str = "auto",
    objective: Objective = "seconds",
    reserve: float = 0.1,
    seed: int = 0,
    *,
    costs: str | None = None,
    time_limit: float | None = None,
    state: StateInPlace | None = None,
    policy: Policy = "order",
    microbatches: int | Literal["auto"] | None = None,
    recompute: bool = False,
    offload: bool = False,
    constraints: Sequence[Constraint] = (),
    start: Plan | None = None,
) -> Plan:
    """Decide where and in which order every op runs; the plan returned is checked.

    Args:
        graph: The graph.
        cluster: Devices with hard memory limits, and links.
        algorithm: "auto" takes the best, "auto-whole" the best that cuts no op; else a key of
            `ALGORITHMS` or `SHARDED` in `planner.algorithms`.
        objective: "seconds" minimises the makespan, "period" the time of a step among many whose
            losses are read later, "bytes" the bytes sent.
        reserve: Fraction of each device's memory to leave unused.
        seed: The same input, options and seed give the same bytes of plan.
        costs: None: the ops' own `seconds` if they state them, else "measured" of a captured graph
            and "a100" of any other; or a preset. "measured" runs the graph's calls.
        time_limit: Seconds of search, kernels being loaded; then what is tried is cut off, and the
            best plan so far taken, which is then checked. May break reproducibility.
        state: What lies on the devices already, from `pardnn.state_in_place`: the plan leaves each
            parameter, buffer and optimizer state of it where it is.
        policy: "order", the plan's own; "fifo" or "priority" for an engine that takes only the
            placement and schedules ready ops itself: its memory then fits, too, along its times.
        microbatches: Cut the batch in so many pieces, each placed by itself, gradients added up
            and the optimizer run once; "auto" takes the best of 1, 2, 4, 8 and so on. Sums are
            added in another order then, so numbers agree to rounding.
        recompute: Ops may be called a second time, just before the backward pass reads their
            results, where that lets the step fit or makes it faster; no bit changes.
        offload: Optimizer state may live on the host, and be copied to its device for the ops that
            use it, where that lets the step fit; no bit changes.
        constraints: Where ops must run, from `pardnn.pin`, `forbid`, `together`, `apart` or
            `read_constraints`. The plan records them, and its check proves them.
        start: An earlier plan, of this graph or of one much like it, for these devices or others:
            ops stay where it has them unless moving them makes the step faster or lets it fit.
            Pieces, second calls and constraints are as in it unless you say otherwise.

    Raises:
        InfeasibleError: E301 with a witness, if no plan fits; E303 with constraints that cannot
            hold together, each of them needed for that.
        UsageError: E2xx; E225, if no such plan can leave state where it is; E249, if an algorithm
            is named that does not start from such a plan.
        MismatchError: E503, if a tensor of state is another one.
        OutOfTimeError: E710, if the time limit passed and nothing quick fits.
    """
    options = PlanOptions(
        algorithm=algorithm,
        objective=objective,
        reserve=reserve,
        seed=seed,
        time_limit=time_limit,
        costs=costs,
        policy=policy,
        microbatches=microbatches,
        recompute=recompute,
        offload=offload,
        constraints=tuple(constraints),
    )
    options.check_asked()
    if start is not None:
        options = started(options, start)
    problem = Problem(graph, cluster, costs_for(graph, cluster, costs), options, state, start)
    return make_plan(problem)[0]


def estimate(
    graph: Graph,
    cluster: Cluster,
    *,
    reserve: float = 0.1,
    seed: int = 0,
    costs: str | None = None,
) -> EstimateResult:
    """Tell whether the step fits the cluster, where its memory goes, and what limit would do.

    Args:
        graph: The graph.
        cluster: With its limits.
        reserve: As for `plan`.
        seed: As for `plan`.
        costs: As for `plan`.

    Raises:
        UsageError: E2xx.
    """
    options = PlanOptions(reserve=reserve, seed=seed, costs=costs)
    return estimate_problem(Problem(graph, cluster, costs_for(graph, cluster, costs), options))
