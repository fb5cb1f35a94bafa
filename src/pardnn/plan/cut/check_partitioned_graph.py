"""The checker of partitioned graphs: independent of the code that partitions a graph.

It proves that every op of the graph has its local op on every device, that the shards of every
tensor are those that its layout names, and, following each element from its owner through slices,
messages and fetches, that what is assembled is the right region of one tensor. Which regions of
its inputs an op needs, only its description knows; the numeric tests certify that. O(local ops).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pardnn.graph.ir import LOSS_KIND, Graph, Op, Tensor
from pardnn.plan.cut.check_joins import join_problems
from pardnn.plan.cut.check_sums_in_place import sum_problems
from pardnn.plan.cut.check_terms import term_problems
from pardnn.plan.cut.local_regions import LocalRegions, Region, arguments_of
from pardnn.plan.mesh import Box, boxes_of, mesh_problem
from pardnn.plan.partitioned_graph import (
    ADD,
    ADD_IN_PLACE,
    DRAW,
    UPDATE,
    Partition,
)
from pardnn.plan.plan import Plan

#: Of arguments of another form: no later rule can read them.
_NO_SENSE = "its arguments are not valid"


def partition_problems(graph: Graph, plan: Plan) -> Iterator[str]:
    """Yield what is wrong with the partitioned graph of a sharded plan.

    Args:
        graph: The graph that is partitioned: of the step, or of the pieces of its batch.
        plan: A plan with a partition.
    """
    partition = plan.partition
    assert partition is not None
    tensors = {tensor.name: tensor for op in graph.ops for tensor in op.outputs}
    size, problem = partition.mesh.size, mesh_problem(partition.mesh)
    if problem is not None:
        yield f"partition.mesh: {problem}"
        return
    if partition.submeshes < 1 or size * partition.submeshes != plan.num_devices:
        yield (
            f"partition: {partition.submeshes} x {size} devices of the mesh, order has "
            f"{plan.num_devices}"
        )
        return
    if partition.sharding.keys() != tensors.keys():
        name = min(partition.sharding.keys() ^ tensors.keys())
        yield f"partition.sharding: {name!r:.60} is not a tensor of both graph and plan"
        return
    boxes = _owned(tensors, partition)
    if isinstance(boxes, str):
        yield boxes
        return
    yield from _local_ops(graph, plan, partition)
    regions = LocalRegions(partition.ops)
    problems = list(_local_tensors(plan, partition, tensors, boxes, regions))
    yield from problems
    if any(_NO_SENSE in problem for problem in problems):
        return
    yield from join_problems(plan, partition, regions.open)
    yield from term_problems(graph, partition)
    yield from sum_problems(plan, partition, {op.name: op for op in graph.ops})
    if partition.submeshes > 1:
        yield from (
            f"messages: {m.tensor!r:.60} goes into a buffer" for m in plan.messages if m.into
        )


def _owned(tensors: Mapping[str, Tensor], partition: Partition) -> dict[str, tuple[Box, ...]] | str:
    """Return what each position owns of each tensor; a sentence if a layout cannot be."""
    boxes: dict[str, tuple[Box, ...]] = {}
    known: dict[Any, tuple[Box, ...] | None] = {}
    for name, words in partition.sharding.items():
        key = tensors[name].shape, words
        if key not in known:
            known[key] = boxes_of(tensors[name], words, partition.mesh)
        found = known[key]
        if found is None:
            return (
                f"partition.sharding: {name!r:.60} of shape {list(tensors[name].shape or ())} "
                f"cannot be {list(words)} on a mesh {list(partition.mesh.shape)}"
            )
        boxes[name] = found
    return boxes


def _local_ops(graph: Graph, plan: Plan, partition: Partition) -> Iterator[str]:
    """Check that every op has a local op at every position of one submesh, the loss mark at one."""
    size = partition.mesh.size
    local_ops = {op.name: op for op in partition.ops}
    expected: set[str] = set()
    for op in graph.ops:
        names = [f"{op.name}@{position}" for position in range(size)]
        there = [name for name in names if name in local_ops]
        expected |= set(there)
        if len(there) != (1 if op.kind == LOSS_KIND else len(names)):
            count = f"{len(there)} local ops on {len(names)} devices"
            yield f"partition: op {op.name!r:.60} has {count}"
        first = plan.placement.get(names[0], 0) // size * size
        for device, name in enumerate(names, start=first):
            if name in local_ops and plan.placement.get(name) != device:
                yield f"partition: op {name!r:.60} is not placed on device {device}"
            if name in local_ops and not _is_local_op(op, local_ops[name]):
                kind = local_ops[name].kind
                yield f"partition: op {name!r:.60} is {kind}, not a local op of {op.kind}"
    for name, op in local_ops.items():
        if name not in expected and not op.kind.startswith("pardnn."):
            yield f"partition: op {name!r:.60} ({op.kind}) does not belong to any op of the graph"
        position = plan.placement.get(name, 0) % size
        if name.rpartition("@")[2] != str(position):
            yield f"partition: op {name!r:.60} runs at position {position} of the mesh"


def _is_local_op(op: Op, local: Op) -> bool:
    if local.kind == op.kind:
        return True
    if (op.kind, local.kind) == (ADD, ADD_IN_PLACE):
        return True  # `check_sums_in_place` tells whether it may be
    is_random = local.kind == DRAW and arguments_of(local)[:1] == [op.kind]
    return is_random or local.kind == UPDATE or "dropout" in op.kind


def _local_tensors(
    plan: Plan,
    partition: Partition,
    tensors: Mapping[str, Tensor],
    boxes: Mapping[str, tuple[Box, ...]],
    regions: LocalRegions,
) -> Iterator[str]:
    """Follow which region of a tensor of the graph each local tensor is; note open buffers."""
    for op in partition.ops:
        device = plan.placement.get(op.name, 0) % partition.mesh.size
        found = problem = None
        try:
            found = regions.made_by(op)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            found, problem = None, f"{_NO_SENSE} ({error!s:.60})"
        if isinstance(found, str):
            found, problem = None, found
        for tensor in op.outputs:
            name, _, at = tensor.name.rpartition("@")
            if name in tensors and at == str(device):
                box = boxes[name][device]
                problem = problem or _shard_problem(op, tensor, box, found, name)
                regions.note(tensor.name, Region(name, box))
            elif found is not None:
                regions.note(tensor.name, found)
        if problem is not None:
            yield f"partition: op {op.name!r:.60}: {problem}"


def _shard_problem(op: Op, tensor: Tensor, box: Box, found: Any, name: str) -> str | None:
    """Return why a local tensor is not the shard that its device owns."""
    lengths = tuple([end - begin for begin, end in box])
    if (tensor.shape or ()) != lengths:
        return f"{tensor.name!r:.60} has shape {list(tensor.shape or ())}, owned is {list(lengths)}"
    if op.is_source:
        shard = (op.arguments or {}).get("shard")
        stated = [list(ends) for ends in box]
        if shard is None or shard != {"of": name, "box": stated}:
            return f"its shard is {shard!r:.80}, owned is {stated} of {name!r:.60}"
    elif found is not None and found.of == name and found.box != box:
        return f"{tensor.name!r:.60} is made of {list(found.box)}, owned is {list(box)}"
    return None
