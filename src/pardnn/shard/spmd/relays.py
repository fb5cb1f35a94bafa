"""Relays: a slice that several devices of a group need crosses a slow link once.

Problem: each device that fetches a slice from its owner sends it over the same slow link again.
Idea: devices that differ only along the last mesh axes form a group, with fast links inside. The
first device of a group that needs a slice takes it from its owner; the others take it from that
device, group by group from the outermost in. Relays are numbered below those that they serve, so no
two wait for each other.
Complexity: O(devices x slices x levels) per region.
Reference: Tofu (EuroSys 2019), section 5.2: each worker group has "the data fetched from the other
group as extra input tensors", and all of its workers share it.
Deviations: a relay passes on only whole slices of what it has assembled itself. Partial results are
added inside a group by `spread_reduction`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from pardnn.cluster import Cluster
from pardnn.graph.ir import Tensor
from pardnn.plan.mesh import Mesh
from pardnn.shard.boxes import Slice


def relay_axes(cluster: Cluster, mesh: Mesh) -> int:
    """Return how many of the first mesh axes are crossed by slower links than those inside them.

    Args:
        cluster: Has the links.
        mesh: Its devices.
    """
    bandwidth = np.array(cluster.arrays.bandwidth, dtype=np.float64)
    np.fill_diagonal(bandwidth, np.inf)
    found, outer, size = 0, float(bandwidth.min()), mesh.size
    for axis, count in enumerate(mesh.shape):
        size //= count
        if size < 2:
            break
        inner = min(
            float(bandwidth[i : i + size, i : i + size].min()) for i in range(0, mesh.size, size)
        )
        if inner > outer:
            found, outer = axis + 1, inner
    return found


def relays_of(
    mesh: Mesh, axes: int, tensor: Tensor, sources: Mapping[int, Sequence[Slice]]
) -> dict[tuple[int, Slice], Slice]:
    """Return which slices a device takes from a relay: by device and slice, the relay's slice.

    Args:
        mesh: The devices.
        axes: How many of the first mesh axes are slow.
        tensor: The tensor of the slices; if it repeats elements, a region stores it differently.
        sources: By device, the slices that it needs, with their owners.
    """
    shape = tensor.shape or ()
    if not axes or any(n > 1 and s == 0 for n, s in zip(shape, tensor.strides or (), strict=False)):
        return {}
    groups = {device: mesh.coordinates(device)[:axes] for device in range(mesh.size)}
    remote: dict[int, set[object]] = {
        device: {box for owner, box in taken if groups[owner] != groups[device]}
        for device, taken in sources.items()
    }
    found: dict[tuple[int, Slice], Slice] = {}
    for device, taken in sources.items():
        for owner, box in taken:
            for level in range(axes, 0, -1):
                group = groups[device][:level]
                if groups[owner][:level] == group:
                    break
                first = min(d for d in sources if groups[d][:level] == group and box in remote[d])
                if first != device:
                    found[device, (owner, box)] = (first, box)
                    break
    return found


def served_by(relays: Mapping[tuple[int, Slice], Slice], device: int) -> dict[int, Sequence[Slice]]:
    """Return the slices that a device passes on, by receiver.

    Args:
        relays: From `relays_of`.
        device: The relay.
    """
    found: dict[int, list[Slice]] = {}
    for (receiver, _), key in relays.items():
        if key[0] == device:
            found.setdefault(receiver, []).append(key)
    return dict(found)
