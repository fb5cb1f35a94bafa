"""Measure ops and links of this machine, into the cache; links of several, into a cluster file."""

from __future__ import annotations

import os
import time
from pathlib import Path

from pardnn import backends
from pardnn.cluster import (
    DEFAULT_BANDWIDTH,
    DEFAULT_LATENCY,
    MEASURED_LINKS,
    Cluster,
    DeviceNames,
    Rate,
    write_cluster,
)
from pardnn.errors import UsageError
from pardnn.graph.ir import Graph
from pardnn.planner.costs import described_kinds
from pardnn.report.progress import progress_bar, status
from pardnn.report.results import LinksResult, ProfileResult, RankLinksResult


def profiled(graph: Graph, threads: int = 1) -> ProfileResult:
    """Time the graph's distinct calls on this machine's device; those of a file in a child."""
    here = backends.this_device()
    if graph.is_captured:
        with progress_bar("timing ops") as progress:
            _, stats = backends.profile_graph(graph, here, progress, threads=threads)
    else:
        with status("timing the ops of a graph file, in a process of its own"):
            kinds = described_kinds(graph)
            _, stats = backends.profile_file(graph, here, allowed=kinds, threads=threads)
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


def local_rate() -> Rate | None:
    """Return the link of two CPU ranks of this machine, measured once; None where ranks use GPUs.

    What `parallelize` measures is another thing: the ranks of torchrun that are there.
    """
    if backends.this_device() != "cpu":
        return None
    known = backends.cached_links()
    if known is None:
        with status("measuring messages between two ranks of this machine, once"):
            known = backends.measure_links()
    return Rate(
        bandwidth=float(f"{known.idle.bandwidth:.3g}"), latency=float(f"{known.idle.latency:.3g}")
    )


def ranks_named() -> DeviceNames:
    """Return what ranks of this machine are called."""
    return "cpu" if backends.this_device() == "cpu" else "gpu"


def this_cluster(num_devices: int | None) -> Cluster:
    """Return this machine's ranks: their memory, and the links between them, measured once.

    Args:
        num_devices: None for all GPUs that torch sees; of CPU ranks it has to be said.

    Raises:
        UsageError: E205, if it is not said of CPU ranks, or there are fewer GPUs.
    """
    named = ranks_named()
    gpus = sum(each.startswith("cuda") for each in backends.visible_devices())
    if named == "cpu" and num_devices is None:
        raise UsageError("say how many CPU ranks: --cluster this:2, for example", code="E205")
    if named == "gpu" and (num_devices or 0) > gpus:
        raise UsageError(f"--cluster this:{num_devices}: torch sees {gpus} GPUs", code="E205")
    count = num_devices or gpus
    rate = (local_rate() if count > 1 else None) or Rate(
        bandwidth=DEFAULT_BANDWIDTH, latency=DEFAULT_LATENCY
    )
    return Cluster.uniform(
        count,
        memory=backends.rank_memory_bytes(count),
        bandwidth=rate.bandwidth,
        latency=rate.latency,
        links=MEASURED_LINKS,
        named=named,
    )


def is_of_torchrun() -> bool:
    """Return whether this process is one of several ranks that torchrun has started."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def profiled_rank_links(output: Path | None) -> RankLinksResult | None:
    """Measure messages between every two ranks of torchrun.

    Args:
        output: Cluster file that rank 0 writes; None for none.

    Returns:
        What was measured, on rank 0; None on the others.
    """
    found = backends.measure_rank_links()
    if os.environ.get("RANK", "0") != "0":
        return None
    if output is not None:
        write_cluster(found.cluster, output)
    within, between = found.within, found.between
    return RankLinksResult(
        num_devices=found.cluster.num_devices,
        num_nodes=found.num_nodes,
        latency_s=within.latency if within is not None else None,
        bandwidth=within.bandwidth if within is not None else None,
        between_latency_s=between.latency if between is not None else None,
        between_bandwidth=between.bandwidth if between is not None else None,
        measured=found.pairs,
        seconds=found.seconds,
    )
