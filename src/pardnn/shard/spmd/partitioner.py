"""SPMD partitioning: from a sharding to a complete plan.

Problem: a `Sharding` says what every device owns and which loops it runs. A plan states every op of
every device, every message, and where buffers are allocated and released.
Idea: the local ops of all devices are a graph of their own (the partitioned graph), and the plan is
a placement of it. Ops keep the order of the graph on every device, so memory that one device reuses
the others reuse too. Remote regions are fetched directly before the op that reads them
(`multi_fetch`), and partial results are added by the owners of the blocks (`spread_reduction`). So
all memory of the step is in the plan, and its proof, the simulator and the runtime need not know
about sharding.
Complexity: O(ops x devices + messages); equal calls are partitioned once (`templates`).
Reference: Tofu (EuroSys 2019), section 6.
Deviations: order stands for the paper's extra control dependencies; ops without a description run
whole everywhere; random ops draw the numbers of one device.
"""

from __future__ import annotations

import base64
import math
from collections import Counter
from typing import NamedTuple

import numpy as np

from pardnn.errors import InvalidPlanError, shown
from pardnn.graph.ir import Graph, Op
from pardnn.plan.mesh import Box, placements
from pardnn.plan.partitioned_graph import Partition, check_batch_is_read_only
from pardnn.plan.plan import Plan
from pardnn.shard.aten.lookup import description_of
from pardnn.shard.cache import begin_graph
from pardnn.shard.sharding import Sharding
from pardnn.shard.spmd.emitter import Emitter, box_list, local_tensor
from pardnn.shard.spmd.local_ops import emit_local_ops
from pardnn.shard.spmd.partial_sums import emit_total, is_total
from pardnn.shard.spmd.random_ops import emit_random_op, is_random_op
from pardnn.shard.spmd.sums_in_place import with_sums_in_place
from pardnn.shard.spmd.templates import partition_op
from pardnn.shard.spmd.whole_state import whole_state_notes
from pardnn.time_limit import check_time


def spmd_partition(
    graph: Graph,
    sharding: Sharding,
    *,
    in_turn: bool = False,
    reuse: int = 0,
    relay_axes: int = 0,
    sums_in_place: bool = True,
) -> Plan:
    """Return the plan that carries out a sharding, without metadata.

    Args:
        graph: A captured graph.
        sharding: A layout for every tensor and the cut loops of every call; see `legalize`.
        in_turn: Receive the slices of a region one after the other, which holds less memory but
            takes longer.
        reuse: Two ops that need the same region of a tensor share one fetch if at most this many
            ops of the graph are between them; the region is held until the second.
        relay_axes: How many of the first mesh axes are slow: slices that several devices of a group
            need cross them once (`relays`).
        sums_in_place: Add into the first term of a sum if nothing else reads it.

    Raises:
        InvalidPlanError: E410, if a layout or the cut of a loop cannot be.
        DescriptionError: E220, if a description is wrong.
        UnsupportedError: E822 or E823, if an op draws or writes what cannot be cut.
    """
    emitter = Emitter(graph, sharding, in_turn=in_turn, reuse=reuse, relay_axes=relay_axes)
    partition, notes = _partitioned(emitter, sums_in_place=sums_in_place)
    return Plan(
        placement={name: device for device, row in enumerate(emitter.rows) for name in row},
        order=tuple(tuple(row) for row in emitter.rows),
        messages=tuple(emitter.messages),
        partition=partition,
        notes=notes,
    )


class PositionedOps(NamedTuple):
    """The ops of a mesh whose devices are not chosen yet.

    Attributes:
        partition: Its ops, in the order of the ops of the graph that they belong to.
        of: Number of that op of the graph.
        position: Of each op, the mesh position that runs it.
        notes: What a reader should know.
    """

    partition: Partition
    of: list[int]
    position: list[int]
    notes: tuple[str, ...]


def partition_for_submeshes(graph: Graph, sharding: Sharding, submeshes: int) -> PositionedOps:
    """Return the ops of each mesh position, before they are placed.

    Each op of the graph may run on another submesh, so slices are received into buffers of their
    own, and no region is fetched for two ops.

    Args:
        graph: A captured graph, or one whose batch is in pieces.
        sharding: Over the mesh of one submesh; see `legalize`.
        submeshes: How many there are.

    Raises:
        InvalidPlanError: E410, if a layout or the cut of a loop cannot be.
        DescriptionError: E220, if a description is wrong.
        UnsupportedError: E822 or E823, if an op draws or writes what cannot be cut.
    """
    emitter = Emitter(graph, sharding, in_place=False)
    partition, notes = _partitioned(emitter, submeshes=submeshes)
    place = {name: position for position, row in enumerate(emitter.rows) for name in row}
    of = graph.arrays.topological[emitter.beside].tolist()
    return PositionedOps(partition, of, [place[op.name] for op in partition.ops], notes)


