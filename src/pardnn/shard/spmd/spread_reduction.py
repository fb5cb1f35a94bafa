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
from pardnn.shard.partition.per_device import LeafShare
from pardnn.shard.spmd.builder import At, Builder, Held, Want, box_list, number, part
from pardnn.shard.spmd.collectives import collective_of
from pardnn.shard.spmd.multi_fetch import fetch, pieces_of, view

#: Copies of a result of at least this many bytes are added up in parts, one per copy.
SPREAD_BYTES = 1 << 14

#: What changes nothing.
IDENTITY = {"sum": 0.0, "prod": 1.0, "max": float("-inf"), "min": float("inf"), "mean": 0.0}


def settle(b: Builder, raw: Held, shares: Sequence[LeafShare], at: At, *, is_view: bool) -> None:
    """Make each owner's block of a result out of what the devices computed.

    Args:
        b: Where to write.
        raw: The results as they were computed; those with the final name stay.
        shares: What they are of the whole.
        at: Where in the step.
        is_view: Blocks may be views of the results; else they are copied out of them.
    """
    tensor = raw.tensor
    axes = [a for a in range(len(b.mesh.shape)) if any(s.reducers[a] for s in shares)]
    if axes:
        _add(b, raw, shares, axes, at)
        return
    own = b.own(tensor.name)
    wants: list[Want | None] = []
    for device, (name, box) in enumerate(zip(own.names, own.boxes, strict=True)):
        assert box is not None
        is_done = raw.names[device] == name
        if not is_done and is_view and inside(box, shares[device].box):
            view(b, raw, device, box, at, name)
            is_done = True
        wants.append(None if is_done else Want(box))
    _fetch_all(b, raw, wants, at)


def _fetch_all(b: Builder, raw: Held, wants: Sequence[Want | None], at: At) -> None:
    """Fetch blocks under their final names."""
    if not any(want is not None for want in wants):
        return
    base = b.fresh(f"{raw.tensor.name}:own")
    makers = [f"{base}@{device}" for device in b.devices]
    hold = tuple(m if w is not None else None for m, w in zip(makers, wants, strict=True))
    outs = [f"{raw.tensor.name}@{device}" for device in b.devices]
    fetch(b, raw, wants, At(at.op, hold), makers, outs)


def _reducer(tensor: Tensor, shares: Sequence[LeafShare]) -> str:
    names = {reducer.name for share in shares for reducer in share.reducers if reducer}
    if len(names) > 1 or not names <= IDENTITY.keys():
        raise InvalidPlanError(
            f"partial results of {shown(tensor.name)} would be combined by {sorted(names)}; one of "
            f"{', '.join(IDENTITY)} can be.\nCut another loop of the op."
        )
    return names.pop()


def _add(b: Builder, raw: Held, shares: Sequence[LeafShare], axes: Sequence[int], at: At) -> None:
    """Combine partial results: every owner adds up its block, copies share the work."""
    tensor = raw.tensor
    own = b.own(tensor.name)
    blocks = _shared_blocks(tensor, own.boxes)
    is_split = blocks != own.boxes
    base = b.fresh(f"{tensor.name}:sum")
    makers = tuple(f"{base}@{device}" for device in b.devices)
    addends = _contributions(b, raw, shares, axes, blocks)
    at = At(at.op, makers)
    parts = {device: [p for row in rows for p in row.parts] for device, rows in addends.items()}
    first = [next((r.name for r in addends[d] if r.name), makers[d]) for d in b.devices]
    pieces = pieces_of(b, raw, parts, at, first)
    collective = collective_of(b.mesh, raw.boxes, blocks, tensor.shape or (), axes)
    reducer = _reducer(tensor, shares)
    for device, rows in addends.items():
        block = blocks[device]
        assert block is not None
        names = [_assembled(b, tensor, device, block, row, pieces, reducer, at) for row in rows]
        total = sum(row.weight for row in rows)
        weights = [row.weight / total for row in rows] if reducer == "mean" else None
        args = [reducer, [{"tensor": name} for name in names], weights]
        out = part(tensor, makers[device] if is_split else str(own.names[device]), block)
        more: dict[str, Any] = {"collective": collective}
        b.helper(device, makers[device], REDUCE, args, names, out, at, more=more)
    if is_split:
        wants = [Want(box) for box in own.boxes if box is not None]
        _fetch_all(b, Held(tensor, makers, blocks), wants, at)


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
    parts: Sequence[tuple[int, Box]]
    name: str | None  # of the op that puts it together; None if it is one piece


def _contributions(
    b: Builder,
    raw: Held,
    shares: Sequence[LeafShare],
    axes: Sequence[int],
    blocks: Sequence[Box | None],
) -> dict[int, list[_Addend]]:
    """Return the addends of each device's block, in the order of the devices."""
    shape = raw.tensor.shape or ()
    groups: dict[tuple[int, ...], list[Box | None]] = {}
    for device, share in enumerate(shares):
        coordinates = b.mesh.coordinates(device)
        row = groups.setdefault(tuple(coordinates[a] for a in axes), [None] * b.mesh.size)
        row[device] = clipped(share.box, shape)
    found: dict[int, list[_Addend]] = {}
    for device, block in enumerate(blocks):
        assert block is not None
        rows = found.setdefault(device, [])
        for key in sorted(groups):
            parts, _ = cover(block, tuple(groups[key]), nearest(b.mesh.shape, device))
            if not parts:
                continue
            is_one = len(parts) == 1 and parts[0][1] == block
            name = None if is_one else b.fresh(f"{raw.tensor.name}:addend") + f"@{device}"
            rows.append(_Addend(shares[parts[0][0]].weight, parts, name))
    return found


def _assembled(
    b: Builder,
    tensor: Tensor,
    device: int,
    block: Box,
    addend: _Addend,
    pieces: Mapping[tuple[int, Box], str],
    reducer: str,
    at: At,
) -> str:
    """Return the name of an addend: one piece, or several with what changes nothing around."""
    names = [pieces[key] for key in addend.parts]
    if addend.name is None:
        return names[0]
    rows = [
        [{"tensor": name}, box_list(relative(box, block))]
        for name, (_, box) in zip(names, addend.parts, strict=True)
    ]
    args = [list(lengths(block)), number(IDENTITY[reducer]), rows]
    output = part(tensor, addend.name, block)
    return b.helper(device, addend.name, FETCH, args, names, output, at)
