"""Measure ops and links of this machine, into the cache."""

from __future__ import annotations

import time

from pardnn import backends
from pardnn.graph.ir import Graph
from pardnn.report.progress import progress_bar
from pardnn.report.results import LinksResult, ProfileResult


def profiled(graph: Graph, threads: int = 1) -> ProfileResult:
    """Time the graph's distinct calls on this machine's device."""
    with progress_bar("timing ops") as progress:
        here = backends.this_device()
        _, stats = backends.profile_graph(graph, here, progress, threads=threads)
    return ProfileResult(measured=stats.measured, cached=stats.cached, seconds=stats.seconds)


def profiled_links() -> LinksResult:
    """Measure messages between two local ranks, idle and while they compute."""
    started = time.perf_counter()
    found = backends.measure_links()
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
