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

from pardnn.errors import shown
from pardnn.plan.mesh import Box, cut_points
from pardnn.shard.analysis import Access, Analysis, Extent, Write, analyse
from pardnn.shard.boxes import lengths
from pardnn.shard.call import Bound, Call, replaced
from pardnn.shard.interval import DescriptionError, Interval, evaluate, hull
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


def _size(extent: Extent, bound: Bound) -> int | None:
    if isinstance(extent, int):
        return extent
    where, key, dim = extent
    if where == "input":
        return bound.tensors[str(key)].sizes.shape[dim]
    shape = bound.call.outputs[int(key)]
    return None if shape is None else shape[dim]


def extents_of(description: Description, analysis: Analysis, bound: Bound) -> dict[str, int]:
    """Return how far each variable of a call runs.

    Raises:
        DescriptionError: E220, if a loop that can be cut runs over different sizes.
    """
    found: dict[str, int] = {}
    for name, sources in analysis.extents.items():
        sizes = {size for source in sources if (size := _size(source, bound)) is not None}
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


def _box(
    dims: Sequence[Interval | None], shape: Shape, axis: str, ranges: Mapping[str, tuple[int, int]]
) -> Box:
    """Dims that the cut does not touch stay whole: the op treats them as it does in one piece."""
    return tuple(
        span_of(span, ranges) if span is not None and depends(span, axis) else (0, size)
        for span, size in zip(dims, shape, strict=True)
    )


def _inside(access: Access, box: Box, shape: Shape) -> Box:
    if access.outside == "fill" or all(
        a >= 0 and b <= size for (a, b), size in zip(box, shape, strict=True)
    ):
        return box
    if access.outside == "refuse":
        raise DescriptionError(
            f"input {access.slot!r} of shape {list(shape)} is read at {list(box)}, outside of it.\n"
            "Use `x.padded(value)[...]` where the op has values outside, or `x.clipped[...]`."
        )
    clipped = (
        tuple(min(max(end, 0), size) for end in ends) for ends, size in zip(box, shape, strict=True)
    )
    return tuple((a, b) for a, b in clipped)


def _regions(
    analysis: Analysis, bound: Bound, axis: str, ranges: Mapping[str, tuple[int, int]]
) -> dict[str, Region]:
    boxes: dict[str, set[Box]] = {}
    fills: dict[str, float] = {}
    filled = {access.slot for access in analysis.reads if access.content}
    for access in analysis.reads:
        shape = bound.tensors[access.slot].sizes.shape
        box = _inside(access, _box(access.dims, shape, axis, ranges), shape)
        boxes.setdefault(access.slot, set()).add(box)
        if access.outside == "fill":
            fills[access.slot] = access.fill
    found: dict[str, Region] = {}
    for slot, tensor in bound.tensors.items():
        if slot not in boxes:
            joined = ((0, 0),) * tensor.ndim
        elif len(boxes[slot]) == 1:
            (joined,) = boxes[slot]
        else:
            joined = tuple(hull(ends) for ends in zip(*boxes[slot], strict=True))
        found[slot] = Region(joined, fills.get(slot), slot in filled)
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
    write: Write, shape: Shape, axis: str, ranges: Sequence[Mapping[str, tuple[int, int]]]
) -> list[Share] | None:
    """Return each worker's share of an output, None if the shares do not make up the whole."""
    boxes = [_box(write.place, shape, axis, each) for each in ranges]
    counts = [each[axis][1] - each[axis][0] + 1 for each in ranges]
    weights = [length / sum(counts) for length in counts]
    if axis not in write.names:
        reducer = None
    elif any(depends(span, axis) for span in write.place):
        reducer = None if _tile(boxes, shape) else write.overlap
        if reducer is None and not _tile(boxes, shape):
            return None
    else:
        reducer = write.reducers.get(axis)
        if reducer is None:
            return None
    return [Share(box, reducer, weight) for box, weight in zip(boxes, weights, strict=True)]


def pieces_of(
    description: Description, analysis: Analysis, bound: Bound, axis: str, workers: int
) -> tuple[Piece, ...] | None:
    """Return what each worker does, None if the loop cannot be cut so; see `partition`."""
    extents = extents_of(description, analysis, bound)
    if axis not in extents or _is_torn(analysis, axis):
        return None
    multiple = math.lcm(*analysis.multiples[axis])
    points = cut_points(extents[axis], workers, multiple)
    if points is None:
        return None
    full = {name: (0, size - 1) for name, size in extents.items()}
    ranges = [full | {axis: (a, b - 1)} for a, b in itertools.pairwise(points)]
    shares: list[list[Share] | list[None]] = []
    for write, shape in zip(analysis.writes, bound.call.outputs, strict=True):
        found = None if write is None or shape is None else _shares(write, shape, axis, ranges)
        if found is None and write is not None and shape is not None:
            return None
        shares.append(found or [None] * workers)
    regions = [_regions(analysis, bound, axis, each) for each in ranges]
    pieces = tuple(
        _piece(description, analysis, bound, axis, w, ranges[w], regions[w], [s[w] for s in shares])
        for w in range(workers)
    )
    return pieces if not description.is_exact or all(map(_is_exact, pieces)) else None


def _is_torn(analysis: Analysis, axis: str) -> bool:
    """Whether an input would be needed both cut and whole: one call takes it only once."""
    cut_dims: dict[str, list[bool]] = {}
    for access in analysis.reads:
        dims = [depends(span, axis) for span in access.dims]
        if cut_dims.setdefault(access.slot, dims) != dims:
            return True
    return False


def _is_exact(piece: Piece) -> bool:
    share = next(share for share in piece.shares if share is not None)
    numbers = {math.prod(lengths(region.box)) for region in piece.regions.values()}
    return numbers <= {math.prod(lengths(share.box))}


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
    part = Part(axis, worker, ranges, inputs, outputs)
    attributes = {k: v(part) if callable(v) else v for k, v in analysis.attributes.items()}
    attributes = {name: value for name, value in attributes.items() if value is not KEEP}
    for write in analysis.writes:
        if write is not None and worker and axis in write.reducers:
            attributes |= write.without
    call = replaced(description, bound.call, attributes)
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