def _partitioned(
    emitter: Emitter, *, sums_in_place: bool = False, submeshes: int = 1
) -> tuple[Partition, tuple[str, ...]]:
    """Write the ops of all devices; return them, and what a person should know."""
    graph, sharding = emitter.graph, emitter.sharding
    check_batch_is_read_only(graph)
    begin_graph()
    undescribed: Counter[str] = Counter()
    for emitter.now, number in enumerate(graph.arrays.topological.tolist()):
        check_time()
        op = graph.ops[number]
        if op.is_source:
            _source(emitter, op)
        elif is_random_op(op.kind):
            emit_random_op(emitter, op)
        elif is_total(emitter, op):
            emit_total(emitter, op)
        else:
            _call(emitter, op, undescribed)
    axes, ops = len(emitter.mesh.shape), emitter.ops
    if sums_in_place:
        ops = with_sums_in_place(ops, emitter.messages)
    partition = Partition(
        mesh=emitter.mesh,
        sharding={
            name: placements(sharding.layouts.get(name) or (None,) * axes)
            for name in emitter.tensors
        },
        ops=tuple(ops),
        loops={name: row for name, row in sharding.axes.items() if any(row)},
        in_turn=emitter.in_turn,
        reuse=emitter.reuse,
        relay_axes=emitter.relay_axes,
        sums_in_place=sums_in_place,
        submeshes=submeshes,
    )
    notes = (
        *whole_state_notes(emitter),
        *(_note(kind, count) for kind, count in sorted(undescribed.items())),
    )
    return partition, notes


def _note(kind: str, count: int) -> str:
    return f"{kind} has no description: {count} op{'s' * (count > 1)} run whole on every device"


def _source(emitter: Emitter, op: Op) -> None:
    """Write the shards of what exists before the step."""
    for device in emitter.devices:
        for tensor in op.outputs:
            box = emitter.boxes[tensor.name][device]
            shard = {"of": tensor.name, "box": box_list(box)}
            arguments = {**(op.arguments or {}), **_content(op, box), "shard": shard}
            emitter.emit(
                device,
                Op(
                    name=f"{op.name}@{device}", kind=op.kind, memory=op.memory, source=op.source,
                    outputs=(local_tensor(tensor, f"{tensor.name}@{device}", box),),
                    module=op.module, seconds=op.seconds, arguments=arguments,
                ),
            )  # fmt: skip


def _content(op: Op, box: Box) -> dict[str, str]:
    """Return a constant's own bytes in a box, as data; nothing for other sources."""
    (tensor,) = op.outputs
    shape = tensor.shape or ()
    if op.kind != "constant" or "data" not in (op.arguments or {}) or not math.prod(shape):
        return {}
    whole = np.frombuffer(base64.b64decode((op.arguments or {})["data"]), dtype=np.uint8)
    elements = whole.reshape(*shape, whole.size // math.prod(shape))
    mine = elements[tuple(slice(begin, end) for begin, end in box)]
    return {"data": base64.b64encode(mine.tobytes()).decode()}


def _call(emitter: Emitter, op: Op, undescribed: Counter[str]) -> None:
    axes = emitter.sharding.axes.get(op.name) or (None,) * len(emitter.mesh.shape)
    partitioned = partition_op(op, axes, emitter.tensors, emitter.mesh)
    if partitioned is None:
        raise InvalidPlanError(
            f"op {shown(op.name)} ({op.kind}, {op.source or 'unknown line'}) cannot be cut along "
            f"{axes} on a mesh {emitter.mesh.shape}: a loop is too short, or results cannot be "
            "combined.\nCut another loop, or leave the op whole (None)."
        )
    is_tensor = any(emitter.tensors[name].shape for name in op.inputs)
    is_tensor = is_tensor and not op.kind.startswith("pardnn.")
    if is_tensor and op.arguments and "args" in op.arguments and description_of(op.kind) is None:
        undescribed[op.kind] += 1
    emit_local_ops(emitter, op, partitioned)
