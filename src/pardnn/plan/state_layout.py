"""Where the state of a step lives: which device holds which box of each parameter and state.

The layout is what two plans must share if training is to go on under the second without moving a
tensor, and what a checkpoint records of the plan that wrote it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from pardnn.graph.ir import Graph, Op
from pardnn.plan.mesh import Box
from pardnn.plan.plan import Plan, planned_graph

#: Kinds of source ops whose values outlive the step.
STATE_KINDS = ("parameter", "buffer", "state")


class Shard(NamedTuple):
    """What one device holds of one tensor of state.

    Attributes:
        device: Index of the device.
        op: Name of the source op in the planned graph, "w" or "w@2".
        box: Of the whole tensor; None for all of it.
    """

    device: int
    op: str
    box: Box | None


StateLayout = Mapping[str, tuple[Shard, ...]]
"""Per source op of the whole graph its shards, by device; replicas are listed, each of them."""


def shard_of(op: Op, whole: Mapping[str, Op]) -> tuple[str, Box | None]:
    """Return the source of which a source is a shard.

    Args:
        op: A source of a partitioned graph.
        whole: The sources of the graph before partitioning, by the names of their values.

    Returns:
        Its name, and the box of the shard; None for all of it.
    """
    shard = (op.arguments or {}).get("shard")
    if shard is None:
        return op.name, None
    box = tuple((low, high) for low, high in shard["box"])
    source = whole[shard["of"]]
    shape = source.outputs[0].shape or ()
    return source.name, None if box == tuple((0, n) for n in shape) else box


def state_layout(graph: Graph, plan: Plan) -> dict[str, tuple[Shard, ...]]:
    """Return where a plan keeps each parameter, buffer and optimizer state, in the graph's order.

    Args:
        graph: The whole graph of the step.
        plan: Made for it.
    """
    whole = {op.outputs[0].name: op for op in graph.ops if op.is_source}
    shards: dict[str, list[Shard]] = {op.name: [] for op in graph.ops if op.kind in STATE_KINDS}
    for op in planned_graph(graph, plan).ops:
        if op.kind in STATE_KINDS:
            of, box = shard_of(op, whole)
            shards[of].append(Shard(plan.placement[op.name], op.name, box))
    return {name: tuple(sorted(found)) for name, found in shards.items()}
