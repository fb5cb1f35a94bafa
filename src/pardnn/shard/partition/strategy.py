"""The basic partition strategies of an operator, as data: one for each loop that can be cut.

Problem: find all strategies by which workers can compute one call on shards of its tensors.
Idea: "partition-n-reduce". Cutting the loop of an output index cuts that output, with a halo where
windows overlap (case 1); cutting a reduction leaves each worker a partial result (case 2). In the
words of DTensor, `Cut` is Shard, `Whole` is Replicate and `Reduce` is Partial.
Complexity: O(loops x accesses x dims).
Reference: Tofu (EuroSys 2019), section 4.2, cases 1 and 2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any

from pardnn.shard.aten.lookup import description_of
from pardnn.shard.cache import cached
from pardnn.shard.partition.analysis import Analysis, analyse
from pardnn.shard.partition.call import Bound, Call, DimSlices, dim_slices_of, fingerprint
from pardnn.shard.partition.worker_ops import depends, extents_of, span_of, worker_ops_of
from pardnn.shard.tdl.interval import Affine, Floor, High, Interval, Low, Ranges
from pardnn.shard.tdl.registry import Description


@dataclass(frozen=True, slots=True)
class Whole:
    """All workers hold all of it (replicated)."""


@dataclass(frozen=True, slots=True)
class Unread:
    """No element of it is read: an empty tensor of its dtype will do."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Each worker holds a shard of `dim`, with a halo if `before` or `after` is positive.

    Attributes:
        dim: Which dim.
        before: Slices needed from the neighbour below the shard.
        after: Slices needed from the neighbour above it.
        scale: Slices per index of the loop: 2 for a window that moves by two; negative where the
            shards lie in reverse order.
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

#: Reducers whose partial results plans combine, whatever their shape.
COMBINED = frozenset({"sum", "mean", "max", "min", "prod"})


def can_combine(reducer: str | None, rank: int) -> bool:
    """Whether plans can combine partial results; otherwise the loop is not cut.

    Args:
        reducer: Its name; None for results that are not partial.
        rank: Of the result. Quotients must be of rank 0: the divisor is then on every device.
    """
    return reducer is None or reducer in COMBINED or (reducer == "quotient" and not rank)


@dataclass(frozen=True, slots=True)
class Strategy:
    """A basic partition strategy: one loop of a call that is cut.

    Attributes:
        loop: The loop that is cut, by its name in the description.
        extent: Of the loop; it cannot be cut among more workers.
        inputs: Layout by slot; where several dims of an input are cut, the first of them.
        outputs: One per result, None for one that is not computed.
    """

    loop: str
    extent: int
    inputs: Mapping[str, Layout]
    outputs: tuple[Layout | None, ...]


#: By description and fingerprint of a call.
_FOUND: dict[Any, tuple[Strategy, ...]] = cached({})


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
    if key not in _FOUND:
        _FOUND[key] = _cut_in_two(description, *analyse(description, call))
    return _FOUND[key]


def _cut_in_two(description: Description, analysis: Analysis, bound: Bound) -> tuple[Strategy, ...]:
    """Return the strategies of an analysed call."""
    extents = extents_of(description, analysis, bound)
    shapes = {slot: tensor.sizes.shape for slot, tensor in bound.tensors.items()}
    dim_slices = dim_slices_of(shapes, bound.call.outputs)
    found: list[Strategy] = []
    for loop in analysis.loops:
        ops = worker_ops_of(description, analysis, bound, loop, 2)
        if ops is not None:
            reducers = [s and s.reducer and s.reducer.name for s in ops[0].results]
            cut = ops[1].begin
            found.append(strategy_of(analysis, dim_slices, loop, extents, cut, reducers))
    return tuple(found)


def strategy_of(
    analysis: Analysis,
    dim_slices: DimSlices,
    loop: str,
    extents: Mapping[str, int],
    cut: int,
    reducers: Sequence[str | None],
) -> Strategy:
    """Return the strategy of a loop that two workers can cut.

    Args:
        analysis: Of the call.
        dim_slices: Of the call.
        loop: The one that is cut.
        extents: Of the loops.
        cut: Where the second worker begins.
        reducers: What combines the workers' results, by output.
    """
    full = {name: (0, size - 1) for name, size in extents.items()}
    halves = full | {loop: (0, cut - 1)}, full | {loop: (cut, extents[loop] - 1)}
    inputs: dict[str, Layout] = {}
    for slot in dim_slices.inputs:
        reads = [each.dims for each in analysis.reads if each.slot == slot and each.content]
        inputs[slot] = _layout(reads, loop, *halves) if reads else Unread()
    outputs: list[Layout | None] = []
    for write, dims, reducer in zip(analysis.writes, dim_slices.outputs, reducers, strict=True):
        if write is None or dims is None:
            outputs.append(None)
        elif reducer is not None:
            outputs.append(Reduce(reducer))
        else:
            outputs.append(_layout([write.place], loop, *halves))
    return Strategy(loop, extents[loop], inputs, tuple(outputs))


def _layout(
    accesses: Sequence[Sequence[Interval | None]], loop: str, lower: Ranges, upper: Ranges
) -> Layout:
    """Return the layout of a tensor from what the workers of the two halves need of it.

    Args:
        accesses: At least one: intervals by dim. All are cut along the same dims.
        loop: The one that is cut.
        lower: Of the loops, for the first half.
        upper: For the second.
    """
    for dim, span in enumerate(accesses[0]):
        if span is None or not depends(span, loop):
            continue
        scale = _slope(span.lower, loop)
        if scale < 0:
            return Cut(dim, scale=scale)
        border = int(scale * upper[loop][0])
        spans = [each for dims in accesses if (each := dims[dim]) is not None]
        before = border - min([span_of(each, upper)[0] for each in spans])
        after = max([span_of(each, lower)[1] for each in spans]) - border
        return Cut(dim, max(0, before), max(0, after), scale)
    return Whole()


_ONE = Fraction(1)


@lru_cache(maxsize=1024)
def _bare(loop: str) -> tuple[tuple[Low, int], ...]:
    return ((Low(loop), 1),)


def _slope(bound: Affine, loop: str) -> Fraction:
    if bound.terms == _bare(loop):  # nearly all are
        return _ONE
    total = Fraction(0)
    for atom, factor in bound.terms:
        if isinstance(atom, Floor):
            total += factor * _slope(atom.numerator, loop) / atom.divisor
        elif isinstance(atom, Low | High) and atom.name == loop:
            total += factor
    return total
