"""The launcher: start the ranks of a plan on this machine and collect their results.

Each rank writes one result file in a private directory; the first failing rank is determined from
these files, and from exit statuses only if ranks could write nothing (`root_cause.py`). No rank
outlives this process (`processes.py`).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pardnn.backends.torch.comm import flight_record
from pardnn.backends.torch.comm.joining import rank_device
from pardnn.backends.torch.comm.private_folder import private_folder
from pardnn.backends.torch.comm.stop_signal import OnSignal
from pardnn.backends.torch.devices import this_device
from pardnn.backends.torch.launch.job import (
    GRAPH_FILE,
    PLAN_FILE,
    REFERENCE,
    Job,
    read_result,
    write_job,
)
from pardnn.backends.torch.launch.processes import WORKER, run_processes
from pardnn.backends.torch.launch.root_cause import root_cause
from pardnn.backends.torch.runtime.memory.limits import ALLOWANCE_BYTES
from pardnn.checkpoint.options import SaveOptions
from pardnn.errors import FileError, RankError, UserCodeError
from pardnn.graph.file import write_graph
from pardnn.graph.ir import Graph
from pardnn.plan.file import check_fingerprint, write_plan
from pardnn.plan.memory import peak_bytes
from pardnn.plan.plan import Plan, plan_arrays, planned_graph
from pardnn.plan.run_record import RunRecord, run_record

#: A wait that exceeds twice the median by this much, seconds, is worth a note.
STRAGGLER_S = 0.5
Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class LaunchResult:
    """What a run measured and what was predicted. Lists of bytes are per device.

    Attributes:
        losses: One per step.
        reference_losses: Those of the user's own step on one device, if requested.
        step_s: Seconds of each step on the slowest rank.
        peak_bytes_predicted: Peak of each device, from the plan.
        peak_bytes_measured: Peak of live tensor bytes on each rank.
        limit_bytes: Enforced limit of each rank; None without limit.
        allowance_bytes: Bytes that each limit leaves for memory other than tensors.
        notes: What a reader should know about this run.
        saved_steps: Steps of which a checkpoint was written.
        stopped_by: Name of the signal that ended it before its last step; None if none did.
        state: Fields of `StateDifference`; None if parameters were not compared.
        record: What the ranks measured of their ops, if requested.
    """

    losses: tuple[float, ...]
    reference_losses: tuple[float, ...] | None
    step_s: tuple[float, ...]
    peak_bytes_predicted: tuple[int, ...]
    peak_bytes_measured: tuple[int, ...]
    limit_bytes: tuple[int | None, ...]
    allowance_bytes: int
    notes: tuple[str, ...] = ()
    saved_steps: tuple[int, ...] = ()
    stopped_by: str | None = None
    state: dict[str, Any] | None = None
    record: RunRecord | None = None


def run_plan(
    target: str,
    graph: Graph,
    plan: Plan,
    *,
    steps: int = 5,
    threads: int = 1,
    timeout: float = 60.0,
    verify: bool = False,
    limits: Sequence[int | None] | None = None,
    batch_size: int | None = None,
    device: str | None = None,
    saving: SaveOptions | None = None,
    on_signal: OnSignal | None = None,
    progress: Progress | None = None,
    record: bool = False,
    code: Sequence[Path] | None = None,
) -> LaunchResult:
    """Run a plan's ranks on this machine for some steps.

    Args:
        target: `FILE.py:FUNCTION`, the step that `graph` was captured from.
        graph: The graph of that step.
        plan: A plan that is valid for it.
        steps: Number of training steps, each with the example batch.
        threads: Threads of each rank, and of the reference.
        timeout: Longest wait for one message, seconds.
        verify: Also run the user's own step on one device, in a separate process.
        limits: Bytes that each rank may hold, enforced; None for no limit.
        batch_size: Given to FUNCTION, if not None.
        device: "cpu" or "cuda"; None takes the one of this machine.
        saving: Checkpoints to write, and the one to resume from.
        on_signal: What SIGTERM and SIGINT make the ranks do after the current step: "save" it and
            end, or just end ("stop"). None ends the run at once, as an interrupt.
        progress: Called with what happens next, in a few words.
        record: Whether ranks take the times of their ops.
        code: Files of generated code, by rank, to run in place of the plan's actions.

    Raises:
        RankError: E6xx, naming the rank that failed first.
        StuckError: E7xx, naming the rank that hangs.
        MismatchError: E5xx, if graph, plan, ranks or devices do not belong together.
        UserCodeError: E110, if the user's own code raised.
    """
    check_fingerprint(plan, graph)
    device = device or this_device()
    for local_rank in range(plan.num_devices if device == "cuda" else 0):
        rank_device(device, local_rank)
    limits = tuple(limits) if limits is not None else (None,) * plan.num_devices
    tell = progress or _silent
    with _told_as_file_error(), private_folder() as directory:
        job = Job(
            target=target,
            steps=steps,
            threads=threads,
            timeout_s=timeout,
            device=device,
            limits=limits,
            batch_size=batch_size,
            seed=plan.seed,
            parent=os.getpid(),
            saving=saving,
            on_signal=on_signal,
            verify=verify,
            record=record,
            code=None if code is None else [str(path.resolve()) for path in code],
        )
        _write_request(directory, job, graph, plan)
        tell(f"starting {plan.num_devices} ranks")
        found = _run_ranks(directory, job, tell)
        reference = None
        if verify and found[0]["stopped_by"] is None:
            tell("running the step on one device")
            reference = _run_reference(directory)
    return _result(graph, plan, found, reference, limits)


@contextlib.contextmanager
def _told_as_file_error() -> Iterator[None]:
    """Raise E405 if the run's folder cannot be made or written, or no process can be started."""
    try:
        yield
    except OSError as error:
        where = f": {str(error.filename)!r}" if error.filename else ""
        raise FileError(
            f"the ranks cannot be started{where}: {error.strerror} (errno {error.errno}).\n"
            "They meet in the system's temporary folder; TMPDIR names another one.",
            code="E405",
        ) from error


