"""The decision of operator partitioning, as data: what `search` finds and `spread` carries out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pardnn.plan.mesh import Layout, Mesh
from pardnn.shard.partition.per_device import AxisLoops


@dataclass(frozen=True, slots=True)
class Sharding:
    """How every tensor and every op of a graph is cut.

    Attributes:
        mesh: The devices.
        layouts: Of each tensor of the graph, by name: what each device owns of it. Host scalars
            and tensors of rank 0 are whole everywhere.
        axes: Of each op that is a call, by name: the loop cut at each mesh axis. An operator
            without description has None at every axis: all devices run it whole.
    """

    mesh: Mesh
    layouts: Mapping[str, Layout]
    axes: Mapping[str, AxisLoops]
