"""Which submeshes the devices of a cluster form, and clusters of some of its devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from pardnn.cluster import Cluster, Link


def submesh_sizes(cluster: Cluster) -> list[int]:
    """Return the sizes for which the devices form several equal submeshes of two or more devices.

    A submesh has consecutive devices. Submeshes are equal if types, speeds, limits and the links
    inside are.
    """
    count = cluster.num_devices
    sizes = [size for size in range(2, count // 2 + 1) if count % size == 0]
    return [size for size in sizes if _are_alike(cluster, size)]


def _are_alike(cluster: Cluster, size: int) -> bool:
    a, kinds = cluster.arrays, [(d.type, d.memory, d.speed) for d in cluster.devices]
    first = slice(0, size)
    for begin in range(size, cluster.num_devices, size):
        here = slice(begin, begin + size)
        if kinds[here] != kinds[first]:
            return False
        if not all(
            np.array_equal(x[here, here], x[first, first]) for x in (a.latency, a.bandwidth)
        ):
            return False
    return True


def part_of(cluster: Cluster, devices: Sequence[int], width: int = 1) -> Cluster:
    """Return some devices of a cluster, with the links among them.

    Args:
        cluster: All devices.
        devices: Which, by number.
        width: Between two of these, each with the `width - 1` devices after it, the slowest link
            counts.
    """
    a = cluster.arrays
    links: list[Link] = []
    for i in devices:
        for j in devices:
            latency = max(float(a.latency[i + n, j + n]) for n in range(width))
            if i == j or not np.isfinite(latency):
                continue
            bandwidth = min(float(a.bandwidth[i + n, j + n]) for n in range(width))
            source, target = cluster.devices[i].name, cluster.devices[j].name
            links.append(Link(source=source, target=target, bandwidth=bandwidth, latency=latency))
    return dataclasses.replace(
        cluster,
        devices=tuple(cluster.devices[i] for i in devices),
        links=tuple(links),
        default_link=None,
    )
