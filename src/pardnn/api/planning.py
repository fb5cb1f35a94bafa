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
        algorithm: "auto" takes the best, "auto-whole" the best that cuts no op; or a key of
            `ALGORITHMS` or `SHARDED` in `planner.algorithms`.
        objective: "seconds" minimises the time of one step, "period" the time per step of many in
            a row whose losses are read later, "bytes" the bytes sent.
        reserve: Fraction of each device's memory to leave unused.
        seed: The same input, options and seed give the same bytes of plan.
        costs: A preset such as "a100", or "measured", which runs the graph's calls. None takes the
            ops' own `seconds` if they have them, else "measured" for a captured graph and "a100"
            for any other.
        time_limit: Seconds to search, once kernels are loaded. After that the best plan so far is
            taken and checked. The result may then differ from run to run.
        state: State that is already on the devices, from `pardnn.state_in_place`. The plan leaves
            each of its parameters, buffers and optimizer states where it is.
        policy: "order" runs ops in the plan's own order. "fifo" and "priority" plan for an engine
            that uses only the placement and schedules ready ops itself; the memory it then needs
            also fits.
        microbatches: Number of pieces to cut the batch into. Each piece is placed separately,
            gradients are added up, and the optimizer runs once. "auto" takes the best of 1, 2, 4,
            8 and so on. Sums are added in another order, so numbers agree to rounding.
        recompute: Allow ops to be called a second time, just before the backward pass reads their
            results, where that lets the step fit or makes it faster. No bit changes.
        offload: Allow optimizer state to live on the host and be copied to its device for the ops
            that use it, where that lets the step fit. No bit changes.
        constraints: What the plan has to meet, from `pardnn.pin`, `forbid`, `together`, `apart`,
            `fix_layout`, `fix_pieces`, `prefer` or `read_constraints`. The plan records them, and
            its check proves them.
        start: An earlier plan for this graph or a similar one, on these devices or others. Ops
            stay where it has them unless moving them makes the step faster or lets it fit. Pieces,
            second calls and constraints are kept unless you say otherwise.

    Raises:
        InfeasibleError: E301, if no plan fits, with what is missing where; E303, with a minimal
            set of conflicting constraints.
        UsageError: E2xx; E225, if no such plan can leave state where it is; E249, if the algorithm
            cannot start from such a plan.
        MismatchError: E503, if a state tensor differs from the graph's tensor of that name.
        OutOfTimeError: E710, if the time limit passed and no quick plan fits either.
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
    """Tell whether the step fits the cluster, where its memory goes, and which limit would suffice.

    Args:
        graph: The graph.
        cluster: The devices and their limits.
        reserve: As for `plan`.
        seed: As for `plan`.
        costs: As for `plan`.

    Raises:
        UsageError: E2xx.
    """
    options = PlanOptions(reserve=reserve, seed=seed, costs=costs)
    return estimate_problem(Problem(graph, cluster, costs_for(graph, cluster, costs), options))
