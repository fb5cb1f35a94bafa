"""The pieces of a cut call: what each of k workers reads, calls and holds of the results.

Idea: numbers are put in for the ends of the loops, those of the one that is cut worker by worker;
the bounds of the analysis then give boxes. Every piece is one call of the same operator.
Complexity: O(accesses x dims) per worker.
Reference: Tofu (EuroSys 2019), section 4.2.
Deviations: k need not divide an extent (parts differ by one); regions may stick out of a padded
input, which the worker fills; outputs may overlap and are then added up where they do.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from pardnn.errors import shown
from pardnn.plan.mesh import Box, cut_points
from pardnn.shard.analysis import Access, Analysis, Write, analyse
from pardnn.shard.boxes import lengths
from pardnn.shard.call import Bound, Call, replaced
from pardnn.shard.interval import DescriptionError, Interval, Ranges, evaluate, hull, same
from pardnn.shard.registry import Description, description_of
from pardnn.shard.tdl import KEEP, Reducer, Shape


@dataclass(frozen=True, slots=True)
class Region:
    """A box of an input: first and last index per dim, the last exclusive.

    Attributes:
        box: May stick out of the tensor if `fill` is a number.
        fill: Value outside.
        content: Whether values are read; else any values will do.
    """

    box: Box
    fill: float | None = None
    content: bool = True


@dataclass(frozen=True, slots=True)
class Share:
    """What a worker's result is of the whole one.

    Attributes:
        box: Where it lies; what sticks out of the whole is dropped.
        reducer: What combines it with the others' where boxes meet; None if each has its own, or
            all have the same.
        weight: Share of the axis, for "mean".
    """

    box: Box
    reducer: Reducer | None
    weight: float


@dataclass(frozen=True, slots=True)
class Piece:
    """What one worker does.

    Attributes:
        call: The localised call, tensors named by slot; `shapes` and `outputs` are local.
        regions: What it needs of each input, by slot.
        shares: What its results are, None for what is not computed.
        begin: First value of the loop that is cut.
    """

    call: Call
    regions: Mapping[str, Region]
    shares: tuple[Share | None, ...]
    begin: int


@dataclass(frozen=True, slots=True)
class Part:
    """What `Local` attributes are computed from: one worker's part of a cut call.

    Attributes:
        axis: The loop that is cut.
        worker: Index of the worker.
        ranges: First and last value of each loop, inclusive.
        inputs: Local shapes by slot.
        outputs: Local shapes, None for what is not computed.
    """

    axis: str
    worker: int
    ranges: Mapping[str, tuple[int, int]]
    inputs: Mapping[str, Shape]
    outputs: tuple[Shape | None, ...]

    def cuts(self, *names: str) -> bool:
        """Whether one of these loops is the one that is cut."""
        return self.axis in names

    def begin(self, name: str) -> int:
        """First value of a loop on this worker."""
        return self.ranges[name][0]

    def extent(self, name: str) -> int:
        """Number of values of a loop on this worker."""
        return self.ranges[name][1] - self.ranges[name][0] + 1


def extents_of(description: Description, analysis: Analysis, bound: Bound) -> dict[str, int]:
    """Return how far each variable of a call runs.

    Raises:
        DescriptionError: E220, if a loop that can be cut runs over different sizes.
    """
    found: dict[str, int] = {}
    tensors, outputs = bound.tensors, bound.call.outputs
    for name, sources in analysis.extents.items():
        sizes: set[int] = set()
        for source in sources:
            if isinstance(source, int):
                sizes.add(source)
            elif source[0] == "input":
                sizes.add(tensors[str(source[1])].sizes.shape[source[2]])
            elif (shape := outputs[int(source[1])]) is not None:
                sizes.add(shape[source[2]])
        if len(sizes) > 1 and name not in analysis.axes:
            continue
        if len(sizes) > 1:
            raise DescriptionError(
                f"the description of {shown(description.name)} ({description.source}) is wrong: "
                f"variable {name!r} runs over dims of sizes {sorted(sizes)} in one call.\n"
                "Loops of different lengths need different names."
            )
        if sizes:
            found[name] = sizes.pop()
    return found


def depends(span: Interval | None, axis: str) -> bool:
    """Return whether an interval moves with the cut of a loop."""
    return span is not None and axis in span.names


def span_of(span: Interval, ranges: Mapping[str, tuple[int, int]]) -> tuple[int, int]:
    """Return an interval in numbers, the end exclusive."""
    return evaluate(span.lower, ranges), evaluate(span.upper, ranges) + 1


Moving = tuple[tuple[int, Interval], ...]
"""Dims that move with the cut of a loop, and how. All others stay whole: the op treats them as it
does in one piece."""


class _Touched(NamedTuple):
    """What of a call the cut of one loop touches: the same for all sizes.

    Attributes:
        reads: Accesses of inputs, each slot's in a row, those that move alike once.
        writes: Of outputs, None for what is not computed.
        is_torn: Whether an input would be needed both cut and whole: one call takes it only once.
    """

    reads: tuple[tuple[str, tuple[tuple[Access, Moving], ...]], ...]
    writes: tuple[Moving | None, ...]
    is_torn: bool


def _moving(dims: Sequence[Interval | None], axis: str) -> Moving:
    return tuple((d, span) for d, span in enumerate(dims) if span and axis in span.names)


@lru_cache(maxsize=1 << 16)
def _touched(analysis: Analysis, axis: str) -> _Touched:
    reads: dict[str, list[tuple[Access, Moving]]] = {}
    for access in analysis.reads:
        found = reads.setdefault(access.slot, [])
        moving = _moving(access.dims, axis)
        if not any(_is_alike(access, moving, *other) for other in found):
            found.append((access, moving))
    torn = any(len({tuple(d for d, _ in m) for _, m in found}) > 1 for found in reads.values())
    writes = tuple(None if w is None else _moving(w.place, axis) for w in analysis.writes)
    return _Touched(tuple((slot, tuple(found)) for slot, found in reads.items()), writes, torn)


def _is_alike(access: Access, moving: Moving, other: Access, by: Moving) -> bool:
    return (access.outside, access.fill, len(moving)) == (other.outside, other.fill, len(by)) and (
        all(
            d == e and same(a.lower, b.lower) and same(a.upper, b.upper)
            for (d, a), (e, b) in zip(moving, by, strict=True)
        )
    )


def _box(full: Box, moving: Moving, ranges: Ranges) -> Box:
    if not moving:
        return full
    box = list(full)
    for dim, span in moving:
        box[dim] = (evaluate(span.lower, ranges), evaluate(span.upper, ranges) + 1)
    return tuple(box)


def _inside(access: Access, box: Box, full: Box, moving: Moving) -> Box:
    if access.outside == "fill" or all(
        box[d][0] >= 0 and box[d][1] <= full[d][1] for d, _ in moving
    ):
        return box
    if access.outside == "refuse":
        raise DescriptionError(
            f"input {access.slot!r} of shape {[n for _, n in full]} is read at {list(box)}, "
            "outside of it.\n"
            "Use `x.padded(value)[...]` where the op has values outside, or `x.clipped[...]`."
        )
    return tuple(
        (min(max(a, 0), n), min(max(b, 0), n)) for (a, b), (_, n) in zip(box, full, strict=True)
    )


def _regions(
    analysis: Analysis, touched: _Touched, full: Mapping[str, Box], ranges: Ranges
) -> dict[str, Region]:
    """Return what one worker needs; `full` has the box of each whole input."""
    found: dict[str, Region] = {}
    read = dict(touched.reads)
    for slot, whole in full.items():
        accesses = read.get(slot)
        if accesses is None:
            found[slot] = Region(((0, 0),) * len(whole), None, False)
            continue
        boxes = [_inside(a, _box(whole, m, ranges), whole, m) for a, m in accesses]
        joined = boxes[0]
        if any(box != joined for box in boxes):
            joined = tuple(hull(ends) for ends in zip(*boxes, strict=True))
        fills = [access.fill for access, _ in accesses if access.outside == "fill"]
        found[slot] = Region(joined, fills[-1] if fills else None, slot in analysis.contents)
    return found


def _tile(boxes: Sequence[Box], shape: Shape) -> bool:
    """Whether the boxes, in order, are the whole cut along at most one dim."""
    if len({tuple(box) for box in boxes}) == 1:
        return False
    for dim, size in enumerate(shape):
        ends = [0, *(box[dim][1] for box in boxes)]
        if ends[-1] == size and all(b[dim][0] == e for b, e in zip(boxes, ends, strict=False)):
            others = (box[:dim] + box[dim + 1 :] for box in boxes)
            rest = tuple((0, n) for n in shape[:dim] + shape[dim + 1 :])
            return all(other == rest for other in others)
    return False


def _shares(
    write: Write, moving: Moving, shape: Shape, axis: str, ranges: Sequence[Ranges]
) -> list[Share] | None:
    """Return each worker's share of an output, None if the shares do not make up the whole."""
    full = tuple((0, size) for size in shape)
    boxes = [_box(full, moving, each) for each in ranges]
    if axis not in write.names:
        reducer = None
    elif moving:
        is_tiled = _tile(boxes, shape)
        reducer = None if is_tiled else write.overlap
        if reducer is None and not is_tiled:
            return None
    else:
        reducer = write.reducers.get(axis)
        if reducer is None:
            return None
    counts = [each[axis][1] - each[axis][0] + 1 for each in ranges]
    total = sum(counts)
    return [Share(box, reducer, n / total) for box, n in zip(boxes, counts, strict=True)]


