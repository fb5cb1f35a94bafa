"""The files between the launcher and its processes: a job, and one result file per process.

All files are in one private directory: the job, the graph, the plan, the results.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from pardnn.checkpoint.options import SaveOptions

GRAPH_FILE, PLAN_FILE, JOB_FILE = "graph.json", "plan.json", "job.json"
#: The name of a signal that ranks must heed, written by the launcher when it arrives.
SIGNAL_FILE = "signal"
#: How far the training is, in words, written by rank 0 now and then.
PROGRESS_FILE = "progress"
#: The store by which ranks meet.
STORE_FILE = "store"
#: Where ranks leave their state, for the reference to compare.
STATE_FOLDER = "state"
#: The stage of a rank that runs the user's function.
BUILDING = "in the function that builds the model"
#: Exit status of a process that could not write its result (EX_IOERR of sysexits.h).
UNWRITTEN = 74
#: The same for lack of open files (EX_OSERR).
NO_OPEN_FILES = 71
#: Replaces a rank in the name of the reference's result file.
REFERENCE = "reference"


@dataclass(frozen=True, kw_only=True)
class Job:
    """What all ranks of one run have to do.

    Attributes:
        target: `FILE.py:FUNCTION`.
        steps: Number of training steps.
        threads: Threads of each rank.
        timeout_s: Longest wait for one message, seconds.
        device: "cpu" or "cuda".
        limits: Bytes that each rank may hold; None without limit.
        batch_size: Given to FUNCTION, if not None.
        seed: The seed for random numbers that FUNCTION does not seed.
        parent: Id of the process that started the run.
        saving: Its checkpoints; None without any.
        on_signal: See `StopSignal`; None ends at once.
        record: Whether ranks measure the times of their ops.
        code: File of each rank's generated code; None runs the plan's actions.
        verify: Whether the state after the last step is compared with the reference's.
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
    saving: SaveOptions | None = None
    on_signal: Literal["save", "stop"] | None = None
    verify: bool = False
    record: bool = False
    code: Sequence[str] | None = None


def write_job(directory: Path, job: Job) -> None:
    """Write the job's file."""
    (directory / JOB_FILE).write_text(json.dumps(asdict(job)), encoding="utf-8")


def read_job(directory: Path) -> Job:
    """Read the job's file."""
    data = json.loads((directory / JOB_FILE).read_text(encoding="utf-8"))
    saving = None if data["saving"] is None else SaveOptions(**data["saving"])
    return Job(**data | {"limits": tuple(data["limits"]), "saving": saving})


def write_pid(directory: Path, rank: int | str) -> None:
    """Tell the launcher this process's id."""
    write_whole(directory / f"pid-{rank}", str(os.getpid()))


def read_pid(directory: Path, rank: int) -> int | None:
    """Return the process id of a rank; None if it has not written it yet."""
    path = directory / f"pid-{rank}"
    return int(path.read_text(encoding="ascii")) if path.exists() else None


def write_stage(directory: Path, rank: int | str, stage: str) -> None:
    """Tell the launcher what this process has begun to do."""
    write_whole(directory / f"stage-{rank}", stage)


def write_whole(path: Path, text: str) -> None:
    """Write a file so that another process that reads it finds all of it or nothing."""
    written = path.with_name(f"{path.name}.tmp")
    written.write_text(text, encoding="utf-8")
    written.replace(path)


def read_stage(directory: Path, rank: int | str) -> str:
    """Return what a process last began to do; empty if it has not begun."""
    path = directory / f"stage-{rank}"
    return path.read_text(encoding="utf-8") if path.exists() else ""


def stack_path(directory: Path, rank: int | str) -> Path:
    """Return the file into which a process that is told to end writes its stack."""
    return directory / f"stack-{rank}"


def read_progress(directory: Path) -> str | None:
    """Return how far the training is; None before its first step is done."""
    path = directory / PROGRESS_FILE
    return path.read_text(encoding="utf-8") if path.exists() else None


def signal_of(directory: Path) -> str | None:
    """Return the name of the signal that the launcher has received; None if none."""
    path = directory / SIGNAL_FILE
    return path.read_text(encoding="ascii") if path.exists() else None


def result_path(directory: Path, rank: int | str) -> Path:
    """Return the result file of a rank, or of the reference."""
    return directory / f"result-{rank}.json"


def write_result(directory: Path, rank: int | str, result: dict[str, Any]) -> None:
    """Write a result file in one piece.

    Args:
        directory: The directory of the run.
        rank: The rank; `REFERENCE` for the reference.
        result: JSON types; `{"error": ...}` for a failed process.
    """
    write_whole(result_path(directory, rank), json.dumps(result))


def read_result(directory: Path, rank: int | str) -> dict[str, Any] | None:
    """Return the result of a rank, or of the reference; None if it wrote none."""
    path = result_path(directory, rank)
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
