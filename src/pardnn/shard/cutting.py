"""What every device of a mesh does of one call, as arrays: `leaves` for those who try thousands.

Idea: a call is interned by its fingerprint, and cutting one loop of it gives numbers of other
interned calls with the boxes of what they read and write. Devices whose local calls are equal
share that work, as do equal layers; a cut along a further mesh axis only adds boxes up.
Complexity: O(distinct local calls x loops) calls of `pieces_of`, the rest is array arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Int64
from numpy import ndarray

from pardnn.errors import PardnnError
from pardnn.plan.mesh import Mesh, owned_boxes
from pardnn.shard.analysis import Analysis, analyse
from pardnn.shard.call import Bound, Call, fingerprint
from pardnn.shard.leaves import Axes, leaves
from pardnn.shard.partition import pieces_of
from pardnn.shard.registry import Description, description_of
from pardnn.shard.strategy import Reduce, strategies

#: Reducers whose partial results are exchanged; loops of others are not cut.
EXCHANGED = frozenset({"sum", "mean", "max", "min", "prod"})


@dataclass(frozen=True, slots=True)
class Cutting:
    """What n devices do of one call.

    Attributes:
        calls: Number of each device's local call.
        regions: By slot the box that each device needs; it may stick out of the input.
        contents: By slot whether values are read.
        shares: By output the box that each device's result is of the whole one; None: not computed.
        reduced: By output, for each mesh axis, whether results along it are partial.
    """

    calls: tuple[int, ...]
    regions: Mapping[str, Int64[ndarray, "n rank 2"]]
    contents: Mapping[str, bool]
    shares: tuple[Int64[ndarray, "n rank 2"] | None, ...]
    reduced: tuple[tuple[bool, ...], ...]


@dataclass(frozen=True, slots=True)
class _Pieces:
    calls: tuple[int, ...]
    regions: Mapping[str, ndarray]
    contents: Mapping[str, bool]
    shares: tuple[ndarray | None, ...]
    reduced: tuple[bool, ...]


class _Kept:
    """Interned calls and what is known of them, kept as long as the process lives."""

    def __init__(self) -> None:
        self.numbers: dict[Any, int] = {}
        self.calls: list[Call] = []
        self.loops: dict[int, tuple[str, ...]] = {}
        self.analysed: dict[int, tuple[Description, Analysis, Bound] | None] = {}
        self.pieces: dict[tuple[int, str, int], _Pieces | None] = {}
        self.owned: dict[Any, ndarray | None] = {}


_KEPT = _Kept()

#: Entries from which on everything kept is thrown away: a process may plan many graphs.
_MOST = 200_000


def forget() -> None:
    """Throw away all that was kept, as a cold start would find it."""
    global _KEPT
    _KEPT = _Kept()


def forget_if_large() -> None:
    """Throw away what was kept if it has grown large. Numbers of calls are not valid after it."""
    if len(_KEPT.pieces) + len(_KEPT.owned) > _MOST:
        forget()


def intern_call(call: Call) -> int:
    """Return the number of a call: equal calls have equal numbers, names aside."""
    description = description_of(call.kind)
    key = (description and description.function, fingerprint(call))
    number = _KEPT.numbers.get(key)
    if number is None:
        number = _KEPT.numbers[key] = len(_KEPT.calls)
        _KEPT.calls.append(call)
    return number


def interned(number: int) -> Call:
    """Return the call of a number, with the names of whoever came first."""
    return _KEPT.calls[number]


def loops_of(number: int) -> tuple[str, ...]:
    """Return the loops of a call that can be cut, those of reducers nobody exchanges left out.

    A description that does not fit the call counts as none: the op runs whole.
    """
    found = _KEPT.loops.get(number)
    if found is None:
        found = _KEPT.loops[number] = _loops(interned(number))
    return found


def _loops(call: Call) -> tuple[str, ...]:
    try:
        return tuple(
            strategy.axis
            for strategy in strategies(call)
            if all(
                not isinstance(layout, Reduce) or layout.reducer in EXCHANGED
                for layout in strategy.outputs
            )
        )
    except PardnnError:
        return ()


def whole(call: Call) -> Cutting:
    """Return what the only device of an empty mesh does: all of it, tensors named by slot."""
    try:
        found = leaves(call, (), Mesh(shape=(), names=()))
    except PardnnError:
        found = None
    if found is None:  # a description that does not fit: slots are names
        regions = {name: _array([[(0, n) for n in shape]]) for name, shape in call.shapes.items()}
        shares = tuple(None if s is None else _array([[(0, n) for n in s]]) for s in call.outputs)
        contents = dict.fromkeys(regions, True)
        return Cutting((intern_call(call),), regions, contents, shares, ((),) * len(shares))
    (leaf,) = found
    return Cutting(
        (intern_call(leaf.call),),
        {slot: _array([region.box]) for slot, region in leaf.regions.items()},
        {slot: region.content for slot, region in leaf.regions.items()},
        tuple(None if share is None else _array([share.box]) for share in leaf.shares),
        ((),) * len(leaf.shares),
    )


def _array(boxes: Any) -> ndarray:
    array = np.array(boxes, dtype=np.int64)
    return array.reshape(len(boxes), -1, 2)


def _pieces(number: int, axis: str, parts: int) -> _Pieces | None:
    key = (number, axis, parts)
    if key not in _KEPT.pieces:
        known = _analysed(number)
        try:
            can = known is not None and axis in known[1].axes
            found = pieces_of(*known, axis, parts) if known is not None and can else None
        except PardnnError:
            found = None
        _KEPT.pieces[key] = None if found is None else _stacked(found)
    return _KEPT.pieces[key]


def _analysed(number: int) -> tuple[Description, Analysis, Bound] | None:
    """Return the analysis of a call, once for all its loops; None if it has none."""
    if number not in _KEPT.analysed:
        call = interned(number)
        description = description_of(call.kind)
        try:
            _KEPT.analysed[number] = description and (description, *analyse(description, call))
        except PardnnError:
            _KEPT.analysed[number] = None
    return _KEPT.analysed[number]


def _stacked(pieces: Any) -> _Pieces | None:
    first = pieces[0]
    slots = [slot for slot in first.regions if all(slot in p.regions for p in pieces)]
    shares: list[ndarray | None] = []
    for index, share in enumerate(first.shares):
        boxes = None if share is None else _array([piece.shares[index].box for piece in pieces])
        shares.append(boxes)
    reducers = [share and share.reducer for share in first.shares]
    if any(r is not None and r.name not in EXCHANGED for r in reducers):
        return None
    return _Pieces(
        tuple(intern_call(piece.call) for piece in pieces),
        {slot: _array([piece.regions[slot].box for piece in pieces]) for slot in slots}
        | _partial(pieces, slots),
        {
            slot: any(slot in p.regions and p.regions[slot].content for p in pieces)
            for piece in pieces
            for slot in piece.regions
        },
        tuple(shares),
        tuple(reducer is not None for reducer in reducers),
    )


def _partial(pieces: Any, everywhere: list[str]) -> dict[str, ndarray]:
    """Boxes of inputs that not all pieces read, such as a bias: the others need nothing."""
    found: dict[str, ndarray] = {}
    for piece in pieces:
        for slot, region in piece.regions.items():
            if slot not in everywhere and slot not in found:
                nothing = tuple((0, 0) for _ in region.box)
                boxes = [p.regions[slot].box if slot in p.regions else nothing for p in pieces]
                found[slot] = _array(boxes)
    return found


def widened(cutting: Cutting, parts: int) -> Cutting:
    """Return a cutting over one more mesh axis along which all devices do the same."""
    return Cutting(
        tuple(number for number in cutting.calls for _ in range(parts)),
        {slot: np.repeat(boxes, parts, axis=0) for slot, boxes in cutting.regions.items()},
        cutting.contents,
        tuple(None if s is None else np.repeat(s, parts, axis=0) for s in cutting.shares),
        tuple((*flags, False) for flags in cutting.reduced),
    )


def extended(cutting: Cutting, axis: str | None, parts: int) -> Cutting | None:
    """Return a cutting over one more mesh axis, along which one loop is cut.

    Args:
        cutting: Over the axes before.
        axis: The loop; None: all devices along the new axis do the same.
        parts: Devices along the new axis.

    Returns:
        None if the loop cannot be cut so on every device.
    """
    if axis is None:
        return widened(cutting, parts)
    pieces = [_pieces(number, axis, parts) for number in cutting.calls]
    if any(piece is None for piece in pieces):
        return None
    found: list[_Pieces] = pieces  # type: ignore[assignment]
    contents = {
        slot: content and any(piece.contents.get(slot, False) for piece in found)
        for slot, content in cutting.contents.items()
    }
    regions = {
        slot: _added(boxes, [piece.regions.get(slot) for piece in found], parts)
        for slot, boxes in cutting.regions.items()
    }
    shares = tuple(
        None if boxes is None else _added(boxes, [piece.shares[index] for piece in found], parts)
        for index, boxes in enumerate(cutting.shares)
    )
    flags = tuple((*cutting.reduced[i], found[0].reduced[i]) for i in range(len(shares)))
    calls = tuple(number for piece in found for number in piece.calls)
    return Cutting(calls, regions, contents, shares, flags)


def _added(outer: ndarray, inner: list[ndarray | None], parts: int) -> ndarray:
    """Return boxes given in indices of other boxes in indices of the whole."""
    rank = outer.shape[1]
    first = inner[0]
    if first is not None and all(boxes is first for boxes in inner):
        stacked = first[None]
    else:
        nothing = np.zeros((parts, rank, 2), dtype=np.int64)
        stacked = np.array([nothing if boxes is None else boxes for boxes in inner])
    return (outer[:, None, :, :1] + stacked).reshape(len(outer) * parts, rank, 2)


def cutting_of(call: Call, axes: Axes, mesh: Mesh) -> Cutting | None:
    """Return what the devices of a mesh do when the loops `axes` are cut; None if they cannot be.

    The same as `leaves`, for costs.
    """
    found: Cutting | None = whole(call)
    for axis, parts in zip(axes, mesh.shape, strict=True):
        found = found and extended(found, axis, parts)
    return found


def owned_array(
    shape: tuple[int, ...], layout: tuple[int | None, ...], parts: tuple[int, ...]
) -> Int64[ndarray, "n rank 2"] | None:
    """Return each device's box of a tensor; None if one would be empty."""
    key = (shape, layout, parts)
    if key not in _KEPT.owned:
        boxes = owned_boxes(shape, layout, Mesh(shape=parts, names=("",) * len(parts)))
        _KEPT.owned[key] = None if boxes is None else _array(boxes)
    return _KEPT.owned[key]
