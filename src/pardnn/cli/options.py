"""Options that several commands share, and how they become values.

`pardnn --help` loads this and should answer at once: numpy and pydantic come with a command.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from pardnn.errors import FileError, UsageError
from pardnn.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable

    from pardnn.backends import entry_point
    from pardnn.cluster import Cluster, DeviceNames
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
        bool, typer.Option("--version", is_eager=True, callback=_version, help="Say which.")
    ] = False,
) -> None:
    """Train a network that does not fit one device, without rewriting it."""


def _seconds(limit: float | None) -> float | None:
    """Check that a time limit is a number of seconds."""
    from pardnn.units import MAX_WAIT_SECONDS

    if limit is not None and not 0 <= limit <= MAX_WAIT_SECONDS:
        raise UsageError(
            f"--time-limit is {limit}; it is a number of seconds from 0 to {MAX_WAIT_SECONDS:g}"
        )
    return limit


Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
GraphOption = Annotated[Path, typer.Option("--graph", help="Graph file of the plan.")]
Output = Annotated[Path, typer.Option("-o", "--output", help="File to write.", callback=writable)]
OptionalOutput = Annotated[
    Path | None, typer.Option("-o", "--output", help="File to write.", callback=writable)
]
Target = Annotated[str, typer.Argument(metavar="TARGET", help="Graph file or FILE.py:FUNCTION.")]
EntryPoint = Annotated[str, typer.Argument(metavar="FILE.py:FUNCTION", help="Returns step, args.")]
PlanFile = Annotated[Path, typer.Argument(metavar="PLAN", help="Plan file.")]
BatchSize = Annotated[
    int | None, typer.Option("--batch-size", min=1, help="Passed to FUNCTION as batch_size.")
]
Devices = Annotated[
    int | None, typer.Option("--devices", help="Number of equal accelerators.", show_default=False)
]
MaxMemory = Annotated[
    str | None,
    typer.Option("--max-memory", help="Hard limit per device, such as 16GiB; or one each: a,b."),
]
Bandwidth = Annotated[
    str | None,
    typer.Option(
        "--bandwidth", help="Of every link, such as 300GB/s (the default; run measures its ranks)."
    ),
]
Latency = Annotated[
    str | None,
    typer.Option(
        "--latency", help="Of every link, such as 25us (the default; run measures its ranks)."
    ),
]
Links = Annotated[str | None, typer.Option("--links", help="independent (the default) or serial.")]
ClusterChoice = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        help="Cluster file, PRESET[:K] such as dgx-v100:4, or this:K: K ranks of this machine.",
    ),
]


class ClusterOptions(NamedTuple):
    """What a command line says of devices and links: what `cluster_from_options` takes."""

    devices: Devices = None
    max_memory: MaxMemory = None
    bandwidth: Bandwidth = None
    latency: Latency = None
    links: Links = None
    cluster: ClusterChoice = None


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
        help="auto, auto-whole (cuts no op), or one by name.",
        autocompletion=_algorithms,
    ),
]
Objective = Annotated[
    str,
    typer.Option(
        "--objective", help="seconds or bytes.", autocompletion=one_of("seconds", "bytes")
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
        "--microbatches", metavar="N|auto", help="Pieces that the batch is cut in, placed freely."
    ),
]
Recompute = Annotated[
    bool,
    typer.Option("--recompute", help="Call ops a second time where that lets the step fit."),
]
Offload = Annotated[bool, typer.Option("--offload", help="Optimizer state may be on the host.")]
Seed = Annotated[int, typer.Option("--seed", help="Same seed, same plan.")]
TimeLimit = Annotated[
    float | None,
    typer.Option(
        "--time-limit",
        help="Seconds of search; then the best plan so far is taken.",
        callback=_seconds,
    ),
]
CostChoice = Annotated[
    str | None,
    typer.Option(
        "--costs",
        help="measured (timed on this machine, cached; runs the ops, of a graph file too) or a "
        "preset: v100, k80, a100, h100, h200, cpu. Default: the graph's own seconds, else measured "
        "of a step and a100 of a graph file.",
        autocompletion=one_of("measured", "v100", "k80", "a100", "h100", "h200", "cpu"),
    ),
]
KeepState = Annotated[
    tuple[Path, Path] | None,
    typer.Option(
        "--keep-state",
        metavar="GRAPH PLAN",
        help="Leave parameters, buffers and optimizer states where this plan of another graph of "
        "the model has them.",
    ),
]
StartPlan = Annotated[
    Path | None,
    typer.Option("--start", metavar="PLAN", help="Repair and improve this plan, near it."),
]
Steps = Annotated[int, typer.Option("--steps", min=1, help="Training steps to run.")]
Timeout = Annotated[
    float, typer.Option("--timeout", help="Seconds that a wait for a rank may last.")
]
Verify = Annotated[
    bool, typer.Option("--verify", help="Run the step on one device too and compare.")
]
Threads = Annotated[int, typer.Option("--threads", min=1, help="CPU threads per rank.")]


def read_both(graph_file: Path, plan_file: Path) -> tuple[Graph, Plan]:
    """Return a graph and a plan, which may be of another graph, from their files.

    Raises:
        FileError: E403 to E408, if one cannot be read.
        MismatchError: E502, if it is of another version.
    """
    from pardnn.graph.file import read_graph
    from pardnn.plan.file import read_plan

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


def cluster_from_options(
    devices: int | None,
    max_memory: str | None,
    bandwidth: str | None,
    latency: str | None,
    links: str | None,
    cluster: str | None,
    *,
    of_this_machine: bool = False,
    named: DeviceNames = "gpu",
) -> Cluster:
    """Return the cluster that the options describe.

    Args:
        devices: `--devices`.
        max_memory: `--max-memory`, one size or one for each device, separated by commas.
        bandwidth: `--bandwidth`.
        latency: `--latency`.
        links: `--links`.
        cluster: `--cluster`; then none of the others.
        of_this_machine: What is not given of links is measured here, instead of the default, and
            devices are called what ranks here are.
        named: Else, what devices are called.

    Raises:
        UsageError: E205, if they contradict each other or name no cluster.
    """
    uniform = {
        "--devices": devices,
        "--max-memory": max_memory,
        "--bandwidth": bandwidth,
        "--latency": latency,
        "--links": links,
    }
    if cluster is not None:
        clash = [name for name, value in uniform.items() if value is not None]
        if clash:
            raise UsageError(
                f"--cluster says everything about the devices; leave out {', '.join(clash)}",
                code="E205",
            )
        return _named_cluster(cluster)
    if devices is None:
        raise UsageError(
            "name the devices: --devices K [--max-memory SIZE], or --cluster FILE|PRESET[:K]",
            code="E205",
        )
    from pardnn.cluster import DEFAULT_BANDWIDTH, DEFAULT_LATENCY, Cluster, Rate

    rate = Rate(bandwidth=DEFAULT_BANDWIDTH, latency=DEFAULT_LATENCY)
    if of_this_machine:
        from pardnn.api.profile import local_rate, ranks_named

        named = ranks_named()
        if devices > 1 and (bandwidth is None or latency is None):
            rate = local_rate() or rate
    sizes = None if max_memory is None else max_memory.split(",")
    return Cluster.uniform(
        devices,
        memory=sizes[0] if sizes is not None and len(sizes) == 1 else sizes,
        bandwidth=rate.bandwidth if bandwidth is None else bandwidth,
        latency=rate.latency if latency is None else latency,
        links=links or "independent",  # pyright: ignore[reportArgumentType]
        named=named,
    )


def devices_named(target: str, costs: str | None) -> DeviceNames:
    """Return what devices are called: after what the ops are timed on.

    Args:
        target: Graph file or entry point.
        costs: `--costs`; None measures the ops of a step on this machine.
    """
    from pardnn.backends.entry_point import is_entry_point

    if costs == "measured" or (costs is None and is_entry_point(target)):
        from pardnn.api.profile import ranks_named

        return ranks_named()
    return "cpu" if costs == "cpu" else "gpu"


def _is_there(text: str) -> bool:
    try:
        return Path(text).exists()
    except (OSError, ValueError):  # too long for a name
        return False


def _named_cluster(text: str) -> Cluster:
    from pardnn.cluster import PRESETS, Cluster

    name, _, count = text.partition(":")
    known = name in PRESETS or name == "this"
    if not known and not _is_there(text):
        raise FileError(
            f"there is no cluster file {text!r:.200}, and no preset of that name: there are "
            f"this, {', '.join(PRESETS)}",
            code="E403",
        )
    if not known:
        return Cluster.load(text)
    if count and not (count.isascii() and count.isdigit() and int(count) > 0):
        raise UsageError(f"{text!r:.60}: write PRESET:K with a number of devices K", code="E205")
    number = int(count) if count else None
    if name == "this":
        from pardnn.api.profile import this_cluster

        return this_cluster(number)
    return Cluster.preset(name, number)


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
