"""`pardnn code`: what ranks run, as Python code to read and to debug."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pardnn import backends, files
from pardnn.api.run import run_target
from pardnn.api.simulate import check_plan
from pardnn.errors import MismatchError, UsageError
from pardnn.graph.ir import Graph
from pardnn.plan.file import check_fingerprint
from pardnn.plan.plan import Plan
from pardnn.planner.options import PlanOptions
from pardnn.report.export.result import CodeResult


def code(graph: Graph, plan: Plan, rank: int | None = None) -> dict[int, str]:
    """Return the code of one rank of a plan, or of all: a module of Python each.

    Args:
        graph: The graph that the plan is for.
        plan: Is proven here.
        rank: Of the device; None for all.

    Raises:
        UsageError: E248, if the plan has no such rank.
        MismatchError: E503, if the plan is for another graph.
        InvalidPlanError: E410, if it is not valid.
        FileError: E402 or E407, if an op's arguments are not valid.
        UnsupportedError: E801, if an op is not registered here.
    """
    if rank is not None and not 0 <= rank < plan.num_devices:
        raise UsageError(
            f"there is no rank {rank}: the plan has ranks 0 to {plan.num_devices - 1}", code="E248"
        )
    check_fingerprint(plan, graph)
    check_plan(graph, plan)
    return backends.plan_code(graph, plan, None if rank is None else [rank])


def write_code(found: dict[int, str], output: Path, *, is_folder: bool) -> list[Path]:
    """Write the code of ranks; return the files, in order of rank.

    Args:
        found: Of `code`.
        output: A file; or a folder, which is made if there is none.
        is_folder: Which of both.

    Raises:
        FileError: E405, if they cannot be written.
    """
    paths = [output / f"rank{rank}.py" if is_folder else output for rank in found]
    if is_folder:
        files.make_folder(output)
    for path, text in zip(paths, found.values(), strict=True):
        files.write_bytes(path, text.encode(errors="backslashreplace"))
    return paths


def edited_code(found: dict[int, str], folder: Path) -> list[Path]:
    """Return the files of a folder that were written from this code, and may have been edited.

    Args:
        found: Of `code`, of all ranks.
        folder: What `write_code` wrote.

    Raises:
        FileError: E403, if a file cannot be read.
        MismatchError: E503, if a file was written for another plan or graph.
    """
    paths = [folder / f"rank{rank}.py" for rank in found]
    for path, text in zip(paths, found.values(), strict=True):
        origin = next(line for line in text.splitlines() if line.startswith(backends.CODE_ORIGIN))
        if origin not in files.read_bytes(path).decode(errors="replace"):
            raise MismatchError(
                f"{str(path)!r} was not written for this plan and graph by this version.\nWrite "
                "it with -o, edit it, and keep its SHA-256 line.",
                code="E503",
            )
    return paths


def run_code(
    target: str,
    plan_file: Path,
    paths: Sequence[Path],
    *,
    steps: int,
    timeout: float,
    verify: bool,
    batch_size: int | None,
    threads: int,
) -> CodeResult:
    """Train for some steps with the code of ranks instead of the plan's actions.

    Args:
        target: `FILE.py:FUNCTION`, the step that the plan is for.
        plan_file: Of the plan.
        paths: Files of the code, by rank.
        steps: Number of training steps.
        timeout: Longest wait for another rank, seconds.
        verify: Run the user's own step on one device too.
        batch_size: Given to FUNCTION, if not None.
        threads: Of each rank.

    Raises:
        PardnnError: As `run_target` does.
    """
    ran = run_target(
        target,
        None,
        PlanOptions(threads=threads),
        plan_file=plan_file,
        steps=steps,
        timeout=timeout,
        verify=verify,
        batch_size=batch_size,
        code=paths,
    )
    return CodeResult(
        files=tuple(map(str, paths)),
        losses=ran.losses,
        step_s=ran.step_s,
        reference_losses=ran.reference_losses,
        verified=ran.verified,
        tolerance=ran.tolerance,
        largest_difference=ran.largest_difference,
        state=ran.state,
    )
