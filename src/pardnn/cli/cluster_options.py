"""Options that name devices and links, and how they become a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from pardnn.errors import FileError, UsageError

if TYPE_CHECKING:
    from pardnn.cluster import Cluster, DeviceNames

Devices = Annotated[
    int | None,
    typer.Option("--devices", help="Number of identical devices; or use --cluster."),
]
MaxMemory = Annotated[
    str | None,
    typer.Option(
        "--max-memory",
        help="Hard limit per device, such as 16GiB, or one for each: 16GiB,8GiB. Default: from "
        "--cluster, else none.",
    ),
]
Bandwidth = Annotated[
    str | None,
    typer.Option("--bandwidth", help="Bandwidth of every link. Default: 300GB/s; run measures it."),
]
Latency = Annotated[
    str | None,
    typer.Option("--latency", help="Latency of every link. Default: 25us; run measures it."),
]
Links = Annotated[
    str | None,
    typer.Option(
        "--links",
        help="independent (the default), or serial (the default of run): one message at a time per "
        "link.",
    ),
]
ClusterChoice = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        help="Cluster file, PRESET[:K] such as dgx-v100:4, or this:K: K ranks on this machine.",
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
        cluster: `--cluster`; then none of the others but `--max-memory`.
        of_this_machine: What is not given of links is measured here, instead of the default, they
            carry one message at a time, and devices are called what ranks here are.
        named: Else, what devices are called.

    Raises:
        UsageError: E205, if they contradict each other or name no cluster.
    """
    sizes = None if max_memory is None else max_memory.split(",")
    memory = sizes[0] if sizes is not None and len(sizes) == 1 else sizes
    uniform = {
        "--devices": devices,
        "--bandwidth": bandwidth,
        "--latency": latency,
        "--links": links,
    }
    if cluster is not None:
        clash = [name for name, value in uniform.items() if value is not None]
        if clash:
            raise UsageError(
                f"--cluster says how many devices and links there are; leave out "
                f"{', '.join(clash)}",
                code="E205",
            )
        found = _named_cluster(cluster)
        return found if memory is None else found.limited(memory)
    if devices is None:
        raise UsageError(
            "name the devices: --devices K [--max-memory SIZE], or --cluster FILE|PRESET[:K]",
            code="E205",
        )
    from pardnn.cluster import DEFAULT_BANDWIDTH, DEFAULT_LATENCY, MEASURED_LINKS, Cluster, Rate

    rate, model = Rate(bandwidth=DEFAULT_BANDWIDTH, latency=DEFAULT_LATENCY), links or "independent"
    if of_this_machine:
        from pardnn.api.profile import local_rate, ranks_named

        named, model = ranks_named(), links or MEASURED_LINKS
        if devices > 1 and (bandwidth is None or latency is None):
            rate = local_rate() or rate
    return Cluster.uniform(
        devices,
        memory=memory,
        bandwidth=rate.bandwidth if bandwidth is None else bandwidth,
        latency=rate.latency if latency is None else latency,
        links=model,  # pyright: ignore[reportArgumentType]
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