def pieces_of(
    description: Description, analysis: Analysis, bound: Bound, axis: str, workers: int
) -> tuple[Piece, ...] | None:
    """Return what each worker does, None if the loop cannot be cut so; see `partition`."""
    extents = extents_of(description, analysis, bound)
    touched = _touched(analysis, axis)
    if axis not in extents or touched.is_torn:
        return None
    points = cut_points(extents[axis], workers, math.lcm(*analysis.multiples[axis]))
    if points is None:
        return None
    full = {name: (0, size - 1) for name, size in extents.items()}
    ranges = [full | {axis: (a, b - 1)} for a, b in itertools.pairwise(points)]
    shares: list[list[Share] | list[None]] = []
    for write, moving, shape in zip(
        analysis.writes, touched.writes, bound.call.outputs, strict=True
    ):
        if write is None or moving is None or shape is None:
            shares.append([None] * workers)
            continue
        found = _shares(write, moving, shape, axis, ranges)
        if found is None:
            return None
        shares.append(found)
    boxes = {s: tuple((0, n) for n in t.sizes.shape) for s, t in bound.tensors.items()}
    regions = [_regions(analysis, touched, boxes, each) for each in ranges]
    pieces: list[Piece] = []
    has_own = bool(analysis.attributes) or any(
        w is not None and w.without and axis in w.reducers for w in analysis.writes
    )
    for w in range(workers):
        own = [s[w] for s in shares]
        piece = None if has_own else _alike(pieces, regions[w], own, ranges[w][axis][0])
        pieces.append(
            piece or _piece(description, analysis, bound, axis, w, ranges[w], regions[w], own)
        )
    return tuple(pieces) if not description.is_exact or all(map(_is_exact, pieces)) else None