def _write_request(directory: Path, job: Job, graph: Graph, plan: Plan) -> None:
    """Write what the ranks read; a full folder raises `OSError`, as one that cannot be made."""
    try:
        write_job(directory, job)
        write_graph(graph, directory / GRAPH_FILE)
        write_plan(plan, directory / PLAN_FILE)
    except FileError as error:
        if isinstance(error.__cause__, OSError):
            raise error.__cause__ from None
        raise


def _silent(_text: str) -> None:
    """Report no progress."""


def _result(
    graph: Graph,
    plan: Plan,
    found: Sequence[dict[str, Any]],
    reference: dict[str, Any] | None,
    limits: tuple[int | None, ...],
) -> LaunchResult:
    planned = planned_graph(graph, plan)
    for rank, each in enumerate(found):
        if repr(each["losses"]) != repr(found[0]["losses"]):
            raise RankError(
                f"rank {rank} returned losses {each['losses']}, rank 0 {found[0]['losses']}; they "
                "must be the same. This is a bug in pardnn.",
                code="E606",
                details={"rank": rank},
            )
    steps = zip(*(each["step_s"] for each in found), strict=True)
    notes = [f"rank {rank}: {note}" for rank, each in enumerate(found) for note in each["notes"]]
    return LaunchResult(
        losses=tuple(found[0]["losses"]),
        reference_losses=None if reference is None else tuple(reference["losses"]),
        step_s=tuple(max(times) for times in steps),
        peak_bytes_predicted=tuple(peak_bytes(planned, plan_arrays(planned, plan))),
        peak_bytes_measured=tuple(each["peak_bytes"] for each in found),
        limit_bytes=limits,
        allowance_bytes=ALLOWANCE_BYTES,
        notes=(*notes, *straggler_notes(found), *(reference or {}).get("notes", ())),
        state=(reference or {}).get("state"),
        saved_steps=tuple(found[0]["saved_steps"]),
        stopped_by=found[0]["stopped_by"],
        record=_record(plan, found),
    )


def _record(plan: Plan, found: Sequence[dict[str, Any]]) -> RunRecord | None:
    if any(each["times"] is None for each in found):
        return None
    return run_record(plan.graph_fingerprint, [each["times"] for each in found])


def straggler_notes(found: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield a note for each rank that made another wait much longer than in the median step.

    Args:
        found: Results of all ranks, in order of rank.
    """
    for rank in range(len(found)):
        waits = [
            max(each["waits_s"][step][rank] for each in found if each["waits_s"])
            for step in range(len(found[0]["waits_s"]))
        ]
        usual = sorted(waits)[len(waits) // 2] if waits else 0.0
        for step, longest in enumerate(waits):
            if longest > 2 * usual + STRAGGLER_S:
                yield (
                    f"rank {rank} is a straggler: in step {step} another rank waited "
                    f"{longest:.1f} s for it, usually {usual:.1f} s"
                )


# Processes.


def _run_ranks(directory: Path, job: Job, tell: Progress) -> list[dict[str, Any]]:
    """Run all ranks to their end; return their results in order of rank.

    Raises:
        PardnnError: The root cause, if a rank failed.
    """
    records = flight_record.make_folder()
    is_kept = False
    try:
        failures = run_processes(directory, job, records, tell)
        results = [read_result(directory, rank) for rank in range(len(job.limits))]
        if not failures and all(each is not None and "losses" in each for each in results):
            return [each for each in results if each is not None]
        is_kept = True
        raise root_cause(directory, job, failures, records)
    finally:
        if records is not None and not is_kept:
            shutil.rmtree(records, ignore_errors=True)


def _run_reference(directory: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", WORKER, str(directory), "--reference"]
    # Each has its own session: Ctrl-C reaches only this process, which ends it.
    done = subprocess.run(command, check=False, start_new_session=True)
    result = read_result(directory, REFERENCE)
    if result is None or "error" in result:
        said = result["error"]["traceback"] if result else f"it ended with {done.returncode}"
        raise UserCodeError(f"while running your own step on one device:\n{said}")
    return result
