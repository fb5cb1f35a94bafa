"""`pardnn.parallelize` and `deferred`. Every rank loads this; only one that plans loads numba."""

from __future__ import annotations

import functools
import inspect
import logging
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pardnn import backends
from pardnn.api.in_child import can_fork, plan_in_child
from pardnn.cluster import Cluster
from pardnn.errors import UsageError
from pardnn.graph.ir import Graph
from pardnn.plan.constraints import Constraint
from pardnn.plan.plan import Plan
from pardnn.plan.state_in_place import StateInPlace
from pardnn.units import rate_text, sharing_text

if TYPE_CHECKING:
    from pardnn.backends.torch.profile.rank_links import ThisCluster

_LOGGER = logging.getLogger("pardnn")


def deferred() -> AbstractContextManager[None]:
    """Return a context in which models and optimizers are built without allocating them.

    `parallelize` then initialises only its own shards on each rank, with the numbers that one
    device would have drawn::

        with pardnn.deferred():
            model = Transformer(config)
            optimizer = torch.optim.AdamW(model.parameters())
        fast_step = pardnn.parallelize(step, model, optimizer, x, y)

    Raises:
        UnsupportedError: E820, if something inside cannot be recorded; the message names the line.
    """
    return backends.deferred()


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
    microbatches: int | Literal["auto"] | None = None,
    recompute: bool = False,
    offload: bool = False,
    constraints: Sequence[Constraint] = (),
    start: Plan | None = None,
    record: str | Path | None = None,
) -> Callable[..., Any]:
    """Return an object that runs the step on all ranks of `torchrun`.

    Without further arguments, as a decorator, the step's arguments are taken from the first call.
    Every call then takes all of them, models and optimizers included:

        @pardnn.parallelize
        def step(model, optimizer, x, y): ...

    Every rank builds the same models and calls the object with the same whole batch. Learning
    rates and other hyperparameters are read from the optimizers at every call.

    Args:
        step: The training step.
        *args: Its arguments, the same on every rank. Leave them out to take those of the first
            call.
        plan: A plan made for this step. None plans on rank 0 and shares the plan. Later changes
            are planned for the plan's cluster and with its algorithm, or with `algorithm` where
            the plan's cannot leave the state where it is.
        cluster: What to plan for. Its memory limits are enforced from now on: a rank that holds
            more tensors ends with E603, and on CPU ranks the system refuses anything beyond the
            limit plus an allowance, including your own tensors. None means one device per rank
            with its own memory (CPU ranks share the host's), and links as measured now, which takes
            a second or two (on one node, earlier measurements are reused); `fast.plan.cluster`
            shows them.
        algorithm: As for `plan`. The default places whole ops, so losses keep every bit; "auto"
            may also cut ops where that is faster.
        reserve: As for `plan`.
        seed: As for `plan`.
        costs: As for `plan`.
        timeout: Longest wait for another rank, in seconds.
        shapes: Further example batches (the args that are neither model nor optimizer), to be
            captured and planned now instead of when the first such batch arrives.
        on_signal: What all ranks do after SIGTERM or SIGINT, even if only one of them gets it.
            "save" writes a checkpoint at the script's next `save(directory, every=...)` and ends
            there with status 130; "stop" ends with that status before the next step. None leaves
            signals to Python.
        microbatches: As for `plan`.
        recompute: As for `plan`.
        offload: As for `plan`.
        constraints: As for `plan`. A plan that you pass has its own.
        start: As for `plan`, for the first plan. Cannot be combined with `plan`.
        record: File to which rank 0 writes the measured times of each op on all ranks, from the
            second step on; `pardnn report --run` shows them next to the predictions.

    Returns:
        `fast`, an object that every rank uses in the same way; `help(fast)` has the details.

        `fast(x, y)`, with the args that are neither model nor optimizer, runs one step and returns
        what the step returns. `fast.evaluate(function, *args)` runs `function(model, *args)`,
        forward only.

        `fast.save(directory)` and `fast.load(directory)` write and read checkpoints, from which any
        number of ranks can resume. `fast.export(file)` writes the whole model,
        `fast.load_weights(path)` reads one. `fast.state_dict()` and `fast.load_state_dict(state)`
        use torch's format, whole, on rank 0; `fast.sync_model()` fills the user's model there until
        the next step.

        `fast.plan`, `fast.rank`, `fast.steps`, `fast.step_s` (seconds of each step) and
        `fast.peak_bytes` give information; `fast.close()` shuts down.

    Raises:
        MismatchError: E5xx, if the ranks, the plan and the step do not belong together.
        UsageError: E206, if both `plan` and `start` are given.
    """
    if plan is not None and start is not None:
        raise UsageError("`start` would be ignored with `plan`: leave one out.", code="E206")
    if not args and _takes_arguments(step):
        return backends.OnFirstCall(step, functools.partial(
            parallelize, step, plan=plan, cluster=cluster, algorithm=algorithm, reserve=reserve,
            seed=seed, costs=costs, timeout=timeout, shapes=shapes, on_signal=on_signal,
            microbatches=microbatches, recompute=recompute, offload=offload,
            constraints=constraints, start=start, record=record,
        ))  # fmt: skip
    given = cluster or (plan.cluster if plan is not None else None)
    measured: list[Cluster] = []
    firsts = iter([plan is None])  # of what is decided

    def on_cluster(found: ThisCluster) -> None:
        measured.append(found.cluster)
        if found.pairs and os.environ.get("RANK", "0") == "0":
            _LOGGER.warning("pardnn: %s", links_text(found))

    def decide(graph: Graph, world_size: int, state: StateInPlace | None) -> Plan:
        target = given or (measured[0] if measured else _unmeasured(world_size))
        first = next(firsts, False)

        def planned() -> Plan:
            from pardnn.planner.next_plan import next_plan  # the compiler: only who plans loads it
            from pardnn.planner.options import PlanOptions

            options = PlanOptions(algorithm=algorithm, reserve=reserve, seed=seed, costs=costs,
                                  microbatches=microbatches, recompute=recompute, offload=offload,
                                  constraints=tuple(constraints))  # fmt: skip
            return next_plan(graph, target, options, plan, state, start, is_first=first)

        if given is not None and can_fork(backends.this_device()):
            return plan_in_child(planned)  # this one is held to its limit
        return planned()

    return backends.parallelize(
        step, *args, plan=plan, prove=_prove, decide=decide, timeout=timeout, shapes=shapes,
        on_signal=on_signal, record=record,
        is_limited=given is not None, on_cluster=on_cluster if given is None else None,
    )  # fmt: skip


