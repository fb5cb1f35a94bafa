"""The pieces of a cut call: what each of k workers reads, calls and holds of the results.

Idea: every piece is one call of the same operator, on the boxes of `portions`.
Complexity: O(accesses x dims) per worker.
Reference: Tofu (EuroSys 2019), section 4.2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pardnn.errors import shown
from pardnn.shard.aten.lookup import description_of
from pardnn.shard.boxes import lengths
from pardnn.shard.partition.analysis import Analysis, analyse
from pardnn.shard.partition.call import Bound, Call, replaced
from pardnn.shard.partition.regions import Region, Share, boxes_of, has_own_calls
from pardnn.shard.tdl.interval import DescriptionError, Interval, evaluate
from pardnn.shard.tdl.language import KEEP, Shape
from pardnn.shard.tdl.registry import Description


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


class Watched(Part):
    """A part that notes whether more than the loop that is cut was asked for."""

    def __getattribute__(self, name: str) -> Any:
        """Return an attribute."""
        if name not in ("axis", "cuts", "was_asked", "__dict__", "__class__"):
            object.__setattr__(self, "was_asked", True)
        return super().__getattribute__(name)

    was_asked = False


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


def pieces_of(
    description: Description, analysis: Analysis, bound: Bound, axis: str, workers: int
) -> tuple[Piece, ...] | None:
    """Return what each worker does, None if the loop cannot be cut so; see `partition`."""
    extents = extents_of(description, analysis, bound)
    found = boxes_of(analysis, bound, extents, axis, workers)
    if found is None:
        return None
    regions, shares, ranges = found
    pieces: list[Piece] = []
    has_own = has_own_calls(analysis, axis)
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


def own_attributes(analysis: Analysis, part: Part, shown: Part | None = None) -> dict[str, Any]:
    """Return the arguments that a worker calls with in place of those of the whole call.

    Args:
        analysis: Of the call.
        part: Of the worker.
        shown: What attributes are computed from; the part if not given.
    """
    attributes: dict[str, Any] = {}
    if analysis.attributes:
        seen = shown or part
        given = {k: v(seen) if callable(v) else v for k, v in analysis.attributes.items()}
        attributes = {name: value for name, value in given.items() if value is not KEEP}
    if part.worker:
        for write in analysis.writes:
            if write is not None and part.axis in write.reducers:
                attributes |= write.without
    return attributes


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
    attributes = own_attributes(analysis, Part(axis, worker, ranges, inputs, outputs))
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
