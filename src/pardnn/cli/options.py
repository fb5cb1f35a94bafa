"""Options that several commands share, and how they become values.

`pardnn --help` loads this and should answer at once: numpy and pydantic come with a command.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pardnn.errors import UsageError
from pardnn.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable

    from pardnn.backends import entry_point
    from pardnn.graph.ir import Graph
    from pardnn.plan.plan import Plan
    from pardnn.plan.state_in_place import StateInPlace
    from pardnn.planner.options import PlanOptions


def writable(path: Path | None) -> Path | None:
    """Check that a path can be written, before any work is done for it."""
    if path is not None:
        from pardnn.files import check_writable

        check_writable(path)
    return path


def _version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(f"pardnn {__version__}")
        raise typer.Exit


def no_command(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_version, help="Print the version.")
    ] = False,
) -> None:
    """Train a network that does not fit one device, without rewriting it."""


def _seconds(limit: float | None) -> float | None:
    """Check that a time limit is a number of seconds."""
    from pardnn.units import MAX_WAIT_SECONDS

    if limit is not None and not 0 <= limit <= MAX_WAIT_SECONDS:
        raise UsageError(f"--time-limit is {limit}; it must be from 0 to {MAX_WAIT_SECONDS:g}")
    return limit


Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
GraphOption = Annotated[
    Path | None, typer.Option("--graph", help="Graph file of the plan. Default: the one beside it.")
]
Output = Annotated[Path, typer.Option("-o", "--output", help="File to write.", callback=writable)]
OptionalOutput = Annotated[
    Path | None, typer.Option("-o", "--output", help="File to write.", callback=writable)
]
Target = Annotated[
    str,
    typer.Argument(
        metavar="TARGET", help="Graph file, or FILE.py:FUNCTION that returns (step, args)."
    ),
]
EntryPoint = Annotated[
    str,
    typer.Argument(metavar="FILE.py:FUNCTION", help="A function that returns (step, args)."),
]
PlanFile = Annotated[Path, typer.Argument(metavar="PLAN", help="Plan file.")]
BatchSize = Annotated[
    int | None,
    typer.Option(
        "--batch-size", min=1, help="Passed to FUNCTION as batch_size. Default: FUNCTION's own."
    ),
]


def one_of(*values: str) -> Callable[[str], list[str]]:
    """Return what completes one of these values in a shell."""

    def completed(incomplete: str) -> list[str]:  # typer knows the parameter by this name
        return [value for value in values if value.startswith(incomplete)]

    return completed


def _algorithms(incomplete: str) -> list[str]:
    from pardnn.planner.algorithms import known_algorithms

    return one_of(*known_algorithms())(incomplete)


Algorithm = Annotated[
    str,
    typer.Option(
        "--algorithm",
        help="auto, auto-whole (cuts no op), or one by name: docs/commands.md lists them.",
        autocompletion=_algorithms,
    ),
]
Objective = Annotated[
    str,
    typer.Option(
        "--objective",
        help="What to minimise: seconds (of one step), period (time per step of many in a row, "
        "with losses read later) or bytes (sent between devices).",
        autocompletion=one_of("seconds", "period", "bytes"),
    ),
]
Reserve = Annotated[
    float, typer.Option("--reserve", help="Fraction of each device's memory left unused.")
]
PolicyChoice = Annotated[
    str,
    typer.Option(
        "--policy",
        help="order (the plan's own), or fifo or priority: an engine that schedules ready ops.",
        autocompletion=one_of("order", "fifo", "priority"),
    ),
]
Microbatches = Annotated[
    str | None,
    typer.Option(
        "--microbatches",
        metavar="N|auto",
        help="Cut the batch into N pieces (auto: the fastest number). Default: whole.",
    ),
]
Recompute = Annotated[
    bool,
    typer.Option("--recompute", help="Run ops a second time where that lets the step fit."),
]
Offload = Annotated[
    bool,
    typer.Option(
        "--offload", help="Keep as much optimizer state on the host as the step needs to fit."
    ),
]
Seed = Annotated[int, typer.Option("--seed", help="Random seed: same seed, same plan.")]
TimeLimit = Annotated[
    float | None,
    typer.Option(
        "--time-limit",
        help="Seconds after which the best plan so far is taken. Default: no limit.",
        callback=_seconds,
    ),
]
_COSTS = (
    "measured (timed on this machine and cached; runs the ops, even of a graph file) or a "
    "preset: v100, k80, a100, h100, h200, cpu. Default: "
)
_costs = one_of("measured", "v100", "k80", "a100", "h100", "h200", "cpu")
CostChoice = Annotated[
    str | None,
    typer.Option(
        "--costs",
        help=f"{_COSTS}the graph's own seconds, else measured for a step, a100 for a graph file.",
        autocompletion=_costs,
    ),
]
PlanCosts = Annotated[
    str | None,
    typer.Option(
        "--costs",
        help=f"{_COSTS}as the plan was made, if known here; else the graph's own seconds, "
        "else a100.",
        autocompletion=_costs,
    ),
]
KeepState = Annotated[
    tuple[Path, Path] | None,
    typer.Option(
        "--keep-state",
        metavar="GRAPH PLAN",
        help="Leave parameters, buffers and optimizer states where this plan for another graph of "
        "the model put them.",
    ),
]
StartPlan = Annotated[
    Path | None,
    typer.Option(
        "--start",
        metavar="PLAN",
        help="Repair this plan and improve it by small moves.",
    ),
]
Steps = Annotated[int, typer.Option("--steps", min=1, help="Training steps to run.")]
Timeout = Annotated[float, typer.Option("--timeout", help="Longest wait for a rank, in seconds.")]
Verify = Annotated[
    bool, typer.Option("--verify", help="Also run the step on one device and compare.")
]
Threads = Annotated[int, typer.Option("--threads", min=1, help="CPU threads per rank.")]


def read_both(graph_file: Path | None, plan_file: Path) -> tuple[Graph, Plan]:
    """Return a graph and a plan, which may be of another graph, from their files.

    Args:
        graph_file: Of the graph; None only where `Command` has not looked for it.
        plan_file: Of the plan.

    Raises:
        FileError: E403 to E408, if one cannot be read.
        MismatchError: E502, if it is of another version.
    """
    from pardnn.graph.file import read_graph
    from pardnn.plan.file import read_plan

    assert graph_file is not None
    return read_graph(graph_file), read_plan(plan_file)


def state_of(files: tuple[Path, Path] | None) -> StateInPlace | None:
    """Return the state that `--keep-state` names; None without the option.

    Raises:
        MismatchError: E503, if the plan is for another graph.
        InvalidPlanError: E410, if it is not valid for its graph.
    """
    if files is None:
        return None
    from pardnn.plan.check import check_plan
    from pardnn.plan.file import check_fingerprint
    from pardnn.plan.state_in_place import state_in_place

    graph, plan = read_both(*files)
    check_fingerprint(plan, graph)
    check_plan(graph, plan)
    return state_in_place(graph, plan)


def graph_of(source: entry_point.EntryPoint | str, batch_size: int | None) -> Graph:
    """Return the graph of an entry point, captured, or of a graph file; a terminal shows which.

    Raises:
        UsageError: E206, for a batch size of a graph file.
    """
    if isinstance(source, str) and batch_size is not None:
        raise UsageError(
            f"--batch-size would be ignored: {source!r:.200} is a graph, of one batch size. "
            "Name the step, FILE.py:FUNCTION, instead.",
            code="E206",
        )
    from pardnn.api.capture import graph_of as graph
    from pardnn.report.progress import status

    with status("reading the graph" if isinstance(source, str) else "capturing the step"):
        return graph(source, batch_size)


def plan_options(*, microbatches: str | None = None, **chosen: Any) -> PlanOptions:
    """Return the options of planning, checked; those that a command does not have by default.

    Args:
        microbatches: A number, or "auto".
        **chosen: The others.

    Raises:
        UsageError: E2xx, if one has a value that cannot be used.
    """
    from pardnn.planner.options import PlanOptions

    if microbatches is not None:
        is_number = microbatches.isascii() and microbatches.isdigit() and len(microbatches) < 9
        if not is_number and microbatches != "auto":
            raise UsageError(f"--microbatches is {microbatches!r:.40}; it is a number or auto")
        chosen["microbatches"] = int(microbatches) if is_number else "auto"
    options = PlanOptions(**chosen)
    options.check_asked()
    return options
