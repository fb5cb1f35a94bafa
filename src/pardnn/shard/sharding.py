"""The decision of operator partitioning, as data: `search` finds it, `spmd` carries it out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pardnn.plan.mesh import Layout, Mesh, layout_of
from pardnn.plan.partitioned_graph import Partition


@dataclass(frozen=True, slots=True)
class FixedLayouts:
    """State that stays in place: a search decides everything else.

    Attributes:
        mesh: The devices.
        layouts: Of the tensors that stay, by name.
    """

    mesh: Mesh
    layouts: Mapping[str, Layout]


AxisLoops = tuple[str | None, ...]
"""Per mesh axis the loop of an op that is cut, None if every device along it does the same."""


@dataclass(frozen=True, slots=True)
class Sharding:
    """How every tensor and every op of a graph is cut.

    Attributes:
        mesh: The devices.
        layouts: Of each tensor of the graph, by name: what each device owns of it. Host scalars
            and tensors of rank 0 are whole everywhere.
        axes: Of each op that is a call, by name: the loop cut at each mesh axis. An operator
            without a description has None at every axis: all devices run it whole.
    """

    mesh: Mesh
    layouts: Mapping[str, Layout]
    axes: Mapping[str, AxisLoops]


def sharding_of(partition: Partition) -> Sharding:
    """Return the decision of a plan that states along which loops ops are cut."""
    layouts = {name: layout_of(words) or () for name, words in partition.sharding.items()}
    return Sharding(partition.mesh, layouts, partition.loops or {})
