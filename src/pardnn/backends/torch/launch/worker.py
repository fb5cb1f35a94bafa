"""One rank of `pardnn run`: a process that torchrun's launcher starts, and the reference's process.

Everything it needs lies in one private directory: the job, the graph, the plan. It writes one
result file there, also when it fails. `python -m pardnn.backends.torch.launch.worker DIRECTORY`.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import random
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pardnn.backends.entry_point import load_factory
from pardnn.errors import PardnnError
from pardnn.graph.file import read_graph
from pardnn.plan.file import read_plan

GRAPH_FILE, PLAN_FILE, JOB_FILE = "graph.json", "plan.json", "job.json"
#: How long a rank that has been told of another's failure may take to end by itself.
GRACE_S = 6.0
#: How long a rank that the launcher ends may take to notice and tell why.
ACCOUNT_S = 2.5
_PR_SET_PDEATHSIG = 1
#: Sockets that must stay open although nobody here writes to them.
_KEPT: list[socket.socket] = []


@dataclass(frozen=True, kw_only=True)
class Job:
    """What all ranks of one run are to do.

    Attributes:
        target: `FILE.py:FUNCTION`.
        steps: Number of training steps.
        threads: Threads of each rank.
        timeout_s: Longest wait for one message, seconds.
        device: "cpu" or "cuda".
        limits: Bytes that each rank may hold; None without limit.
        batch_size: Given to FUNCTION, if not None.
        seed: Of random numbers that FUNCTION does not seed.
        parent: Process that started the run.
    """

    target: str
    steps: int
    threads: int
    timeout_s: float
    device: str
    limits: tuple[int | None, ...]
    batch_size: int | None
    seed: int
    parent: int


def write_job(directory: Path, job: Job) -> None:
    """Write the job's file."""
    (directory / JOB_FILE).write_text(json.dumps(asdict(job)), encoding="utf-8")


def read_job(directory: Path) -> Job:
    """Read the job's file."""
    data = json.loads((directory / JOB_FILE).read_text(encoding="utf-8"))
    return Job(**data | {"limits": tuple(data["limits"])})


def result_path(directory: Path, rank: int | str) -> Path:
    """Return where a rank, or the reference, writes its result."""
    return directory / f"result-{rank}.json"


def write_result(directory: Path, rank: int | str, result: dict[str, Any]) -> None:
    """Write a result file in one piece."""
    path = result_path(directory, rank)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(result), encoding="utf-8")
    temporary.replace(path)


def _seed(seed: int) -> None:
    """Give a FUNCTION that seeds nothing the same numbers on every rank and in the reference."""
    import numpy as np
    import torch

    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002  the user's code may draw from it
    random.seed(seed)


def _end_with_parent(parent: int) -> None:
    """Ask the system to end this process when the launcher is gone (Linux)."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "prctl"):
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def _hear(_number: int, _frame: Any) -> None:
    """Do nothing: the thread that reads the wake-up bytes ends the process."""


def _end_late_when_asked() -> None:
    """Give this rank a moment to write its account when the launcher ends it.

    The launcher ends all ranks as soon as one has died, which the others are about to notice. A
    thread waits for the signal, because the main one may be deep inside a wait or an op.
    """
    heard, signalled = socket.socketpair()
    signalled.setblocking(False)
    signal.set_wakeup_fd(signalled.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, _hear)

    def end() -> None:
        while signal.SIGTERM not in heard.recv(1):
            pass
        time.sleep(ACCOUNT_S)
        os._exit(128 + signal.SIGTERM)

    _KEPT.append(signalled)
    threading.Thread(target=end, name="pardnn-end", daemon=True).start()


def _abandon(directory: Path, rank: int) -> Callable[[dict[str, Any]], None]:
    def abandon(failure: dict[str, Any]) -> None:
        """End a rank that waits, computes or sleeps on after another one has failed."""
        time.sleep(GRACE_S)
        if not result_path(directory, rank).exists():
            first = failure.get("first_failing_rank", failure["rank"])
            details = {"rank": rank, "first_failing_rank": first}
            message = f"rank {rank} stopped: rank {first} failed first"
            write_result(directory, rank, {"error": {
                "code": failure["code"], "message": message, "details": details}})  # fmt: skip
        os._exit(6)

    return abandon


def _warm_device(job: Job) -> Any:
    """Return this rank's device, with all that is loaded late loaded."""
    import torch

    from pardnn.backends.torch.comm.world import rank_device
    from pardnn.backends.torch.runtime import memory_limits

    memory_limits.pin_allocator()
    torch.set_num_threads(job.threads)
    device = rank_device(job.device, int(os.environ.get("LOCAL_RANK", "0")))
    memory_limits.warm_up(device)
    return device


