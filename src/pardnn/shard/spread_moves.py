"""Moving tensors between devices: what each needs is cut out, sent, and put together or added up.

Received pieces are put together at once; in turn, each is received just before it is copied to its
place, so that only one is there beside the buffer: less memory, and less transfer at a time.

Idea: a piece is cut out once per owner and box, whoever needs it. A piece with gaps is packed
before it is sent, so that the memory of the copy is part of the plan. Partial results are added by
the owner of each block, in the order of the devices, so that all copies agree in every bit.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pardnn.errors import InvalidPlanError, shown
from pardnn.graph.ir import Tensor
from pardnn.plan.mesh import Box, cut_points
from pardnn.plan.partition import FETCH, REDUCE, SLICE, UPDATE
from pardnn.shard.boxes import (
    Part,
    bytes_of,
    clipped,
    cover,
    inside,
    is_dense,
    lengths,
    nearest,
    relative,
    whole,
)
from pardnn.shard.collective import collective_of
from pardnn.shard.leaves import LeafShare
from pardnn.shard.spread_build import At, Builder, Held, Want, box_list, number, part

#: Copies of a result of at least this many bytes are added up in parts, one per copy.
SPREAD_BYTES = 1 << 14

#: What changes nothing.
IDENTITY = {"sum": 0.0, "prod": 1.0, "max": float("-inf"), "min": float("inf"), "mean": 0.0}


def provide(b: Builder, held: Held, wants: Sequence[Want | None], at: At) -> list[str | None]:
    """Return, per device, the name of a local tensor that holds the box that it wants."""
    found: list[str | None] = []
    fetched: list[Want | None] = []
    for device, want in enumerate(wants):
        own = held.boxes[device]
        found.append(None)
        fetched.append(None)
        if want is None:
            continue
        is_form = not want.content and own is not None and lengths(want.box) == lengths(own)
        if want.box == own or is_form:
            found[device] = held.names[device]
        elif own is not None and want.content and inside(want.box, own):
            found[device] = view(b, held, device, want.box, at)
        else:
            fetched[device] = want
    if any(want is not None for want in fetched):
        name = b.fresh(f"{held.tensor.name}:{at.op.name}")
        outs = [f"{name}@{device}" for device in b.devices]
        fetch(b, held, fetched, at, outs, outs)
        found = [
            out if want is not None else name
            for name, out, want in zip(found, outs, fetched, strict=True)
        ]
    return found


def view(b: Builder, held: Held, device: int, box: Box, at: At, name: str | None = None) -> str:
    """Cut a box out of a device's own part, without a copy; return its name."""
    source, own = held.names[device], held.boxes[device]
    assert source is not None
    assert own is not None
    helper = b.fresh(f"{held.tensor.name}:{at.op.name}:part") + f"@{device}"
    output = part(held.tensor, name or helper, box, source)
    args = [{"tensor": source}, box_list(relative(box, own))]
    if source in b.gaps or not is_dense(held.tensor, own, box):
        b.gaps.add(output.name)
    return b.helper(device, helper, SLICE, args, (source,), output, at, memory="reference")


def _pieces(
    b: Builder,
    held: Held,
    parts: Mapping[int, Sequence[Part]],
    at: At,
    makers: Sequence[str],
    turns: Mapping[tuple[int, Part], str] | None = None,
) -> dict[Part, str]:
    """Cut out and send what devices take of each other; return the name of each piece.

    Receives are posted before the op in `makers`, or in `turns` by device and piece.
    """
    targets: dict[Part, list[int]] = {}
    for device, listed in parts.items():
        for key in listed:
            targets.setdefault(key, []).append(device)
    names: dict[Part, str] = {}
    copies: set[str] = set()
    for (owner, box), readers in targets.items():
        own, name = held.boxes[owner], held.names[owner]
        assert own is not None
        assert name is not None
        if readers == [owner] and box == own:
            names[owner, box] = name
            continue
        piece = view(b, held, owner, box, at)
        if readers != [owner] and piece in b.gaps:
            piece = packed(b, held.tensor, owner, box, piece, at)
            copies.add(piece)
        names[owner, box] = piece
    for (owner, box), readers in targets.items():
        for device in readers:
            if device != owner:
                piece = names[owner, box]
                before = (turns or {}).get((device, (owner, box)), makers[device])
                hold = at.hold[owner] or piece
                if turns is not None and owner in parts and piece in copies:
                    hold = makers[owner]  # a copy is let go before the op itself allocates
                b.send(piece, owner, device, before, hold)
    return names


