"""`pardnn.parallelize`. Every rank loads this module; only the rank that plans loads numba."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pardnn import backends
from pardnn.cluster import Cluster
from pardnn.graph.ir import Graph
from pardnn.plan.plan import Plan


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

    Call it with the args that are neither model nor optimizer; it returns what the step returns,
    the same on every rank. Learning rates and other hyperparameters are read from the optimizers
    at every call.

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

    def decide(graph: Graph, world_size: int) -> Plan:
        from pardnn.api import planning  # only the rank that plans loads the compiler

        target = cluster or Cluster.uniform(world_size)
        return planning.plan(graph, target, algorithm, reserve=reserve, seed=seed, costs=costs)

    return backends.parallelize(step, *args, plan=plan, decide=decide, timeout=timeout)