def _unmeasured(world_size: int) -> Cluster:
    """Return ranks with their own memory, between which nothing was measured: there is but one."""
    named = "cpu" if backends.this_device() == "cpu" else "gpu"
    return Cluster.uniform(world_size, memory=backends.rank_memory_bytes(), named=named)


def _prove(graph: Graph, plan: Plan) -> None:
    """Raise unless what a plan cuts computes what the graph does; no compiler is loaded."""
    from pardnn.planner.check_cut import check_cut

    check_cut(graph, plan)


def _takes_arguments(step: Callable[..., Any]) -> bool:
    """Whether a step cannot be called without arguments."""
    try:
        inspect.signature(step).bind()
    except TypeError:
        return True
    except ValueError:  # it tells no signature
        return False
    return False


def links_text(found: ThisCluster) -> str:
    """Say on one line what was measured of the links between ranks."""
    rates = (("within a node", found.within), ("between nodes", found.between))
    told = " and ".join(
        f"{rate_text(rate.bandwidth, rate.latency)} {where}"
        for where, rate in rates
        if rate is not None
    )
    nodes = f"{found.num_nodes} node{'s' if found.num_nodes > 1 else ''}"
    sharing, count = found.cluster.sharing, found.cluster.num_devices
    if sharing is not None:
        told += f"; {sharing_text(sharing.slowdown, count)}"
    return (
        f"links of {found.cluster.num_devices} ranks on {nodes} measured in {found.seconds:.1f} s: "
        f"{told}; the plan is made for them (`cluster=` names others)"
    )
