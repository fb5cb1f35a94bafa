"""Settling what the devices computed of an op: every owner gets its block.

Partial results are added by the owner of each block, in the order of the devices, so that all
copies agree in every bit.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pardnn.errors import InvalidPlanError, shown
from pardnn.graph.ir import Tensor
from pardnn.plan.mesh import Box, cut_points
from pardnn.plan.partitioned_graph import FETCH, REDUCE
from pardnn.shard.boxes import bytes_of, clipped, cover, inside, lengths, nearest, relative
from pardnn.shard.partition.per_device import LocalResult
from pardnn.shard.spmd.collectives import collective_of
from pardnn.shard.spmd.emitter import (
    Anchor,
    Emitter,
    FetchRequest,
    ShardedTensor,
    box_list,
    local_tensor,
    number,
)
from pardnn.shard.spmd.multi_fetch import fetch, send_slices, view

#: Copies of a result of at least this many bytes are added up in parts, one per copy.
SPREAD_BYTES = 1 << 14

#: What changes nothing.
IDENTITY = {"sum": 0.0, "prod": 1.0, "max": float("-inf"), "min": float("inf"), "mean": 0.0}


def reduce_or_reshard(
    emitter: Emitter,
    computed: ShardedTensor,
    results: Sequence[LocalResult],
    anchor: Anchor,
    *,
    is_view: bool,
) -> None:
    """Make each owner's block of a result out of what the devices computed.

    Args:
        emitter: Where to write.
        computed: The results as they were computed; those with the final name stay.
        results: What they are of the whole.
        anchor: Where in the step.
        is_view: Blocks may be views of the results; else they are copied out of them.
    """
    tensor = computed.tensor
    axes = [a for a in range(len(emitter.mesh.shape)) if any(s.reducers[a] for s in results)]
    if axes:
        _reduce_scatter(emitter, computed, results, axes, anchor)
        return
    own = emitter.own(tensor.name)
    requests: list[FetchRequest | None] = []
    for device, (name, box) in enumerate(zip(own.names, own.boxes, strict=True)):
        assert box is not None
        is_done = computed.names[device] == name
        if not is_done and is_view and inside(box, results[device].box):
            view(emitter, computed, device, box, anchor, name)
            is_done = True
        requests.append(None if is_done else FetchRequest(box))
    _fetch_all(emitter, computed, requests, anchor)


def _fetch_all(
    emitter: Emitter,
    computed: ShardedTensor,
    requests: Sequence[FetchRequest | None],
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
    names = {reducer.name for result in results for reducer in result.reducers if reducer}
    if len(names) > 1 or not names <= IDENTITY.keys():
        raise InvalidPlanError(
            f"partial results of {shown(tensor.name)} would be combined by {sorted(names)}; one of "
            f"{', '.join(IDENTITY)} can be.\nCut another loop of the op."
        )
    return names.pop()


def _reduce_scatter(
    emitter: Emitter,
    computed: ShardedTensor,
    results: Sequence[LocalResult],
    axes: Sequence[int],
    anchor: Anchor,
) -> None:
    """Combine partial results: every owner adds up its block, copies share the work."""
    tensor = computed.tensor
    own = emitter.own(tensor.name)
    blocks = _shared_blocks(tensor, own.boxes)
    is_split = blocks != own.boxes
    base = emitter.fresh(f"{tensor.name}:sum")
    ops = tuple(f"{base}@{device}" for device in emitter.devices)
    addends = _contributions(emitter, computed, results, axes, blocks)
    anchor = Anchor(anchor.op, ops)
    sources = {device: [p for row in rows for p in row.sources] for device, rows in addends.items()}
    first = [next((r.name for r in addends[d] if r.name), ops[d]) for d in emitter.devices]
    slices = send_slices(emitter, computed, sources, anchor, first)
    collective = collective_of(emitter.mesh, computed.boxes, blocks, tensor.shape or (), axes)
    reducer = _reducer(tensor, results)
    for device, rows in addends.items():
        block = blocks[device]
        assert block is not None
        names = [
            _assembled(emitter, tensor, device, block, row, slices, reducer, anchor) for row in rows
        ]
        total = sum(row.weight for row in rows)
        weights = [row.weight / total for row in rows] if reducer == "mean" else None
        args = [reducer, [{"tensor": name} for name in names], weights]
        out = local_tensor(tensor, ops[device] if is_split else str(own.names[device]), block)
        more: dict[str, Any] = {"collective": collective}
        emitter.helper(device, ops[device], REDUCE, args, names, out, anchor, more=more)
    if is_split:
        requests = [FetchRequest(box) for box in own.boxes if box is not None]
        _fetch_all(emitter, ShardedTensor(tensor, ops, blocks), requests, anchor)


def _shared_blocks(tensor: Tensor, boxes: Sequence[Box | None]) -> tuple[Box | None, ...]:
    """Cut blocks that several devices own into one part for each of them, if they are large."""
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


class _Addend(NamedTuple):
    """One of the partial results that make up a block: its weight and what it is made of."""

    weight: float
    sources: Sequence[tuple[int, Box]]
    name: str | None  # of the op that puts it together; None if it is one piece


def _contributions(
    emitter: Emitter,
    computed: ShardedTensor,
    results: Sequence[LocalResult],
    axes: Sequence[int],
    blocks: Sequence[Box | None],
) -> dict[int, list[_Addend]]:
    """Return the addends of each device's block, in the order of the devices."""
    shape = computed.tensor.shape or ()
    groups: dict[tuple[int, ...], list[Box | None]] = {}
    for device, result in enumerate(results):
        coordinates = emitter.mesh.coordinates(device)
        row = groups.setdefault(tuple(coordinates[a] for a in axes), [None] * emitter.mesh.size)
        row[device] = clipped(result.box, shape)
    found: dict[int, list[_Addend]] = {}
    for device, block in enumerate(blocks):
        assert block is not None
        rows = found.setdefault(device, [])
        for key in sorted(groups):
            sources, _ = cover(block, tuple(groups[key]), nearest(emitter.mesh.shape, device))
            if not sources:
                continue
            is_one = len(sources) == 1 and sources[0][1] == block
            name = (
                None if is_one else emitter.fresh(f"{computed.tensor.name}:addend") + f"@{device}"
            )
            rows.append(_Addend(results[sources[0][0]].weight, sources, name))
    return found


def _assembled(
    emitter: Emitter,
    tensor: Tensor,
    device: int,
    block: Box,
    addend: _Addend,
    slices: Mapping[tuple[int, Box], str],
    reducer: str,
    anchor: Anchor,
) -> str:
    """Return the name of an addend: one piece, or several with what changes nothing around."""
    names = [slices[key] for key in addend.sources]
    if addend.name is None:
        return names[0]
    rows = [
        [{"tensor": name}, box_list(relative(box, block))]
        for name, (_, box) in zip(names, addend.sources, strict=True)
    ]
    args = [list(lengths(block)), number(IDENTITY[reducer]), rows]
    output = local_tensor(tensor, addend.name, block)
    return emitter.helper(device, addend.name, FETCH, args, names, output, anchor)
