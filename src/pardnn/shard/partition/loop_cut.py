"""One loop of a call split among workers, with halo: computed once for all calls that share it.

Problem: every worker's boxes, for thousands of calls and each of their loops.
Idea: splitting a loop cuts a few dims of a few tensors; all others stay whole. The positions of the
cuts depend on the sizes of those dims and on the extents of the loops that index them (a halo is
where the ranges of neighbours overlap). Calls that agree in these few numbers share the result,
however large their other dims are.
Complexity: O(tensors) per call, O(accesses x dims) per distinct cut and worker.
Reference: Tofu (EuroSys 2019), section 4.2, cases 1 and 2; "halo exchange" there.
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
    """One loop cut among workers, and the dims that it cuts, halos included.

    Attributes:
        columns: Positions of these dims among the `DimSizes` of the call.
        moved: By worker, first and last index in each of them, the last exclusive.
        sizes: By worker, the size of each of them.
        ranges: By worker, first and last value of the loop, inclusive.
        reducers: By output, what combines the workers' results; None if they are not partial.
        flags: By output, whether the results are partial.
        out_of_bounds: Whether some access lies outside its tensor.
    """

    columns: tuple[int, ...]
    moved: tuple[tuple[Ends, ...], ...]
    sizes: tuple[tuple[int, ...], ...]
    ranges: tuple[tuple[int, int], ...]
    reducers: tuple[str | None, ...]
    flags: tuple[bool, ...]
    out_of_bounds: bool


class _Rule(NamedTuple):
    """What the cuts of a loop depend on, whatever the sizes.

    Attributes:
        names: Loops that the bounds of these dims depend on.
        columns: The dims that the loop cuts, by position among `DimSizes`.
        reads: Of each input that is cut: how each access treats what is out of bounds, and its
            spans, by position among `columns`.
        writes: Of each output that is cut: its number and its spans.
        reducers: Of the outputs that are not cut, what combines partial results.
        overlaps: Of the outputs that are cut, what combines values that meet, and whether they
            depend on the loop at all.
        multiple: Number whose multiples cuts keep to.
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
    nest: LoopNest,
    dim_sizes: DimSizes,
    extents: Mapping[str, int],
    loop: str,
    workers: int,
) -> LoopCut | None:
    """Return how a loop is cut among workers, None if it cannot be.

    Args:
        shape_class: Of the call.
        nest: Of the call.
        dim_sizes: Of the call.
        extents: How far its loops run.
        loop: The one that is cut.
        workers: Their number.

    Raises:
        DescriptionError: E220, if the description does not fit the call.
    """
    kept = nest.loop_cuts
    if loop not in kept:
        kept[loop] = _rule(shape_class, nest.analysis, loop)
    rule: _Rule | None = kept[loop]
    if rule is None or loop not in extents:
        return None
    sizes = tuple([dim_sizes[column] for column in rule.columns])
    runs = tuple([extents.get(name) for name in rule.names])
    key = (loop, workers, runs, sizes)
    if key not in kept:
        kept[key] = _found(rule, sizes, extents, loop, workers)
    return kept[key]


def _rule(shape_class: ShapeClass, analysis: Analysis, loop: str) -> _Rule | None:
    """Return the rule by which a loop is cut, None if no number of workers can cut it."""
    affected = affected_by(analysis, loop)
    outputs = shape_class.dim_slices.outputs
    if affected.has_conflict:
        return None
    columns: dict[int, int] = {}
    names = {loop}
    reads: list[tuple[str, tuple[tuple[Outside, _Spans], ...]]] = []
    for slot, accesses in affected.reads:
        start = shape_class.dim_slices.inputs[slot].start
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
    return _Rule(
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
    rule: _Rule, sizes: tuple[int, ...], extents: Mapping[str, int], loop: str, workers: int
) -> LoopCut | None:
    points = cut_points(extents[loop], workers, rule.multiple)
    if points is None:
        return None
    ranges: dict[str, tuple[int, int]] = {name: (0, size - 1) for name, size in extents.items()}
    ends = tuple([(first, last - 1) for first, last in itertools.pairwise(points)])
    rows: list[list[Ends]] = []
    for each in ends:
        ranges[loop] = each
        dim_sizes: list[Ends] = [(0, 0)] * len(sizes)
        for slot, accesses in rule.reads:
            _read(slot, accesses, ranges, sizes, dim_sizes)
        for _, spans in rule.writes:
            for n, low, high in spans:
                dim_sizes[n] = low(ranges), high(ranges) + 1
        rows.append(dim_sizes)
    reducers = _reducers(rule, sizes, rows)
    if reducers is None:
        return None
    return LoopCut(
        rule.columns,
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
    """Put the hull of what all accesses of an input need into the moved dims of a worker."""
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
    rule: _Rule, sizes: Sequence[int], rows: Sequence[Sequence[Ends]]
) -> tuple[str | None, ...] | None:
    """Return what combines each output, None if the results of one do not tile the whole."""
    if not rule.writes:
        return rule.reducers
    found = list(rule.reducers)
    for number, spans in rule.writes:
        reducer, depends = rule.overlaps[number]
        shape = tuple([sizes[n] for n, _, _ in spans])
        if depends and not tile(
            [tuple([dim_sizes[n] for n, _, _ in spans]) for dim_sizes in rows], shape
        ):
            if reducer is None:
                return None
            found[number] = reducer
    return tuple(found)
