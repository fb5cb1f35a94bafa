"""Partition strategies of an operator, as data: one for each loop that can be cut.

Problem: all the ways in which one call can be computed by several workers on parts of its inputs.
Idea: "partition-n-reduce". Cutting the loop of an output index cuts that output, with a halo where
windows overlap; cutting a reduction leaves each worker a partial result.
Complexity: O(loops x accesses x dims).
Reference: Tofu (EuroSys 2019), section 4.2, cases 1 and 2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from pardnn.shard.analysis import Analysis, analyse
from pardnn.shard.call import Bound, Call, fingerprint
from pardnn.shard.interval import Affine, Floor, High, Interval, Low, Ranges
from pardnn.shard.partition import Piece, depends, extents_of, pieces_of, span_of
from pardnn.shard.registry import Description, description_of


@dataclass(frozen=True, slots=True)
class Whole:
    """All workers hold all of it."""


@dataclass(frozen=True, slots=True)
class Unread:
    """No element of it is read: an empty tensor of its dtype will do."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Each worker holds its share of `dim`.

    Attributes:
        dim: Which dim.
        before: Slices needed from the neighbour below the share.
        after: Slices needed from the neighbour above it.
        scale: Slices per index of the axis: 2 for a window that moves by two; negative where the
            shares lie in reverse order.
    """

    dim: int
    before: int = 0
    after: int = 0
    scale: Fraction = Fraction(1)


@dataclass(frozen=True, slots=True)
class Reduce:
    """Each worker holds a partial result; `reducer` combines them."""

    reducer: str


Layout = Whole | Unread | Cut | Reduce


@dataclass(frozen=True, slots=True)
class Strategy:
    """One way to cut a call.

    Attributes:
        axis: The loop that is cut, by its name in the description.
        extent: How far the loop runs; more workers than that cannot share it.
        inputs: Slot to layout; `Cut` with several dims of one input appears as the first of them.
        outputs: One per result, None for what is not computed.
    """

    axis: str
    extent: int
    inputs: Mapping[str, Layout]
    outputs: tuple[Layout | None, ...]


def strategies(call: Call) -> tuple[Strategy, ...]:
    """Return all basic strategies of a call, in the order of its loops.

    An operator without description has none: it is run whole. Equal calls are analysed once: a
    network of many equal layers costs little more than one layer.

    Raises:
        DescriptionError: E220, if the description is wrong.
    """
    description = description_of(call.kind)
    if description is None:
        return ()
    key = (description.function, fingerprint(call))
    if key not in _KEPT:
        found = cut_in_two(description, *analyse(description, call))
        _KEPT[key] = tuple(strategy for strategy, _ in found.values())
    return _KEPT[key]


_KEPT: dict[Any, tuple[Strategy, ...]] = {}


def cut_in_two(
    description: Description, analysis: Analysis, bound: Bound
) -> dict[str, tuple[Strategy, tuple[Piece, ...]]]:
    """Return the strategies of an analysed call by loop, with the pieces of two workers."""
    extents = extents_of(description, analysis, bound)
    found: dict[str, tuple[Strategy, tuple[Piece, ...]]] = {}
    for axis in analysis.axes:
        pieces = pieces_of(description, analysis, bound, axis, 2)
        if pieces is not None:
            found[axis] = _strategy(analysis, bound, axis, extents, pieces), pieces
    return found


def _strategy(
    analysis: Analysis,
    bound: Bound,
    axis: str,
    extents: Mapping[str, int],
    pieces: Sequence[Piece],
) -> Strategy:
    full = {name: (0, size - 1) for name, size in extents.items()}
    last = extents[axis] - 1
    middle = pieces[1].begin
    halves = full | {axis: (0, middle - 1)}, full | {axis: (middle, last)}
    inputs: dict[str, Layout] = {}
    for slot in bound.tensors:
        reads = [access for access in analysis.reads if access.slot == slot and access.content]
        inputs[slot] = _layout(reads[0].dims, axis, *halves) if reads else Unread()
    outputs: list[Layout | None] = []
    for write, share in zip(analysis.writes, pieces[0].shares, strict=True):
        if write is None or share is None:
            outputs.append(None)
        elif share.reducer is not None:
            outputs.append(Reduce(share.reducer.name))
        else:
            outputs.append(_layout(write.place, axis, *halves))
    return Strategy(axis, extents[axis], inputs, tuple(outputs))


def _layout(dims: Sequence[Interval | None], axis: str, lower: Ranges, upper: Ranges) -> Layout:
    """Return the layout of a tensor from what the workers of the two halves need of it."""
    for dim, span in enumerate(dims):
        if span is None or not depends(span, axis):
            continue
        scale = _slope(span.lower, axis)
        if scale < 0:
            return Cut(dim, scale=scale)
        border = int(scale * upper[axis][0])
        before, after = border - span_of(span, upper)[0], span_of(span, lower)[1] - border
        return Cut(dim, max(0, before), max(0, after), scale)
    return Whole()


def _slope(bound: Affine, axis: str) -> Fraction:
    total = Fraction(0)
    for atom, factor in bound.terms:
        if isinstance(atom, Floor):
            total += factor * _slope(atom.numerator, axis) / atom.divisor
        elif isinstance(atom, Low | High) and atom.name == axis:
            total += factor
    return total
