"""Run an entry point on the ranks of this machine."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pardnn import backends
from pardnn.api.advice import planned
from pardnn.api.capture import captured
from pardnn.api.simulate import check_plan
from pardnn.backends.entry_point import load_entry_point
from pardnn.checkpoint.options import SaveOptions
from pardnn.cluster import Cluster
from pardnn.cost.host import usable_cores
from pardnn.errors import MismatchError, UsageError
from pardnn.graph.ir import Graph
from pardnn.plan.file import check_fingerprint, read_plan
from pardnn.plan.memory import peak_bytes
from pardnn.plan.plan import Plan, plan_arrays, planned_graph
from pardnn.plan.run_record import write_run
from pardnn.planner.costs import known_costs
from pardnn.planner.options import PlanOptions
from pardnn.report.progress import lines_of, status
from pardnn.report.results import RunResult, StateDifference
from pardnn.sim.shared_cores import Host, simulated_step
from pardnn.units import MAX_WAIT_SECONDS, bytes_text

#: Of one machine: each takes some 300 MB before it has a tensor.
MAX_RANKS = 128
#: Seconds between two lines on how far a training is.
PROGRESS_S = 5.0
#: By the dtype of the loss: what sharding a sum may change of it, relative.
TOLERANCES = {"float64": 1e-10, "float32": 1e-4}
#: In every other dtype (half precision).
LOW_TOLERANCE = 1e-2


def run_target(
    target: str,
    cluster: Cluster | None,
    options: PlanOptions,
    *,
    plan_file: Path | None = None,
    start_file: Path | None = None,
    steps: int = 5,
    timeout: float = 60.0,
    verify: bool = False,
    batch_size: int | None = None,
    saving: SaveOptions | None = None,
    on_signal: Literal["save", "stop"] | None = None,
    record: Path | None = None,
    code: Sequence[Path] | None = None,
) -> RunResult:
    """Capture, plan or read a plan, and train for some steps on K ranks.

    Args:
        target: `FILE.py:FUNCTION`.
        cluster: What to plan for. With `plan_file`: the limits to enforce instead of the plan's.
        options: How to plan; its threads are those of a rank, too.
        plan_file: A plan made before.
        start_file: A plan to start from, of this step or one much like it.
        steps: Number of training steps.
        timeout: Longest wait for one message, seconds.
        verify: Run the user's own step on one device too.
        batch_size: Given to FUNCTION, if not None.
        saving: Checkpoints to write, and the one to resume from.
        on_signal: See `backends.run_plan`.
        record: Where to write what the ranks measure of their ops.
        code: Files of generated code, by rank, to run instead of the plan's actions.

    Raises:
        PardnnError: E2xx to E8xx, as capturing, planning and running do.
    """
    if not 0 < timeout <= MAX_WAIT_SECONDS:
        raise UsageError(
            f"timeout is {timeout} seconds; it must be above 0 and at most {MAX_WAIT_SECONDS:g}"
        )
    entry = load_entry_point(target)
    entry.factory(batch_size)  # wrong arguments are refused before anything is read
    plan = None if plan_file is None else read_plan(plan_file)
    start = None if start_file is None else read_plan(start_file)
    devices = cluster if plan is None else plan
    assert devices is not None
    _check_ranks(devices.num_devices)
    with status("capturing the step"):
        graph, _ = captured(entry, batch_size)
    if plan is None:
        assert cluster is not None
        plan, _ = planned(graph, cluster, options, entry, batch_size, start=start)
    else:
        check_fingerprint(plan, graph)
        check_plan(graph, plan)
    found = run_checked(
        target, graph, plan, cluster or plan.cluster, steps=steps, threads=options.threads,
        timeout=timeout, verify=verify, batch_size=batch_size, saving=saving,
        on_signal=on_signal, record=record, code=code,
    )  # fmt: skip
    said = plan.notes if plan_file is None else ()  # whoever made a plan before has read them
    return dataclasses.replace(found, notes=(*said, *found.notes))


def _check_ranks(num_devices: int) -> None:
    """Raise if this machine cannot run this many processes.

    Raises:
        UsageError: E201.
    """
    if num_devices > MAX_RANKS:
        raise UsageError(
            f"run starts a process for each of {num_devices} devices; at most {MAX_RANKS} are "
            "started on one machine.\nPlan for fewer devices, or run under torchrun on several."
        )


def run_checked(
    target: str,
    graph: Graph,
    plan: Plan,
    cluster: Cluster | None,
    *,
    steps: int,
    threads: int = 1,
    timeout: float = 60.0,
    verify: bool = False,
    batch_size: int | None = None,
    saving: SaveOptions | None = None,
    on_signal: Literal["save", "stop"] | None = None,
    record: Path | None = None,
    code: Sequence[Path] | None = None,
) -> RunResult:
    """Run a valid plan under the limits of a cluster.

    Args:
        target: `FILE.py:FUNCTION`, which every rank executes.
        graph: Captured from it.
        plan: Valid for that graph.
        cluster: The limits to enforce; None: no limits.
        steps: Number of training steps.
        threads: Of each rank.
        timeout: Longest wait for one message, seconds.
        verify: Run the user's own step on one device too.
        batch_size: Given to FUNCTION, if not None.
        saving: Checkpoints to write, and the one to resume from.
        on_signal: See `backends.run_plan`.
        record: Where to write what the ranks measure of their ops.
        code: Files of generated code, by rank, to run instead of the plan's actions.

    Raises:
        MismatchError: E501, if plan and cluster have different numbers of devices; E504, if a
            device would hold more by the plan than its limit.
    """
    limits = _limits(graph, plan, cluster)
    found = backends.run_plan(
        target,
        graph,
        plan,
        steps=steps,
        threads=threads,
        timeout=timeout,
        verify=verify,
        limits=limits,
        batch_size=batch_size,
        saving=saving,
        on_signal=on_signal,
        record=record is not None,
        code=code,
        progress=lines_of(PROGRESS_S),
    )
    if record is not None and found.record is not None:
        write_run(found.record, record)
    shared = shared_cores_seconds(graph, plan, threads=threads)
    kept_bits = saving is None or saving.kept_bits
    return RunResult(
        losses=found.losses,
        reference_losses=found.reference_losses,
        **_compared(
            graph, plan, found.losses, found.reference_losses, found.state, kept_bits=kept_bits
        ),
        step_s=found.step_s,
        makespan_s=None if plan.predicted is None else plan.predicted.makespan_s,
        shared_cores_s=shared,
        peak_bytes_predicted=found.peak_bytes_predicted,
        peak_bytes_measured=found.peak_bytes_measured,
        limit_bytes=found.limit_bytes,
        allowance_bytes=found.allowance_bytes,
        algorithm=plan.algorithm,
        stopped_by=found.stopped_by,
        first_step=(saving.first_step or 0) if saving is not None else 0,
        saved_steps=found.saved_steps,
        notes=(*found.notes, *_sharing(plan, shared)),
    )


def _limits(graph: Graph, plan: Plan, cluster: Cluster | None) -> list[int | None]:
    if cluster is None:
        return [None] * plan.num_devices
    if cluster.num_devices != plan.num_devices:
        raise MismatchError(
            f"the plan is for {plan.num_devices} devices, the cluster has {cluster.num_devices}.\n"
            "Leave the cluster out, or plan again.",
            code="E501",
        )
    limits = [device.memory for device in cluster.devices]
    local = planned_graph(graph, plan)
    peaks = peak_bytes(local, plan_arrays(local, plan))
    for device, (limit, peak) in enumerate(zip(limits, peaks, strict=True)):
        if limit is not None and limit < peak:
            raise MismatchError(
                f"with this plan, device {device} holds up to {bytes_text(peak)}, but its limit "
                f"is {bytes_text(limit)}.\nRun it under a limit of {max(peaks)}B or more, or plan "
                "again for this limit.",
                code="E504",
                details={"peak_bytes": peaks, "limit_bytes": limits},
            )
    return limits


def shared_cores_seconds(graph: Graph, plan: Plan, *, threads: int = 1) -> float | None:
    """Predict a plan's step on ranks that share the cores of this machine.

    Args:
        graph: The graph that was planned.
        plan: A valid plan.
        threads: That an op may use.

    Returns:
        Seconds; None where ranks have devices of their own, or where calls of the plan or messages
        between ranks (`pardnn profile --links`) were not measured here.
    """
    links = backends.cached_links()
    if links is None or backends.this_device() != "cpu":
        return None
    planned = planned_graph(graph, plan)
    costs = known_costs(planned, plan.cluster, graph, threads=threads)
    if costs is None:
        return None
    host = Host(cores=usable_cores(), links=links, threads=threads)
    return simulated_step(planned, plan, costs.on("accelerator"), host).seconds


def _sharing(plan: Plan, predicted: float | None) -> list[str]:
    """Say why steps took longer than simulated, if ranks shared cores and this was not predicted.

    Args:
        plan: What was run.
        predicted: Seconds, of `shared_cores_seconds`.
    """
    cores = usable_cores()
    if predicted is not None or plan.num_devices <= cores or backends.this_device() != "cpu":
        return []
    shared = f"{plan.num_devices} ranks shared {cores} cores"
    return [f"{shared}; measured costs and `pardnn profile --links` predict the step for them, too"]


def _compared(
    graph: Graph,
    plan: Plan,
    losses: Sequence[float],
    reference: Sequence[float] | None,
    state: Mapping[str, Any] | None = None,
    *,
    kept_bits: bool = True,
) -> dict[str, Any]:
    """Compare losses and state with those of one device: bit for bit if no op is cut.

    Where ops are cut the state has no tolerance: Adam divides by the root of a square, so that a
    gradient that is rounding alone moves its parameter by a whole learning rate.

    Args:
        graph: What ran.
        plan: How.
        losses: Of the ranks.
        reference: Of one device; None if it did not run.
        state: Fields of `StateDifference`; None if it was not compared.
        kept_bits: Whether that held for the steps before the checkpoint that it went on from.
    """
    if reference is None:
        return {}
    keeps_bits = plan.keeps_bits and kept_bits
    tolerance = 0.0 if keeps_bits else _tolerance(graph)
    found = [_difference(a, b) for a, b in zip(losses, reference, strict=True)]
    is_equal = all(each is not None and each <= tolerance for each in found)
    largest = None if None in found else max((each for each in found if each), default=0.0)
    compared = None if state is None else StateDifference(**state)
    if compared is not None and keeps_bits:
        is_equal = is_equal and compared.differing == 0
    return {
        "verified": is_equal, "tolerance": tolerance, "largest_difference": largest,
        "state": compared,
    }  # fmt: skip


def _tolerance(graph: Graph) -> float:
    dtypes = {tensor.name: tensor.dtype or "" for op in graph.ops for tensor in op.outputs}
    loss = graph.loss_op
    return TOLERANCES.get(dtypes[loss.inputs[0]] if loss else "", LOW_TOLERANCE)


def _difference(found: float, expected: float) -> float | None:
    """Return the relative difference of two losses; None if one alone is no finite number."""
    if found == expected or (math.isnan(found) and math.isnan(expected)):
        return 0.0
    if not math.isfinite(found) or not math.isfinite(expected):
        return None
    return abs(found - expected) / max(abs(expected), abs(found))