def _is_exact(piece: Piece) -> bool:
    share = next(share for share in piece.shares if share is not None)
    numbers = {math.prod(lengths(region.box)) for region in piece.regions.values()}
    return numbers <= {math.prod(lengths(share.box))}


def _alike(
    pieces: Sequence[Piece],
    regions: Mapping[str, Region],
    shares: Sequence[Share | None],
    begin: int,
) -> Piece | None:
    """Return a piece whose call is that of the one before, None if it is another."""
    if not pieces or len(pieces[-1].regions) < len(regions):
        return None
    call = pieces[-1].call
    for slot, region in regions.items():
        if call.shapes[slot] != lengths(region.box):
            return None
    for shape, share in zip(call.outputs, shares, strict=True):
        if share is not None and lengths(share.box) != shape:
            return None
    return Piece(call, regions, tuple(shares), begin)


def _piece(
    description: Description,
    analysis: Analysis,
    bound: Bound,
    axis: str,
    worker: int,
    ranges: Mapping[str, tuple[int, int]],
    regions: Mapping[str, Region],
    shares: Sequence[Share | None],
) -> Piece:
    inputs = {slot: lengths(region.box) for slot, region in regions.items()}
    outputs = tuple(None if share is None else lengths(share.box) for share in shares)
    attributes: dict[str, Any] = {}
    if analysis.attributes:
        part = Part(axis, worker, ranges, inputs, outputs)
        given = {k: v(part) if callable(v) else v for k, v in analysis.attributes.items()}
        attributes = {name: value for name, value in given.items() if value is not KEEP}
    for write in analysis.writes:
        if worker and write is not None and axis in write.reducers:
            attributes |= write.without
    call = replaced(description, bound.call, attributes) if attributes else bound.call
    dropped = {name for name, value in attributes.items() if value is None}
    kept = {slot: region for slot, region in regions.items() if slot not in dropped}
    dtypes = {slot: bound.tensors[slot].dtype for slot in inputs}
    local = Call(call.kind, call.args, call.kwargs, inputs, outputs, dtypes)
    return Piece(local, kept, tuple(shares), ranges[axis][0])


def partition(call: Call, axis: str, workers: int) -> tuple[Piece, ...] | None:
    """Work out what each of `workers` does when one loop of a call is cut.

    Args:
        call: Any call of a described operator.
        axis: A loop, as in `Strategy.axis`.
        workers: At least 1.

    Returns:
        One piece per worker, which together give all results; None if this loop cannot be cut
        among so many: too short, or the parts would not lie in one box each.

    Raises:
        DescriptionError: E220, if the operator has no description or a wrong one.
    """
    description = description_of(call.kind)
    if description is None:
        raise DescriptionError(
            f"{shown(call.kind)} has no description, so it runs whole on every device.\n"
            "Describe it with @pardnn.describe to let it be cut."
        )
    analysis, bound = analyse(description, call)
    if axis not in analysis.axes:
        raise DescriptionError(f"{shown(call.kind)} has no loop {axis!r} that can be cut")
    return pieces_of(description, analysis, bound, axis, workers)