def packed(b: Builder, tensor: Tensor, device: int, box: Box, piece: str, at: At) -> str:
    """Copy a device's part of a tensor without its gaps; return the name of the copy."""
    name = b.fresh(f"{tensor.name}:{at.op.name}:packed") + f"@{device}"
    shape = list(lengths(box))
    args = [shape, None, [[{"tensor": piece}, box_list(whole(shape))]]]
    return b.helper(device, name, FETCH, args, (piece,), part(tensor, name, box), at)


def fetch(
    b: Builder,
    held: Held,
    wants: Sequence[Want | None],
    at: At,
    makers: Sequence[str],
    outs: Sequence[str],
) -> None:
    """Let each device put together what it wants.

    Args:
        b: Where to write.
        held: The tensor.
        wants: A box for each device that fetches.
        at: Where in the step.
        makers: Names of the fetching ops.
        outs: Names of what they make.
    """
    tensor, shape = held.tensor, held.tensor.shape or ()
    parts: dict[int, Sequence[Part]] = {}
    for device, want in enumerate(wants):
        if want is None:
            continue
        order = nearest(b.mesh.shape, device)
        needed = clipped(want.box, shape)
        parts[device], is_all = cover(needed, held.boxes, order) if want.content else ((), True)
        if not is_all:
            raise InvalidPlanError(
                f"no device holds all that op {shown(at.op.name)} needs of {shown(tensor.name)}"
            )
    turns = _turns(b, tensor, parts, makers)
    pieces = _pieces(b, held, parts, at, makers, turns)
    collective = collective_of(b.mesh, held.boxes, [w and w.box for w in wants], shape)
    for device, listed in parts.items():
        want = wants[device]
        assert want is not None
        mine = {key: turns[device, key] for key in listed if (device, key) in turns}
        together = [key for key in listed if key not in mine]
        name = b.fresh(f"{tensor.name}:{at.op.name}:buffer") + f"@{device}"
        maker, out = (name, name) if mine else (makers[device], outs[device])
        rows = [[{"tensor": pieces[k]}, box_list(relative(k[1], want.box))] for k in together]
        args = [list(lengths(want.box)), number(0.0 if mine else want.fill), rows]
        if want.fill is not None:
            args[1] = number(want.fill)
        more: dict[str, Any] = {"collective": collective}
        output = part(tensor, out, want.box)
        b.helper(device, maker, FETCH, args, [pieces[k] for k in together], output, at, more=more)
        for key, turn in mine.items():
            final = outs[device] if turn == makers[device] else turn
            out = _received(b, tensor, device, want.box, key, pieces[key], (out, turn, final), at)


def _turns(
    b: Builder, tensor: Tensor, parts: Mapping[int, Sequence[Part]], makers: Sequence[str]
) -> dict[tuple[int, Part], str]:
    """Return which op puts in which received piece, if a device takes one after the other."""
    found: dict[tuple[int, Part], str] = {}
    for device, listed in parts.items():
        remote = [key for key in listed if key[0] != device] if b.in_turn else []
        for key in remote[:-1]:
            found[device, key] = b.fresh(f"{tensor.name}:turn") + f"@{device}"
        if remote:
            found[device, remote[-1]] = makers[device]
    return found


def _received(
    b: Builder,
    tensor: Tensor,
    device: int,
    region: Box,
    key: Part,
    piece: str,
    names: tuple[str, str, str],
    at: At,
) -> str:
    """Put a received piece into its place; `names`: buffer, op, and what the buffer is then."""
    buffer, maker, final = names
    args = [{"tensor": buffer}, box_list(relative(key[1], region)), {"tensor": piece}]
    output = part(tensor, final, region, buffer)
    more: dict[str, Any] = {"mutates": [buffer]}
    return b.helper(
        device, maker, UPDATE, args, (buffer, piece), output, at, memory="reference", more=more
    )


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
    pieces = _pieces(b, raw, parts, at, first)
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
            parts, _ = cover(block, groups[key], nearest(b.mesh.shape, device))
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
