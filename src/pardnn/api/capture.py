"""`pardnn.capture`, and the graph that a target of the command line stands for."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

from pardnn import backends
from pardnn.backends.entry_point import (
    EntryPoint,
    is_entry_point,
    load_entry_point,
)
from pardnn.graph.csr import op_edges
from pardnn.graph.file import read_graph
from pardnn.graph.ir import Graph
from pardnn.report.results import CaptureResult


def capture(step: Callable[..., Any], *args: Any) -> Graph:
    """Return the graph of one training step: forward, backward and update, as ATen ops.

    Nothing is computed and no tensor data is allocated; models, optimizers and random state are
    left as they were.

    Args:
        step: The training step, called as `step(*args)`; it returns the loss.
        *args: Models, optimizers and an example batch in global shapes.

    Raises:
        UnsupportedError: E8xx, with the line that cannot be captured and the usual rewrite.
        UserCodeError: E110, if the step itself raised.
    """
    return backends.capture(step, *args)


def opened(target: str) -> EntryPoint | str:
    """Return the entry point that a target names, its file executed; a graph file as it is.

    Raises:
        UsageError: E220 (a Python file without a function), E221 (there is no such file), E222 (no
            such function in it).
        UserCodeError: The user's file raised.
    """
    is_python = target.removesuffix(":").endswith(".py")
    return load_entry_point(target) if is_python or is_entry_point(target) else target


def graph_of(source: EntryPoint | str, batch_size: int | None = None) -> Graph:
    """Return the graph of an entry point, captured, or of a graph file."""
    if isinstance(source, EntryPoint):
        return captured(source, batch_size)[0]
    return read_graph(source)


def captured(entry: EntryPoint, batch_size: int | None = None) -> tuple[Graph, CaptureResult]:
    """Capture the step of an entry point under fake tensors.

    Args:
        entry: Where the step is from.
        batch_size: Given to its function, if not None.

    Raises:
        UsageError: E222 to E224, if it takes other arguments or returns something else.
        UnsupportedError: E8xx, if the step cannot be captured.
        UserCodeError: The user's own code raised.
    """
    factory = entry.factory(batch_size)
    started = time.perf_counter()
    graph = dataclasses.replace(backends.capture_factory(factory), name=entry.name)
    return graph, _figures(graph, time.perf_counter() - started)


def _figures(graph: Graph, seconds: float) -> CaptureResult:
    """Return the figures of a graph that took this many seconds to capture."""
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
