"""The checker of partitioned graphs: independent of the code that partitions a graph.

It proves that every op of the graph has its local op on every device, that the shards of every
tensor are those that its layout names, and, following each element from its owner through slices,
messages and fetches, that what is assembled is the right region of one tensor. Which regions of
its inputs an op needs, only its description knows; the numeric tests certify that. O(local ops).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, cast

from pardnn.graph.ir import LOSS_KIND, Graph, Op, Tensor
from pardnn.plan.cut.check_sums_in_place import sum_problems
from pardnn.plan.cut.check_terms import term_problems
from pardnn.plan.cut.runs_of_memory import is_run
from pardnn.plan.mesh import Box, Mesh, layout_of, mesh_problem, owned_boxes
from pardnn.plan.partitioned_graph import (
    ADD,
    ADD_IN_PLACE,
    DRAW,
    FETCH,
    JOIN,
    REDUCE,
    SLICE,
    UPDATE,
    Partition,
)
from pardnn.plan.plan import Plan

#: Of arguments of another form: no later rule can read them.
_NO_SENSE = "its arguments are not valid"
#: Kinds that move data: `_region_of` tells which region of a tensor each of them makes.
_DATA_MOVEMENTS = frozenset({SLICE, FETCH, JOIN, UPDATE, REDUCE})


class _Region(NamedTuple):
    """What a local tensor is: a box of a tensor of the graph, or of another local tensor."""

    of: str
    box: Box


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
    open_buffers = _OpenBuffers({}, _completed(partition))
    problems = list(_local_tensors(plan, partition, tensors, boxes, open_buffers))
    yield from problems
    if any(_NO_SENSE in problem for problem in problems):
        return
    yield from _in_place_receives(plan, partition, open_buffers.args.keys())
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


def boxes_of(tensor: Tensor, words: tuple[str, ...], mesh: Mesh) -> tuple[Box, ...] | None:
    """Return what each device owns of a tensor; None if it cannot be laid out so.

    Args:
        tensor: Of the graph.
        words: Its placements, in DTensor's words, one per mesh axis.
        mesh: The devices.
    """
    layout, shape = layout_of(words), tensor.shape or ()
    if layout is None or len(layout) != len(mesh.shape):
        return None
    if any(dim is not None and dim >= len(shape) for dim in layout):
        return None
    return owned_boxes(shape, layout, mesh)


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
    is_random = local.kind == DRAW and _arguments(local)[:1] == [op.kind]
    return is_random or local.kind == UPDATE or "dropout" in op.kind


def _arguments(op: Op) -> list[Any]:
    return (op.arguments or {}).get("args", [])


def _local_tensors(
    plan: Plan,
    partition: Partition,
    tensors: Mapping[str, Tensor],
    boxes: Mapping[str, tuple[Box, ...]],
    open_buffers: _OpenBuffers,
) -> Iterator[str]:
    """Follow which region of a tensor of the graph each local tensor is; note open buffers."""
    local = {tensor.name: tensor for op in partition.ops for tensor in op.outputs}
    regions: dict[str, _Region] = {}
    for op in partition.ops:
        device = plan.placement.get(op.name, 0) % partition.mesh.size
        found = problem = None
        try:
            if op.kind in _DATA_MOVEMENTS:
                found = _region_of(op, local, regions, open_buffers)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            found, problem = None, f"{_NO_SENSE} ({error!s:.60})"
        if isinstance(found, str):
            found, problem = None, found
        for tensor in op.outputs:
            name, _, at = tensor.name.rpartition("@")
            if name in tensors and at == str(device):
                box = boxes[name][device]
                problem = problem or _shard_problem(op, tensor, box, found, name)
                regions[tensor.name] = _Region(name, box)
            elif found is not None:
                regions[tensor.name] = found
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


class _OpenBuffers(NamedTuple):
    """Buffers of fetches that updates and joins complete.

    Attributes:
        args: What each is made of so far: shape, fill and slices, by the name it has then.
        completed: Names that an update or a join takes up.
    """

    args: dict[str, tuple[Any, Any, list[Any]]]
    completed: frozenset[str]


def _completed(partition: Partition) -> frozenset[str]:
    """Return what updates and joins take up; of arguments that make no sense nothing."""
    found: set[str] = set()
    for op in partition.ops:
        for target in _arguments(op)[:1] if op.kind in (UPDATE, JOIN) else ():
            if isinstance(target, dict):
                found.add(str(cast("dict[str, Any]", target).get("tensor")))
    return frozenset(found)


def _region_of(
    op: Op, local: Mapping[str, Tensor], regions: dict[str, _Region], open_buffers: _OpenBuffers
) -> _Region | str | None:
    """Return the region that an op that moves data makes; a sentence if it cannot be one."""
    if op.kind == SLICE:
        reference, ends = _arguments(op)
        return _sliced(reference["tensor"], ends, local, regions)
    if op.kind == FETCH:
        shape, fill, rows = _arguments(op)
        if tuple(shape) != (op.outputs[0].shape or ()):
            return f"it makes {list(shape)}, its output has {op.outputs[0].shape}"
        return _continued(op, (shape, fill, list(rows)), local, regions, open_buffers)
    if op.kind == JOIN:
        target, rows = _arguments(op)
        shape, fill, before = open_buffers.args[target["tensor"]]
        return _continued(op, (shape, fill, [*before, *rows]), local, regions, open_buffers)
    if op.kind == UPDATE:
        target, ends, source = _arguments(op)
        if target["tensor"] in open_buffers.args:
            shape, fill, before = open_buffers.args[target["tensor"]]
            made = shape, fill, [*before, [source, ends]]
            return _continued(op, made, local, regions, open_buffers)
        rows = [[source, ends]]
        shape = local[target["tensor"]].shape or ()
        found = _assembled(shape, 0.0, rows, local, regions)
        before = regions.get(target["tensor"])
        if isinstance(found, _Region) and before is not None and found.of == before.of:
            return found if found == before else "it puts a shard in another one's place"
        return found
    if op.kind == REDUCE:
        how, addends, weights = _arguments(op)
        if how == "quotient" and len(addends) != 2:
            return f"it is a quotient of {len(addends)} tensors"
        if not addends or (weights is not None and len(weights) != len(addends)):
            return "it has no addends, or not as many weights"
        shape = op.outputs[0].shape
        if any(local[each["tensor"]].shape != shape for each in addends):
            return f"its addends are not all of shape {list(shape or ())}"
    return None


def _continued(
    op: Op,
    made: tuple[Any, Any, list[Any]],
    local: Mapping[str, Tensor],
    regions: dict[str, _Region],
    open_buffers: _OpenBuffers,
) -> _Region | str | None:
    """Return the region in a buffer; what is filled in later may be missing.

    Args:
        op: A fetch, an update or a join.
        made: Shape, fill, and what was filled in so far with its box.
        local: The local tensors by name.
        regions: What is known of them.
        open_buffers: Those that a later op completes.
    """
    shape, fill, rows = made
    (output,) = op.outputs
    filled = sum(math.prod([b - a for a, b in ends]) for _, ends in rows)
    is_open = filled < math.prod(shape)  # else it is overwritten
    if is_open and output.name in open_buffers.completed:
        open_buffers.args[output.name] = made
        fill = 0.0 if fill is None else fill
    return _assembled(shape, fill, rows, local, regions)


def _sliced(
    name: str, ends: Any, local: Mapping[str, Tensor], regions: dict[str, _Region]
) -> _Region | str:
    shape = local[name].shape or ()
    box = tuple([(int(a), int(b)) for a, b in ends])
    if len(box) != len(shape) or any(
        not 0 <= a <= b <= size for (a, b), size in zip(box, shape, strict=True)
    ):
        return f"it cuts {ends!r:.80} out of {name!r:.60} of shape {list(shape)}"
    own = regions.get(name) or _Region(name, tuple([(0, size) for size in shape]))
    ends = zip(own.box, box, strict=True)
    return _Region(own.of, tuple([(c + a, c + b) for (c, _), (a, b) in ends]))


def _assembled(
    shape: Any, fill: Any, rows: Any, local: Mapping[str, Tensor], regions: dict[str, _Region]
) -> _Region | str | None:
    origins: set[tuple[str, tuple[int, ...]]] = set()
    filled = 0
    for reference, ends in rows:
        name = reference["tensor"]
        box = tuple([(int(a), int(b)) for a, b in ends])
        lengths = tuple([b - a for a, b in box])
        is_inside = all(0 <= a <= b <= n for (a, b), n in zip(box, shape, strict=True))
        if lengths != (local[name].shape or ()) or not is_inside:
            return f"{name!r:.60} of shape {local[name].shape} does not fit {ends!r:.80}"
        filled += math.prod(lengths)
        place = regions.get(name)
        if place is None:
            origins.add((name, ()))
        else:
            low = zip(place.box, box, strict=True)
            origins.add((place.of, tuple([begin - a for (begin, _), (a, _) in low])))
    needed = math.prod(shape)
    if rows and fill is None and filled != needed:
        return f"its slices hold {filled} of {needed} elements"
    if len({of for of, _ in origins}) == 1 and len(origins) > 1:
        return "its slices are not arranged as in the tensor"
    if len(origins) != 1 or not next(iter(origins))[1]:
        return None
    ((of, low),) = origins
    return _Region(of, tuple((a, a + n) for a, n in zip(low, shape, strict=True)))


def _in_place_receives(
    plan: Plan, partition: Partition, incomplete: Iterable[str]
) -> Iterator[str]:
    """Check that a join finds what it expects received in place, and nothing reads it before."""
    producer = {tensor.name: op for op in partition.ops for tensor in op.outputs}
    position = {name: i for row in plan.order for i, name in enumerate(row)}
    consumers: dict[str, list[Op]] = {}
    for op in partition.ops:
        for name in op.inputs:
            consumers.setdefault(name, []).append(op)
    received: dict[tuple[str, int], str] = {}
    for m in plan.messages:
        if m.into is None:
            continue
        where = f"messages: {m.tensor!r:.60} into {m.into!r:.60}"
        received[m.tensor, m.target] = m.into
        fetch = producer.get(m.into)
        if fetch is None or fetch.kind != FETCH or plan.placement.get(fetch.name) != m.target:
            yield f"{where}: no fetch of device {m.target} makes that buffer"
        elif position.get(fetch.name, 0) >= position.get(m.post_before, -1):
            yield f"{where}: it may arrive before its buffer exists"
    joins = [(op, plan.placement.get(op.name, 0)) for op in partition.ops if op.kind == JOIN]
    for op, device in joins:
        for problem in _join_problems(op, device, received, producer):
            yield f"partition: op {op.name!r:.60}: {problem}"
    buffers = {*received.values(), *incomplete}
    sent = {m.tensor for m in plan.messages}
    for name in sorted(buffers):
        others = [
            op
            for op in consumers.get(name, [])
            if op.kind not in (JOIN, UPDATE) or _arguments(op)[0] != {"tensor": name}
        ]
        if others or name in sent:
            consumer = others[0].name if others else "a message"
            yield f"partition: {consumer!r:.60} reads {name!r:.60}, which is not complete"
    left = received.keys() - {(name, device) for op, device in joins for name in op.inputs}
    for name, device in sorted(left):
        yield f"messages: {name!r:.60} is received in place on device {device}, but not joined"


def _join_problems(
    op: Op, device: int, received: Mapping[tuple[str, int], str], producer: Mapping[str, Op]
) -> Iterator[str]:
    """Check that every shard of a join was received into its box, in the order of its memory."""
    target, rows = _arguments(op)
    buffer = target["tensor"]
    while producer[buffer].kind == UPDATE:
        buffer = _arguments(producer[buffer])[0]["tensor"]
    (made,) = producer[buffer].outputs
    for reference, ends in rows:
        name = reference["tensor"]
        if received.get((name, device)) != buffer:
            yield f"{name!r:.60} is not received into {buffer!r:.60}"
        shard = next(t for t in producer[name].outputs if t.name == name)
        if shard.dtype != made.dtype or not is_run(made, shard, ends):
            yield f"{ends!r:.80} is not a contiguous run of {buffer!r:.60} in the shard's order"
