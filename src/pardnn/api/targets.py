"""From what a person names on the command line to graphs and plans."""

from __future__ import annotations

import dataclasses
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pardnn.backends.entry_point import is_entry_point, load_factory
from pardnn.graph.csr import op_edges
from pardnn.graph.file import read_graph
from pardnn.graph.ir import Graph
from pardnn.planner.costs import Progress
from pardnn.planner.make_plan import Objective
from pardnn.report.results import CaptureResult, LinksResult, ProfileResult

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """The options of `pardnn plan`; see `api.plan`."""

    algorithm: str = "auto"
    objective: Objective = "seconds"
    reserve: float = 0.1
    seed: int = 0
    time_limit: float | None = None
    costs: str | None = None
    threads: int = 1


def graph_of(target: str, batch_size: int | None = None) -> Graph:
    """Return the graph of a graph file or an entry point."""
    if is_entry_point(target):
        return captured(target, batch_size)[0]
    return read_graph(target)


def captured(target: str, batch_size: int | None = None) -> tuple[Graph, CaptureResult]:
    """Capture the step of an entry point under fake tensors.

    Raises:
        UsageError: E22x, if the entry point does not exist or returns something else.
        UnsupportedError: E8xx, if the step cannot be captured.
        UserCodeError: The user's own code raised.
    """
    factory = load_factory(target, batch_size)
    from pardnn.backends.torch.make_step import capture_factory

    started = time.perf_counter()
    path, _, function = target.rpartition(":")
    graph = dataclasses.replace(capture_factory(factory), name=f"{Path(path).stem}:{function}")
    return graph, capture_result(graph, time.perf_counter() - started)


def capture_result(graph: Graph, seconds: float) -> CaptureResult:
    """Return the figures of a captured graph."""
    sizes = {"parameter": 0, "state": 0}
    for op in graph.ops:
        if op.kind in sizes:
            sizes[op.kind] += sum(t.bytes for t in op.outputs if t.alias_of is None)
    return CaptureResult(
        ops=len(graph.ops),
        tensors=graph.arrays.num_tensors,
        edges=len(op_edges(graph.arrays)),
        parameters_bytes=sizes["parameter"],
        optimizer_bytes=sizes["state"],
        capture_s=seconds,
    )


def profiled(graph: Graph, threads: int = 1) -> ProfileResult:
    """Time the graph's distinct calls on this machine's device, into the cache."""
    from pardnn.backends.torch.devices import this_device
    from pardnn.backends.torch.profile.op_times import profile_graph

    with progress_bar("timing ops") as progress:
        _, stats = profile_graph(graph, this_device(), progress, threads=threads)
    return ProfileResult(measured=stats.measured, cached=stats.cached, seconds=stats.seconds)


def profiled_links() -> LinksResult:
    """Measure messages between two local ranks, idle and while they compute."""
    from pardnn.backends.torch.profile.link_times import measure_links

    started = time.perf_counter()
    found = measure_links()
    return LinksResult(
        latency_s=found.idle.latency,
        bandwidth=found.idle.bandwidth,
        send_s=found.sending.latency,
        send_bandwidth=found.sending.bandwidth,
        post_s=found.posting,
        take_s=found.taking.latency,
        take_bandwidth=found.taking.bandwidth,
        wake_s=found.waking,
        seconds=time.perf_counter() - started,
        measured=1,
        cached=0,
    )


@contextmanager
def status(text: str) -> Iterator[None]:
    """Show what goes on, on a terminal's stderr; nothing elsewhere."""
    import sys

    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True, markup=False).status(text):
        yield


@contextmanager
def progress_bar(title: str) -> Iterator[Progress | None]:
    """Yield a function that draws progress on a terminal's stderr; None elsewhere."""
    import sys

    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress as Bar

    with Bar(console=Console(stderr=True), transient=True) as bar:
        task: Any = None

        def update(done: int, total: int) -> None:
            nonlocal task
            task = bar.add_task(title, total=total) if task is None else task
            bar.update(task, completed=done, total=total)

        yield update
