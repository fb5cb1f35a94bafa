"""Where the boxes of a call lie when one loop is cut, once for all calls that agree in it.

Idea: the cut of a loop moves a few dims of a few tensors, and all others stay whole. Where they
move to depends on the sizes of those dims and on how far the loops run that they are made of: a
*stencil*. A call that agrees in them, however large its other dims, needs no analysis of its own.
Complexity: O(tensors) per call, O(accesses x dims) per stencil and worker.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from pardnn.plan.mesh import cut_points
from pardnn.shard.partition.analysis import Analysis
from pardnn.shard.partition.regions import Moving, affected_by, tile
from pardnn.shard.partition.shape_class import DimSizes, LoopNest, ShapeClass
from pardnn.shard.tdl.interval import Affine, DescriptionError, Floor, Low, Ranges, evaluate
from pardnn.shard.tdl.language import Outside

Ends = tuple[int, int]
"""First and last index, the last exclusive."""
_End = Callable[[Ranges], int]
_Spans = tuple[tuple[int, _End, _End], ...]


class LoopCut(NamedTuple):
    """The dims that the cut of a loop moves.

    Attributes:
        columns: Which they are, in a row of the call.
        moved: First and last index on each worker, the last exclusive.
        sizes: Of these dims on each worker.
        ranges: First and last value of the loop on each worker, inclusive.
        reducers: By output, what combines the workers' results; None if they are no partial ones.
        flags: By output, whether they are partial.
        out_of_bounds: Whether something lies outside of its tensor.
    """

    columns: tuple[int, ...]
    moved: tuple[tuple[Ends, ...], ...]
    sizes: tuple[tuple[int, ...], ...]
    ranges: tuple[tuple[int, int], ...]
    reducers: tuple[str | None, ...]
    flags: tuple[bool, ...]
    out_of_bounds: bool


class _Plan(NamedTuple):
    """What the stencils of a loop of an analysis depend on.

    Attributes:
        names: Loops that moved dims are made of.
        columns: Dims that move.
        reads: Of each input that moves: how each access treats what lies outside, and its spans,
            by position among the columns.
        writes: Of each output that moves: its number and its spans.
        reducers: Of the outputs that do not move; None if one of them says that it cannot be.
        overlaps: Of the outputs that move, what combines values that meet, and whether they
            depend on the loop at all.
        multiple: Number that cuts keep to.
    """

    names: tuple[str, ...]
    columns: tuple[int, ...]
    reads: tuple[tuple[str, tuple[tuple[Outside, _Spans], ...]], ...]
    writes: tuple[tuple[int, _Spans], ...]
    reducers: tuple[str | None, ...]
    overlaps: Mapping[int, tuple[str | None, bool]]
    multiple: int


def loop_cut_of(
    shape_class: ShapeClass,
    loop_nest: LoopNest,
    dim_sizes: DimSizes,
    extents: Mapping[str, int],
    loop: str,
    workers: int,
) -> LoopCut | None:
    """Return the stencil of a loop, None if it cannot be cut so.

    Args:
        shape_class: Of the call.
        loop_nest: Of the call.
        dim_sizes: The call.
        extents: How far its loops run.
        loop: A loop.
        workers: Number of parts.

    Raises:
        DescriptionError: E220, if the description does not fit the call.
    """
    kept = loop_nest.loop_cuts
    if loop not in kept:
        kept[loop] = _plan(shape_class, loop_nest.analysis, loop)
    plan: _Plan | None = kept[loop]
    if plan is None or loop not in extents:
        return None
    sizes = tuple([dim_sizes[column] for column in plan.columns])
    runs = tuple([extents.get(name) for name in plan.names])
    key = (loop, workers, runs, sizes)
    if key not in kept:
        kept[key] = _found(plan, sizes, extents, loop, workers)
    return kept[key]


def _plan(shape_class: ShapeClass, analysis: Analysis, loop: str) -> _Plan | None:
    """Return what decides on a cut, None if no number of workers can make it."""
    affected = affected_by(analysis, loop)
    outputs = shape_class.dim_slices.outputs
    if affected.has_conflict:
        return None
    columns: dict[int, int] = {}
    names = {loop}
    reads: list[tuple[str, tuple[tuple[Outside, _Spans], ...]]] = []
    for slot, accesses in affected.reads:
        start = shape_class.dim_slices.slots[slot].start
        spans = [_spans(start, moving, columns, names) for _, moving in accesses]
        if any(spans):
            outside: list[Outside] = [access.outside for access, _ in accesses]
            reads.append((slot, tuple(zip(outside, spans, strict=True))))
    writes: list[tuple[int, _Spans]] = []
    reducers: list[str | None] = [None] * len(outputs)
    overlaps: dict[int, tuple[str | None, bool]] = {}
    rows = zip(analysis.writes, affected.writes, outputs, strict=True)
    for number, (write, moving, at) in enumerate(rows):
        if write is None or moving is None or at is None:
            continue
        if moving:
            writes.append((number, _spans(at.start, moving, columns, names)))
            overlaps[number] = (write.overlap and write.overlap.name, loop in write.names)
        elif loop in write.names:
            if loop not in write.reducers:
                return None
            reducers[number] = write.reducers[loop].name
    moved, multiple = tuple(columns), math.lcm(*analysis.multiples[loop])
    fixed = tuple(reducers)
    return _Plan(
        tuple(sorted(names)), moved, tuple(reads), tuple(writes), fixed, overlaps, multiple
    )


def _spans(start: int, moving: Moving, columns: dict[int, int], names: set[str]) -> _Spans:
    """Return where dims move, by position among the columns, to which they are added."""
    found: list[tuple[int, _End, _End]] = []
    for dim, span in moving:
        names.update(span.names)
        at = columns.setdefault(start + dim, len(columns))
        found.append((at, _end(span.lower), _end(span.upper)))
    return tuple(found)


def _end(bound: Affine) -> _End:
    """Return a bound as a function: most are an end of a variable, and a constant."""
    if len(bound.terms) == 1:
        ((atom, factor),) = bound.terms
        if factor == 1 and not isinstance(atom, Floor):
            name, end, constant = atom.name, 0 if isinstance(atom, Low) else 1, bound.constant
            return lambda ranges: ranges[name][end] + constant
    return lambda ranges: evaluate(bound, ranges)


def _found(
    plan: _Plan, sizes: tuple[int, ...], extents: Mapping[str, int], loop: str, workers: int
) -> LoopCut | None:
    points = cut_points(extents[loop], workers, plan.multiple)
    if points is None:
        return None
    ranges: dict[str, tuple[int, int]] = {name: (0, size - 1) for name, size in extents.items()}
    ends = tuple([(first, last - 1) for first, last in itertools.pairwise(points)])
    rows: list[list[Ends]] = []
    for each in ends:
        ranges[loop] = each
        dim_sizes: list[Ends] = [(0, 0)] * len(sizes)
        for slot, accesses in plan.reads:
            _read(slot, accesses, ranges, sizes, dim_sizes)
        for _, spans in plan.writes:
            for n, low, high in spans:
                dim_sizes[n] = low(ranges), high(ranges) + 1
        rows.append(dim_sizes)
    reducers = _reducers(plan, sizes, rows)
    if reducers is None:
        return None
    return LoopCut(
        plan.columns,
        tuple(map(tuple, rows)),
        tuple([tuple([b - a for a, b in dim_sizes]) for dim_sizes in rows]),
        ends,
        reducers,
        tuple([reducer is not None for reducer in reducers]),
        any(
            a < 0 or b > n for dim_sizes in rows for (a, b), n in zip(dim_sizes, sizes, strict=True)
        ),
    )


def _read(
    slot: str,
    accesses: Sequence[tuple[Outside, _Spans]],
    ranges: Ranges,
    sizes: Sequence[int],
    dim_sizes: list[Ends],
) -> None:
    """Put the hull of what all accesses of an input need into a row."""
    for number, (outside, spans) in enumerate(accesses):
        for n, low, high in spans:
            first, last, size = low(ranges), high(ranges) + 1, sizes[n]
            if outside != "fill" and (first < 0 or last > size):
                if outside == "refuse":
                    raise DescriptionError(f"input {slot!r} is read outside of it")
                first, last = min(max(first, 0), size), min(max(last, 0), size)
            if number:
                first, last = min(first, dim_sizes[n][0]), max(last, dim_sizes[n][1])
            dim_sizes[n] = first, last


def _reducers(
    plan: _Plan, sizes: Sequence[int], rows: Sequence[Sequence[Ends]]
) -> tuple[str | None, ...] | None:
    """Return what combines each output, None if the shares of one do not make up the whole."""
    if not plan.writes:
        return plan.reducers
    found = list(plan.reducers)
    for number, spans in plan.writes:
        reducer, depends = plan.overlaps[number]
        shape = tuple([sizes[n] for n, _, _ in spans])
        if depends and not tile(
            [tuple([dim_sizes[n] for n, _, _ in spans]) for dim_sizes in rows], shape
        ):
            if reducer is None:
                return None
            found[number] = reducer
    return tuple(found)
