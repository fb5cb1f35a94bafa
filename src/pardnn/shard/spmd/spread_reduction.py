"""Spread reduction: partial results are reduced by all devices, each the blocks that it owns.

Problem: one device that adds up all partial results of a tensor is a bottleneck.
Idea: reduce-scatter. The owner of each block fetches its slices of the partial results and adds
them in the order of the devices, so that all replicas agree in every bit. If three or more devices
own the same large block, each adds up a part of it, and the parts are all-gathered: an all-reduce.
Results that are not partial but elsewhere are resharded. If links between groups of devices are
slow (`relays`), the partial results of a group are added inside it before they cross, by the device
at the same position in its group as the owner; all replicas of a block add in this same order.
Complexity: O(devices x slices) per result, times the levels.
Reference: Tofu (EuroSys 2019), section 6: "we also spread out the reduction workload to all GPUs
(all-reduce)"; section 5.2 for the groups.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pardnn.errors import InvalidPlanError, shown
from pardnn.graph.ir import Op, Tensor
from pardnn.plan.mesh import Box, cut_points
from pardnn.plan.partitioned_graph import FETCH, REDUCE
from pardnn.shard.boxes import Slice, bytes_of, clipped, cover, inside, lengths, nearest, relative
from pardnn.shard.partition.per_device import LocalResult
from pardnn.shard.partition.regions import Region
from pardnn.shard.spmd.collectives import collective_of
from pardnn.shard.spmd.emitter import (
    Anchor,
    Emitter,
    ShardedTensor,
    box_list,
    local_tensor,
    number,
)
from pardnn.shard.spmd.multi_fetch import fetch, send_slices, view

#: From so many bytes on, the reduction of a replicated result is spread over its replicas.
SPREAD_BYTES = 1 << 14

#: The neutral element of each reducer.
IDENTITY = {"sum": 0.0, "prod": 1.0, "max": float("-inf"), "min": float("inf"), "mean": 0.0}


def reduce_or_reshard(
    emitter: Emitter,
    computed: ShardedTensor,
    results: Sequence[LocalResult],
    anchor: Anchor,
    *,
    is_view: bool,
    divisor: str | None = None,
) -> None:
    """Bring a computed result into its layout.

    Partial results are reduced by the owners of the blocks; others are resharded.

    Args:
        emitter: Where to write.
        computed: The results as computed; those with the final name stay.
        results: What they are of the whole, by device.
        anchor: Where in the step.
        is_view: Blocks may be views of the results; else they are copied out of them.
        divisor: The tensor by which the sum of partial results is divided; None for none.

    Raises:
        InvalidPlanError: E410, if partial results cannot be combined.
    """
    tensor = computed.tensor
    axes = [a for a in range(len(emitter.mesh.shape)) if any(s.reducers[a] for s in results)]
    if axes:
        base = emitter.fresh(f"{tensor.name}:sum")
        reduce_scatter(emitter, computed, results, axes, anchor.op, base, divisor)
        return
    own = emitter.own(tensor.name)
    requests: list[Region | None] = []
    for device, (name, box) in enumerate(zip(own.names, own.boxes, strict=True)):
        assert box is not None
        is_done = computed.names[device] == name
        if not is_done and is_view and inside(box, results[device].box):
            view(emitter, computed, device, box, anchor, name)
            is_done = True
        requests.append(None if is_done else Region(box))
    _fetch_all(emitter, computed, requests, anchor)


def _fetch_all(
    emitter: Emitter,
    computed: ShardedTensor,
    requests: Sequence[Region | None],
    anchor: Anchor,
) -> None:
    """Fetch blocks under their final names."""
    if not any(request is not None for request in requests):
        return
    base = emitter.fresh(f"{computed.tensor.name}:own")
    ops = [f"{base}@{device}" for device in emitter.devices]
    hold = tuple(m if w is not None else None for m, w in zip(ops, requests, strict=True))
    outs = [f"{computed.tensor.name}@{device}" for device in emitter.devices]
    fetch(emitter, computed, requests, Anchor(anchor.op, hold), ops, outs)


def _reducer(tensor: Tensor, results: Sequence[LocalResult]) -> str:
    found = [reducer.name for result in results for reducer in result.reducers if reducer]
    names = {"sum" if name == "quotient" else name for name in found}
    if len(names) > 1 or not names <= IDENTITY.keys():
        raise InvalidPlanError(
            f"partial results of {shown(tensor.name)} would be combined by {sorted(names)}; one of "
            f"{', '.join(IDENTITY)} can be.\nCut another loop of the op."
        )
    return names.pop()


def reduce_scatter(
    emitter: Emitter,
    computed: ShardedTensor,
    results: Sequence[LocalResult],
    axes: Sequence[int],
    op: Op,
    base: str,
    divisor: str | None = None,
) -> None:
    """Reduce partial results: every owner adds up its block; replicas share the work.

    Args:
        emitter: Where to write.
        computed: The partial results.
        results: What they are of the whole, by device.
        axes: Mesh axes along which they are partial, in their order.
        op: Of the graph, which made the partial results.
        base: Name of the ops that add, without their devices.
        divisor: The tensor by which the sums are divided; None for none.

    Raises:
        InvalidPlanError: E410, if partial results cannot be combined.
    """
    tensor = computed.tensor
    own = emitter.own(tensor.name)
    blocks = _scattered_blocks(tensor, own.boxes)
    is_split = blocks != own.boxes
    ops = tuple(f"{base}@{device}" for device in emitter.devices)
    collective = collective_of(emitter.mesh, computed.boxes, blocks, tensor.shape or (), axes)
    job = _Job(
        emitter, computed, results, axes, _reducer(tensor, results), collective,
        Anchor(op, ops),
    )  # fmt: skip
    by_device = _grouped_addends(job, blocks)
    outs = ops if is_split or divisor else own.names
    _emit_sums(
        job, [_Sum(d, blocks[d], ops[d], str(outs[d]), found) for d, found in by_device.items()]
    )
    if divisor is not None:
        _divide(job, ops, divisor)
    if is_split:
        requests = [Region(box) for box in own.boxes if box is not None]
        _fetch_all(emitter, ShardedTensor(tensor, ops, blocks), requests, job.anchor)


def _divide(job: _Job, sums: Sequence[str], divisor: str) -> None:
    """Divide the sums of partial results, which are numbers, by another result of the op."""
    emitter, tensor = job.emitter, job.computed.tensor
    base = emitter.fresh(f"{tensor.name}:quotient")
    for device, (total, by) in enumerate(zip(sums, emitter.own(divisor).names, strict=True)):
        names = [total, str(by)]
        made = local_tensor(tensor, f"{tensor.name}@{device}", ())
        args = _reduction("quotient", names, ())
        emitter.helper(device, f"{base}@{device}", REDUCE, args, names, made, job.anchor)


def _reduction(reducer: str, names: Sequence[str], weights: Sequence[float]) -> list[Any]:
    """Return the arguments of a reduction of local tensors."""
    shares = [weight / sum(weights) for weight in weights] if reducer == "mean" else None
    return [reducer, [{"tensor": name} for name in names], shares]


def _scattered_blocks(tensor: Tensor, boxes: Sequence[Box | None]) -> tuple[Box | None, ...]:
    """Cut a large block that three or more devices own into one smaller block for each of them."""
    owners: dict[Box, list[int]] = {}
    for device, box in enumerate(boxes):
        assert box is not None
        owners.setdefault(box, []).append(device)
    found = list(boxes)
    for box, devices in owners.items():
        shape = lengths(box)
        dim = next((d for d, size in enumerate(shape) if size >= len(devices)), None)
        if len(devices) < 3 or dim is None or bytes_of(tensor, shape) < SPREAD_BYTES:
            continue
        points = cut_points(shape[dim], len(devices))
        assert points is not None
        low = box[dim][0]
        for device, (a, z) in zip(devices, itertools.pairwise(points), strict=True):
            found[device] = (*box[:dim], (low + a, low + z), *box[dim + 1 :])
    return tuple(found)


class _Job(NamedTuple):
    """A reduction that is being written.

    Attributes:
        emitter: Where to write.
        computed: The partial results.
        results: What they are of the whole, by device.
        axes: Mesh axes along which they are partial, in their order.
        reducer: A key of `IDENTITY`.
        collective: What the ops are part of.
        anchor: Where in the step; senders wait after the op that makes their own block.
    """

    emitter: Emitter
    computed: ShardedTensor
    results: Sequence[LocalResult]
    axes: Sequence[int]
    reducer: str
    collective: Mapping[str, Any]
    anchor: Anchor


class _Addend(NamedTuple):
    """One of the partial results that make up a block.

    Attributes:
        weight: For "mean".
        sources: The slices that it is made of.
        name: Of the op that assembles it; None if it is one slice.
        made: Device and name of the sum of a group, which has no slices.
    """

    weight: float
    sources: Sequence[Slice]
    name: str | None
    made: tuple[int, str] | None = None


class _Sum(NamedTuple):
    """A block that a device adds up: its op, what that makes, and of what."""

    device: int
    block: Box | None
    op: str
    out: str
    addends: Sequence[_Addend]


def _grouped_addends(job: _Job, blocks: Sequence[Box | None]) -> dict[int, list[_Addend]]:
    """Return the addends of each device's block, after those of a group were added inside it.

    From the innermost groups out: coordinates along the slow axes tell which group partial results
    are of, and the owner's other ones who adds them there. Means have weights, and are not grouped.
    """
    emitter = job.emitter
    slow = [axis for axis in job.axes if axis < emitter.relay_axes and job.reducer != "mean"]
    keys = _partial_boxes(job)
    terms: dict[tuple[int, tuple[int, ...]], list[_Addend]] = {}
    for device, block in enumerate(blocks):
        for key in sorted(keys):
            group = key[: len(slow)]
            where = _member(job, device, group)
            found = terms.setdefault((device, group), [])
            found += _addends(job, keys[key], block, where)
    for level in range(len(slow), 0, -1):
        sums: dict[tuple[int, Box | None], _Sum] = {}
        outer: dict[tuple[int, tuple[int, ...]], list[_Addend]] = {}
        for (device, group), found in terms.items():
            row = outer.setdefault((device, group[: level - 1]), [])
            if len(found) < 2:
                row += found
                continue
            key = _member(job, device, group), blocks[device]
            if key not in sums:
                name = emitter.fresh(f"{job.computed.tensor.name}:group") + f"@{key[0]}"
                sums[key] = _Sum(*key, name, name, found)
            row.append(_Addend(0.0, (), None, (key[0], sums[key].out)))
        _emit_sums(job, list(sums.values()))
        terms = outer
    return {device: found for (device, _), found in terms.items()}


def _member(job: _Job, device: int, group: Sequence[int]) -> int:
    """Return the device of a group that lies in it as another one does in its own."""
    mesh = job.emitter.mesh
    at = list(mesh.coordinates(device))
    for axis, coordinate in zip(job.axes, group, strict=False):
        at[axis] = coordinate
    found = 0
    for coordinate, size in zip(at, mesh.shape, strict=True):
        found = found * size + coordinate
    return found


def _partial_boxes(job: _Job) -> dict[tuple[int, ...], tuple[Box | None, ...]]:
    """Return who holds what of each partial result, by its coordinates along the axes."""
    shape, mesh = job.computed.tensor.shape or (), job.emitter.mesh
    groups: dict[tuple[int, ...], list[Box | None]] = {}
    for device, result in enumerate(job.results):
        coordinates = mesh.coordinates(device)
        group = groups.setdefault(tuple(coordinates[a] for a in job.axes), [None] * mesh.size)
        group[device] = clipped(result.box, shape)
    return {key: tuple(boxes) for key, boxes in groups.items()}


def _addends(
    job: _Job, boxes: tuple[Box | None, ...], block: Box | None, device: int
) -> list[_Addend]:
    """Return one partial result of a block as a device adds it up; nothing if it has none of it."""
    assert block is not None
    sources, _ = cover(block, boxes, nearest(job.emitter.mesh.shape, device))
    if not sources:
        return []
    is_one = len(sources) == 1 and sources[0][1] == block
    name = None if is_one else job.emitter.fresh(f"{job.computed.tensor.name}:addend")
    return [_Addend(job.results[sources[0][0]].weight, sources, name)]


def _emit_sums(job: _Job, sums: Sequence[_Sum]) -> None:
    """Send what sums need, and write them."""
    emitter, tensor, anchor = job.emitter, job.computed.tensor, job.anchor
    sources: dict[int, Sequence[Slice]] = {}
    first: dict[int, str] = {}
    for each in sums:
        mine = [source for addend in each.addends for source in addend.sources]
        sources[each.device] = tuple(dict.fromkeys([*sources.get(each.device, ()), *mine]))
        begins = next((f"{a.name}@{each.device}" for a in each.addends if a.name), each.op)
        first.setdefault(each.device, begins)
    consumers = [first.get(device, "") for device in emitter.devices]
    slices = send_slices(emitter, job.computed, sources, anchor, consumers)
    for device, owner, name in dict.fromkeys(
        (each.device, *addend.made) for each in sums for addend in each.addends if addend.made
    ):
        if owner != device:
            emitter.send(name, owner, device, first[device], str(anchor.hold[owner]))
    for device, block, op, out, addends in sums:
        assert block is not None
        names = [
            addend.made[1]
            if addend.made
            else _assembled_addend(
                emitter, tensor, device, block, addend, slices, job.reducer, anchor
            )
            for addend in addends
        ]
        more: dict[str, Any] = {"collective": job.collective}
        kind, args = REDUCE, _reduction(job.reducer, names, [addend.weight for addend in addends])
        if not addends:  # as of a strided convolution, whose gradient does not reach this block
            kind, args = FETCH, [list(lengths(block)), number(IDENTITY[job.reducer]), []]
        made = local_tensor(tensor, out, block)
        emitter.helper(device, op, kind, args, names, made, anchor, more=more)


def _assembled_addend(
    emitter: Emitter,
    tensor: Tensor,
    device: int,
    block: Box,
    addend: _Addend,
    slices: Mapping[Slice, str],
    reducer: str,
    anchor: Anchor,
) -> str:
    """Return the name of an addend: one slice, or several with the neutral element around."""
    names = [slices[key] for key in addend.sources]
    if addend.name is None:
        return names[0]
    addends_of = [
        [{"tensor": name}, box_list(relative(box, block))]
        for name, (_, box) in zip(names, addend.sources, strict=True)
    ]
    args = [list(lengths(block)), number(IDENTITY[reducer]), addends_of]
    name = f"{addend.name}@{device}"
    output = local_tensor(tensor, name, block)
    return emitter.helper(device, name, FETCH, args, names, output, anchor)
