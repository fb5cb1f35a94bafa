"""Where the state of a step lives: which device holds which box of each parameter and state.

The layout is what two plans must share if training is to go on under the second without moving a
tensor, and what a checkpoint records of the plan that wrote it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from pardnn.errors import InvalidPlanError, shown
from pardnn.graph.ir import Graph, Op, Tensor
from pardnn.plan.mesh import Box, layout_of, owned_boxes
from pardnn.plan.plan import Plan, planned_graph

#: Kinds of source ops whose values outlive the step.
STATE_KINDS = ("parameter", "buffer", "state")


class Shard(NamedTuple):
    """What one device holds of one tensor of state.

    Attributes:
        device: Index of the device.
        op: Name of the source op in the planned graph, "w" or "w@2".
        box: Of the whole tensor; None for all of it.
        on_host: Whether it lies in the memory of the device's host.
    """

    device: int
    op: str
    box: Box | None
    on_host: bool = False


StateLayout = Mapping[str, tuple[Shard, ...]]
"""Per source op of the whole graph its shards, by device; replicas are listed, each of them."""


def places_of(shards: Iterable[Shard]) -> list[tuple[int, Box | None, bool]]:
    """Return where shards lie, whatever their ops are called: device, box, whether on its host."""
    return [(shard.device, shard.box, shard.on_host) for shard in shards]


def shard_at(shards: Iterable[Shard], device: int) -> Shard | None:
    """Return the shard that a device holds; None without."""
    return next((shard for shard in shards if shard.device == device), None)


def covers(held: Shard | None, box: Box | None) -> bool:
    """Whether what a device holds contains a box; None is the whole."""
    if held is None or held.box is None or box is None:
        return held is not None and held.box is None
    return all(low <= a and b <= high for (low, high), (a, b) in zip(held.box, box, strict=True))


class KeptShard(NamedTuple):
    """What one device holds of a tensor that the step returns, when its ops have run.

    Attributes:
        device: Index of the device.
        tensor: Name in the planned graph.
        box: Of the whole tensor; None for all of it.
    """

    device: int
    tensor: str
    box: Box | None


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
            device = plan.placement[op.name]
            shards[of].append(Shard(device, op.name, box, op.memory == "host"))
    return {name: tuple(sorted(found)) for name, found in shards.items()}


def kept_shards(op: Op, tensor: Tensor, plan: Plan) -> tuple[KeptShard, ...]:
    """Return where a plan keeps a tensor that the step returns, by device.

    Args:
        op: Of the whole graph, which makes the tensor.
        tensor: Of its outputs.
        plan: Made for that graph.

    Raises:
        InvalidPlanError: E410, if the plan cuts it in a way that its mesh does not have.
    """
    name, maker = tensor.name, op.name
    if plan.pieces is not None:
        makers = (o.name for o in plan.pieces.ops if any(t.name == name for t in o.outputs))
        maker = next(makers, None)
        if maker is None:
            raise InvalidPlanError(f"the step returns {shown(name)}, which the plan never joins")
    if plan.partition is None:
        return (KeptShard(plan.placement[maker], name, None),)
    shape, layout = tensor.shape or (), layout_of(plan.partition.sharding[name])
    boxes = None if layout is None else owned_boxes(shape, layout, plan.partition.mesh)
    if boxes is None:
        raise InvalidPlanError(f"tensor {shown(name)} has no layout on the mesh of the plan")
    whole = tuple((0, size) for size in shape)
    first = plan.placement[f"{maker}@0"]
    return tuple(
        KeptShard(first + position, f"{name}@{position}", None if box == whole else box)
        for position, box in enumerate(boxes)
    )
