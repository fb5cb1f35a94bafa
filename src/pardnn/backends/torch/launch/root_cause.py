"""Why a run failed: the error of the rank that failed first, with a line for each of the others."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from pardnn.backends.torch.comm.flight_record import FlightRecord, add_line
from pardnn.backends.torch.launch.job import (
    BUILDING,
    NO_OPEN_FILES,
    UNWRITTEN,
    Job,
    read_pid,
    read_result,
    read_stage,
    stack_path,
)
from pardnn.backends.torch.user_step.code_names import is_library_file
from pardnn.errors import FileError, PardnnError, RankError, StuckError, error_from

#: Errors in code, the user's or ours, whose traceback says more than the message.
_TRACED_CODES = frozenset({"E101", "E110", "E601"})
#: Timeouts of a rank that waits, before the first step, for a missing one.
_MISSED_CODES = frozenset({"E605", "E702"})
_FRAME = re.compile(r'  File "(.*)", line (\d+) in ')


def root_cause(
    directory: Path, job: Job, failures: Mapping[int, ProcessFailure], records: Path | None
) -> PardnnError:
    """Return the error to raise for a run that failed.

    Args:
        directory: The directory of the run.
        job: The run's job.
        failures: How the ranks ended whose exit status is not 0.
        records: Folder of the flight records; each rank that wrote none gets one.
    """
    results = [read_result(directory, rank) for rank in range(len(job.limits))]
    errors = {rank: each["error"] for rank, each in enumerate(results) if each and "error" in each}
    silent = [rank for rank, each in enumerate(results) if each is None]
    if not errors:
        error = _ended_silently(silent, failures)
    else:
        root = _first(errors)
        missed = root["code"] in _MISSED_CODES and silent
        if missed and _is_building(directory, silent[0]):
            error = _still_building(directory, job, silent[0], root)
        else:
            error = _failed(root, errors, silent[0] if missed else None, failures)
    if records is not None:
        _complete(records, directory, len(results))
        add_line(error, records)
    return error


def _failed(
    root: dict[str, Any],
    errors: dict[int, dict[str, Any]],
    missed: int | None,
    failures: Mapping[int, ProcessFailure],
) -> PardnnError:
    """Return an error that a rank reported, with what else is known.

    Args:
        root: The error.
        errors: The error of each rank that reported one.
        missed: The rank that others have waited for in vain.
        failures: As for `root_cause`.
    """
    first = int(root["details"].get("first_failing_rank", root["details"].get("rank", 0)))
    lines = [root["message"]]
    if missed is not None:
        # The cause is not the rank that timed out, but the one that wrote nothing.
        first = missed
        lines.insert(0, f"rank {first} ended before its work was done, and wrote no result.")
    # Messages of user code may name any rank.
    is_named = root["code"] != "E110" and f"rank {first}" in lines[0].lower()
    if not is_named and not lines[0].startswith(f"rank {first}"):
        lines[0] = f"rank {first}: {lines[0]}"
    lines += _exit_line(first, failures)
    own = errors.get(first)
    if own is not None and root["code"] in _TRACED_CODES:
        lines.append(own.get("traceback", "").rstrip())
    for rank, each in errors.items():
        if rank != first and each["message"] != root["message"]:
            lines.append(each["message"].splitlines()[0])
    details = {key: value for key, value in root["details"].items() if key != "report"}
    details |= {"first_failing_rank": first}
    return error_from(root["code"], "\n".join(lines), details)


def _first(errors: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """Return the error of the rank that failed first: its own, or the report that others have."""
    for rank, each in errors.items():
        details = each["details"]
        if "report" not in details and details.get("first_failing_rank", rank) == rank:
            return each
    for rank, each in errors.items():
        details = each["details"]
        if "report" not in details and details.get("rank", rank) == rank:
            return each
    for each in errors.values():
        if "report" in each["details"]:
            return each["details"]["report"]
    return next(iter(errors.values()))


def _is_building(directory: Path, rank: int) -> bool:
    """Whether a rank was in the user's function when told to end."""
    return read_stage(directory, rank) == BUILDING and stack_path(directory, rank).exists()


def _still_building(directory: Path, job: Job, rank: int, root: dict[str, Any]) -> StuckError:
    """Return the error of a rank that hangs in the user's function."""
    place = _users_place(stack_path(directory, rank))
    return StuckError(
        f"rank {rank} is still {BUILDING}{place and f', at {place}'}; "
        f"{root['message'].splitlines()[0]}\n"
        "If it may take longer on one rank than on the others, raise the timeout (--timeout).",
        code="E703",
        details={
            "rank": rank, "first_failing_rank": rank, "where": place, "target": job.target,
        },
    )  # fmt: skip


def _users_place(path: Path) -> str:
    """Return the user's `file:line` at which a process was; empty if unknown.

    Args:
        path: The file of the stacks that it left, the main thread last.
    """
    if not path.exists():
        return ""
    main = path.read_text(encoding="utf-8", errors="replace").split("Thread 0x")[-1]
    frames = _FRAME.findall(main.split("\n", 1)[-1])
    own = [f"{file}:{line}" for file, line in frames if not is_library_file(file)]
    return own[0] if own else ""


def _exit_line(rank: int, failures: Mapping[int, ProcessFailure]) -> Iterator[str]:
    failure = failures.get(rank)
    if failure is not None and failure.exitcode < 0:
        name = signal.Signals(-failure.exitcode).name
        yield f"Rank {rank} was ended by {name}."


#: By exit status: the error's code, why a rank's result is missing, and what to do.
_NO_RESULT = {
    UNWRITTEN: (
        "E405",
        "the folder of the run is full, or cannot be written",
        "It is in the system's temporary folder; TMPDIR names another one.",
    ),
    NO_OPEN_FILES: (
        "E413",
        "too many open files",
        "Raise their limit (`ulimit -n`), or close in the step what it opens.",
    ),
}


def _ended_silently(silent: Sequence[int], failures: Mapping[int, ProcessFailure]) -> PardnnError:
    rank = min(failures, key=lambda each: failures[each].timestamp, default=silent[0])
    if rank in failures and failures[rank].exitcode in _NO_RESULT:
        code, why, advice = _NO_RESULT[failures[rank].exitcode]
        return FileError(
            f"rank {rank} cannot write its result: {why}.\n{advice}",
            code=code,
            details={"rank": rank, "first_failing_rank": rank},
        )
    how = "with exit status 0, before its work was done"
    if rank in failures:
        code = failures[rank].exitcode
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit status {code}"
    return RankError(
        f"rank {rank} ended {how}, and wrote no result.\nLook at what it printed last.",
        code="E602",
        details={"rank": rank, "first_failing_rank": rank},
    )


def _complete(records: Path, directory: Path, num_ranks: int) -> None:
    """Write what is known about ranks without a flight record of their own."""
    for rank in range(num_ranks):
        if not (records / f"rank-{rank}.txt").exists():
            result, stack = read_result(directory, rank), stack_path(directory, rank)
            lines = [read_stage(directory, rank) or "it did not start"]
            if result is not None and "error" in result:
                lines += ["", *result["error"]["message"].splitlines()]
                lines += result["error"].get("traceback", "").splitlines()
            if stack.exists():
                lines += ["", *stack.read_text(encoding="utf-8", errors="replace").splitlines()]
            FlightRecord(records, rank, read_pid(directory, rank)).write(lines)
