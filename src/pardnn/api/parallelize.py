"""`pardnn.parallelize`. Every rank loads this module; only the rank that plans loads numba."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from pardnn import backends
from pardnn.cluster import Cluster
from pardnn.graph.ir import Graph
from pardnn.plan.plan import Plan
from pardnn.plan.state_in_place import StateInPlace


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
    shapes: Sequence[Sequence[Any]] = (),
    on_signal: Literal["save", "stop"] | None = None,
) -> Callable[..., Any]:
    """Return the step as a function that runs on all ranks of `torchrun`.

    Call it with the args that are neither model nor optimizer; it returns what the step returns,
    the same on every rank. Learning rates and other hyperparameters are read from the optimizers
    at every call.

    Args:
        step: The training step.
        *args: Its arguments, the same on every rank.
        plan: Made for this step; None plans on rank 0 and shares the plan. What changes later is
            planned for the plan's cluster, with its algorithm or, where that cannot leave the state
            where it is, as `algorithm` says.
        cluster: What to plan for. Its memory limits are enforced: a rank that holds more tensors
            ends with E603, and on CPU ranks the system refuses what exceeds the limit and an
            allowance from here on, your own tensors too. None: one device per rank, as
            `Cluster.uniform`, with its own memory, the host's shared by its ranks.
        algorithm: As for `plan`. The default places whole ops, so that losses keep every bit;
            "auto" may also cut ops where that is faster.
        reserve: As for `plan`.
        seed: As for `plan`.
        costs: As for `plan`.
        timeout: Seconds that any wait for another rank may last.
        shapes: Further example batches, each the args that are neither model nor optimizer: they
            are captured and planned now, not when the first batch of their shape comes.
        on_signal: What SIGTERM or SIGINT makes all ranks do, also where it reaches one of them:
            "save" writes a checkpoint at the script's next `save(directory, every=...)` and ends
            with status 130 there, "stop" ends so before the next step. None leaves signals to
            Python.

    Raises:
        MismatchError: E5xx, if the ranks, the plan and the step do not belong together.
    """

    def decide(graph: Graph, world_size: int, state: StateInPlace | None) -> Plan:
        # Only the rank that plans loads the compiler.
        from pardnn.planner.next_plan import next_plan
        from pardnn.planner.options import PlanOptions

        own = plan.cluster if plan is not None else None
        target = cluster or own or Cluster.uniform(world_size, memory=backends.rank_memory_bytes())
        options = PlanOptions(algorithm=algorithm, reserve=reserve, seed=seed, costs=costs)
        return next_plan(graph, target, options, plan, state)

    return backends.parallelize(
        step, *args, plan=plan, decide=decide, timeout=timeout, shapes=shapes,
        on_signal=on_signal,
        is_limited=(cluster or (plan.cluster if plan is not None else None)) is not None,
    )  # fmt: skip