def run_rank(directory: Path, job: Job, rank: int) -> dict[str, Any]:
    """Run one rank and return its result."""
    from pardnn.backends.torch.comm.world import join, leave
    from pardnn.backends.torch.make_step import make_step
    from pardnn.backends.torch.runtime import memory_limits
    from pardnn.backends.torch.runtime.binding import Binding
    from pardnn.backends.torch.runtime.program import Program
    from pardnn.backends.torch.runtime.start_rank import start

    limit, device = job.limits[rank], _warm_device(job)
    program = Program(read_graph(directory / GRAPH_FILE), read_plan(directory / PLAN_FILE))
    _seed(job.seed)
    step, args, recording = make_step(load_factory(job.target, job.batch_size))
    binding = Binding(step, args, program.whole, device)
    notes = [f"the model was built on the host: {recording.fallback}"] * bool(recording.fallback)
    world = join(device, timeout_s=job.timeout_s)
    example: dict[str, Any] = {}

    def residents() -> dict[str, Any]:
        if limit is not None:
            notes.append(memory_limits.set_limit(limit, device))
        batch = [op for op in program.inputs() if op.name in binding.example_values()]
        values = binding.replayed([*program.residents(rank), *batch], recording)
        example.update((op.name, values.pop(op.name)) for op in batch)
        return values

    executor = start(program, world, residents, on_failure=_abandon(directory, rank))
    executor.limit_bytes = limit
    losses = [
        executor.step(binding.inputs(example, {})).item() for _ in range(job.steps)
    ]  # fmt: skip
    memory_limits.lift_limit()
    leave([world])
    return {
        "losses": losses, "step_s": executor.step_s, "peak_bytes": executor.peak_bytes,
        "waits_s": executor.waits_s, "notes": notes,
    }  # fmt: skip


def run_reference(job: Job) -> dict[str, Any]:
    """Run the user's own step eagerly, on one device, and return its losses."""
    import torch

    from pardnn.backends.torch.capture.capture import loss_of

    torch.set_num_threads(job.threads)
    # Ranks run the calls of the step itself: a compiled step has other roundings.
    torch.compiler.set_stance("force_eager")
    _seed(job.seed)
    made = load_factory(job.target, job.batch_size)()
    step, args = made
    start = time.perf_counter()
    losses = [loss_of(step(*args)).item() for _ in range(job.steps)]
    return {"losses": losses, "seconds": time.perf_counter() - start}


def _error(error: BaseException, rank: int | str) -> dict[str, Any]:
    """Return an error as JSON; the traceback is the user's or the op's, where there is one."""
    cause = error.__cause__ or error
    lines = traceback.format_exception(cause)
    if isinstance(error, PardnnError):
        found = {"code": error.code, "message": error.message, "details": error.details}
    else:
        text = f"internal error in rank {rank}: {type(error).__name__}: {error}"
        details = {"rank": rank, "first_failing_rank": rank}
        found = {"code": "E101", "message": text, "details": details}
    return {**found, "traceback": "".join(lines)[-8000:]}


def main(directory: Path, rank: int | str) -> int:
    """Run, write the result file, and return the exit status."""
    job = read_job(directory)
    _end_with_parent(job.parent)
    _end_late_when_asked()
    # Standard output belongs to the command's own result.
    os.dup2(2, 1)
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(job.threads)
    try:
        result = run_reference(job) if rank == "reference" else run_rank(directory, job, int(rank))
        write_result(directory, rank, result)
        return 0
    except BaseException as error:
        with contextlib.suppress(ImportError):
            from pardnn.backends.torch.runtime.memory_limits import lift_limit

            lift_limit()
        found = _error(error, rank)
        write_result(directory, rank, {"error": found})
        return int(found["code"][1])


if __name__ == "__main__":
    _rank = "reference" if "--reference" in sys.argv else int(os.environ.get("RANK", "0"))
    _status = main(Path(sys.argv[1]), _rank)
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads that still wait for a failed peer must not keep the process.
    os._exit(_status)
