"""Input regions and output boxes of workers that share one cut loop of a call.

Idea: substitute numbers for the ends of the loops, and for the cut loop those of each worker; the
symbolic intervals of the analysis then become boxes.
Complexity: O(accesses x dims) per worker.
Reference: Tofu (EuroSys 2019), section 4.2, "Discover operator partition strategies".
Deviations: k need not be 2, nor divide an extent (workers' extents differ by one); regions may
exceed the bounds of a padded input, which the worker fills; outputs may overlap and are then added
up there.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from pardnn.plan.mesh import Box, Parts, cut_points
from pardnn.shard.partition.analysis import Access, Analysis, Write
from pardnn.shard.partition.call import Bound
from pardnn.shard.tdl.interval import DescriptionError, Interval, Ranges, evaluate, hull, same
from pardnn.shard.tdl.language import Reducer, Shape


class Region(NamedTuple):
    """What a worker needs of an input.

    Attributes:
        box: In indices of the whole tensor; may be out of bounds if `fill` is a number.
        fill: Value out of bounds.
        content: Whether values are read; otherwise any values will do.
    """

    box: Box
    fill: float | None = None
    content: bool = True


@dataclass(frozen=True, slots=True)
class WorkerResult:
    """Which part of the whole result a worker computes.

    Attributes:
        box: Where it lies; what is out of bounds is dropped.
        reducer: What combines it with the others where boxes overlap; None if each worker has its
            own, or all have the same.
        weight: Fraction of the loop's iterations, for "mean".
    """

    box: Box
    reducer: Reducer | None
    weight: float


Moving = tuple[tuple[int, Interval], ...]
"""Dims that the cut of a loop cuts, and their intervals; all others stay whole."""


class AffectedDims(NamedTuple):
    """The dims of a call that a cut loop cuts: the same for all sizes.

    Attributes:
        reads: Accesses of inputs by slot; accesses that are cut in the same way appear once.
        writes: Of outputs, None for what is not computed.
        has_conflict: Whether accesses need an input both cut and whole, which one call cannot take.
    """

    reads: tuple[tuple[str, tuple[tuple[Access, Moving], ...]], ...]
    writes: tuple[Moving | None, ...]
    has_conflict: bool


def _moving(dims: Sequence[Interval | None], loop: str) -> Moving:
    return tuple((d, span) for d, span in enumerate(dims) if span and loop in span.names)


@lru_cache(maxsize=1 << 16)
def affected_by(analysis: Analysis, loop: str) -> AffectedDims:
    """Return the dims of a call that are cut with a loop."""
    reads: dict[str, list[tuple[Access, Moving]]] = {}
    for access in analysis.reads:
        found = reads.setdefault(access.slot, [])
        moving = _moving(access.dims, loop)
        if not any(_are_alike(access, moving, *other) for other in found):
            found.append((access, moving))
    has_conflict = any(
        len({tuple(d for d, _ in m) for _, m in found}) > 1 for found in reads.values()
    )
    writes = tuple(None if w is None else _moving(w.place, loop) for w in analysis.writes)
    return AffectedDims(
        tuple((slot, tuple(found)) for slot, found in reads.items()), writes, has_conflict
    )


def _are_alike(access: Access, moving: Moving, other: Access, by: Moving) -> bool:
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
    analysis: Analysis, affected: AffectedDims, full: Mapping[str, Box], ranges: Ranges
) -> dict[str, Region]:
    """Return the region of each input that one worker needs; `full` has the whole boxes."""
    found: dict[str, Region] = {}
    read = dict(affected.reads)
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


def tile(boxes: Sequence[Box], shape: Shape) -> bool:
    """Whether the boxes, in order, make up the whole, cut along at most one dim."""
    if len({tuple(box) for box in boxes}) == 1:
        return False
    for dim, size in enumerate(shape):
        ends = [0, *(box[dim][1] for box in boxes)]
        if ends[-1] == size and all(b[dim][0] == e for b, e in zip(boxes, ends, strict=False)):
            others = (box[:dim] + box[dim + 1 :] for box in boxes)
            rest = tuple((0, n) for n in shape[:dim] + shape[dim + 1 :])
            return all(other == rest for other in others)
    return False


def _results(
    write: Write, moving: Moving, shape: Shape, loop: str, ranges: Sequence[Ranges]
) -> list[WorkerResult] | None:
    """Return each worker's result of an output, None if they do not make up the whole."""
    full = tuple((0, size) for size in shape)
    boxes = [_box(full, moving, each) for each in ranges]
    if loop not in write.names:
        reducer = None
    elif moving:
        is_tiled = tile(boxes, shape)
        reducer = None if is_tiled else write.overlap
        if reducer is None and not is_tiled:
            return None
    else:
        reducer = write.reducers.get(loop)
        if reducer is None:
            return None
    counts = [each[loop][1] - each[loop][0] + 1 for each in ranges]
    total = sum(counts)
    return [WorkerResult(box, reducer, n / total) for box, n in zip(boxes, counts, strict=True)]


class Boxes(NamedTuple):
    """What the workers read and make.

    Attributes:
        regions: By worker, the region of each input, by slot.
        results: By output and worker.
        ranges: By worker, first and last value of each loop, inclusive.
    """

    regions: list[dict[str, Region]]
    results: list[list[WorkerResult] | list[None]]
    ranges: list[dict[str, tuple[int, int]]]


def boxes_of(
    analysis: Analysis,
    bound: Bound,
    extents: Mapping[str, int],
    loop: str,
    parts: Parts,
    points: Sequence[int] | None = None,
) -> Boxes | None:
    """Return the boxes of each worker, None if the loop cannot be cut in this way.

    Args:
        analysis: Of the description.
        bound: The call.
        extents: How far its loops run.
        loop: The one that is cut.
        parts: Number of workers, or the share of each.
        points: Where each worker begins, and the end; None: as `parts` says.
    """
    affected = affected_by(analysis, loop)
    if loop not in extents or affected.has_conflict:
        return None
    multiple = math.lcm(*analysis.multiples[loop])
    if points is None:
        points = cut_points(extents[loop], parts, multiple)
    elif any(point % multiple for point in points[:-1]):
        return None
    if points is None:
        return None
    full = {name: (0, size - 1) for name, size in extents.items()}
    ranges = [full | {loop: (a, b - 1)} for a, b in itertools.pairwise(points)]
    results: list[list[WorkerResult] | list[None]] = []
    for write, moving, shape in zip(
        analysis.writes, affected.writes, bound.call.outputs, strict=True
    ):
        if write is None or moving is None or shape is None:
            results.append([None] * len(ranges))
            continue
        found = _results(write, moving, shape, loop, ranges)
        if found is None:
            return None
        results.append(found)
    boxes = {s: tuple((0, n) for n in t.sizes.shape) for s, t in bound.tensors.items()}
    return Boxes([_regions(analysis, affected, boxes, each) for each in ranges], results, ranges)


def has_own_calls(analysis: Analysis, loop: str) -> bool:
    """Whether the workers' calls have other arguments than the whole call, besides sizes."""
    return bool(analysis.attributes) or any(
        w is not None and w.without and loop in w.reducers for w in analysis.writes
    )
