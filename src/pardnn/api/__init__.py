"""The public functions: the only place where all rooms meet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pardnn.cluster import Cluster
from pardnn.errors import UsageError
from pardnn.graph.ir import Graph
from pardnn.plan.check import check_plan
from pardnn.plan.file import check_fingerprint
from pardnn.plan.memory import peak_bytes
from pardnn.plan.plan import Plan, plan_arrays, planned_graph
from pardnn.planner.costs import costs_for
from pardnn.planner.estimate import estimate as _estimate
from pardnn.planner.make_plan import Objective, make_plan
from pardnn.report.results import EstimateResult, SimulateResult

__all__ = ["capture", "estimate", "parallelize", "plan", "simulate"]


def capture(step: Callable[..., Any], *args: Any) -> Graph:
    """Return the graph of one training step: forward, backward and update, as ATen ops.

    Nothing is computed and no tensor data is allocated; models, optimizers and random state are
    left as they were.

    Args:
        step: The training step, called as `step(*args)`; it returns the loss.
        *args: Models, optimizers and an example batch in global shapes.

    Raises:
        UnsupportedError: E8xx, naming the line that cannot be captured and the usual rewrite.
        UserCodeError: The step itself raised.
    """
    from pardnn.backends.torch.capture.capture import capture as capture_step

    return capture_step(step, *args)


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
) -> Plan:
    """Decide where and in which order every op runs; the plan returned is checked.

    Args:
        graph: The graph.
        cluster: Devices with hard memory limits, and links.
        algorithm: "auto" takes the best, "auto-whole" the best that cuts no op; else a key of
            `ALGORITHMS` or `SHARDED` in `api.algorithms`.
        objective: "seconds" minimises the makespan, "bytes" the bytes sent.
        reserve: Fraction of each device's memory to leave unused.
        seed: The same input, options and seed give the same bytes of plan.
        costs: None: the ops' own `seconds` if they state them, else "measured"; or a preset.
        time_limit: Seconds after which nothing more is tried; may break reproducibility.

    Raises:
        InfeasibleError: E301 with a witness, if no plan fits.
        UsageError: E2xx.
    """
    return make_plan(
        graph,
        cluster,
        costs_for(graph, cluster, costs),
        algorithm=algorithm,
        objective=objective,
        reserve=reserve,
        seed=seed,
        time_limit=time_limit,
    )[0]


def estimate(
    graph: Graph,
    cluster: Cluster,
    *,
    reserve: float = 0.1,
    seed: int = 0,
    costs: str | None = None,
) -> EstimateResult:
    """Tell whether the step fits the cluster, where its memory goes, and what limit would do."""
    return _estimate(graph, cluster, costs_for(graph, cluster, costs), reserve=reserve, seed=seed)


def simulate(
    graph: Graph, plan: Plan, *, policy: str = "order", costs: str | None = None
) -> SimulateResult:
    """Judge a plan.

    Args:
        graph: The graph that it is for.
        plan: A valid plan that names its cluster.
        policy: "order" runs the plan's own lists; "fifo" and "priority" use only its placement.
        costs: As for `plan`.

    Raises:
        MismatchError: E503, if the plan is for another graph.
        InvalidPlanError: E410, if it is not valid.
        UsageError: E212, if the plan names no cluster.
    """
    from pardnn.sim.engine import simulate as judge
    from pardnn.sim.machine import machine_of

    if policy not in ("order", "fifo", "priority"):
        raise UsageError(f"policy is {policy!r:.40}; it can be order, fifo or priority")
    if plan.cluster is None:
        raise UsageError(
            "the plan names no cluster, so its time is not defined.\n"
            "Give one: --devices K, or --cluster FILE.",
            code="E212",
        )
    check_fingerprint(plan, graph)
    check_plan(graph, plan)
    graph = planned_graph(graph, plan)
    arrays = plan_arrays(graph, plan)
    machine = machine_of(costs_for(graph, plan.cluster, costs), plan.cluster)
    timeline = judge(graph, machine, arrays, policy)  # pyright: ignore[reportArgumentType]
    return SimulateResult(
        policy=policy,  # pyright: ignore[reportArgumentType]
        makespan_s=timeline.makespan,
        peak_bytes=tuple(peak_bytes(graph, arrays)),
        busy_s=tuple(timeline.busy(arrays.place, plan.num_devices).tolist()),
        transfer_bytes=timeline.transfer_bytes(graph),
    )


def parallelize(
    step: Callable[..., Any],
    *args: Any,
    plan: Plan | None = None,
    cluster: Cluster | None = None,
    algorithm: str = "auto-whole",
    reserve: float = 0.1,
    seed: int = 0,
    costs: str | None = None,
    timeout: float = 60.0,
) -> Callable[..., Any]:
    """Return the step as a function that runs on all ranks of `torchrun`.

    Call it with the args that are neither model nor optimizer; it returns the same loss on every
    rank. Learning rates and other hyperparameters are read from the optimizers at every call.

    Args:
        step: The training step.
        *args: Its arguments, the same on every rank.
        plan: Made for this step; None plans on rank 0 and shares the plan.
        cluster: What to plan for; None: one device per rank, as `Cluster.uniform`.
        algorithm: As for `plan`. The default places whole ops, so that losses keep every bit;
            "auto" may also cut ops where that is faster.
        reserve: As for `plan`.
        seed: As for `plan`.
        costs: As for `plan`.
        timeout: Seconds that any wait for another rank may last.

    Raises:
        MismatchError: E5xx, if the ranks, the plan and the step do not belong together.
    """
    from pardnn.backends.torch.parallelize import parallelize as run_parallel

    def decide(graph: Graph, world_size: int) -> Plan:
        target = cluster or Cluster.uniform(world_size)
        chosen = costs_for(graph, target, costs)
        return make_plan(graph, target, chosen, algorithm=algorithm, reserve=reserve, seed=seed)[0]

    return run_parallel(step, *args, plan=plan, decide=decide, timeout=timeout)
