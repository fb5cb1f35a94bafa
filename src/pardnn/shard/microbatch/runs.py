"""Dims in which the batch comes after others: rows of tokens, each with all samples.

Problem: layers that put the sequence first (`nn.MultiheadAttention`, recurrent layers) merge it
with the batch: 16 tokens of 8 texts are 128 rows, and the rows of one text are not a box.
Idea: a view has the same elements in the same order, so the position of the samples in its result
follows from the sizes before and after them. An op that does the same to each row does not depend
on the order of the rows: it is cut as if those of a sample were adjacent. Such pieces are neither
sliced nor joined (`analysis` leaves ops whole that would need it).
Complexity: O(dims) per call.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from pardnn.shard.boxes import lengths
from pardnn.shard.microbatch.call_cut import BatchDim, CallCut, Mark, cut_call, piece_box
from pardnn.shard.partition.call import Call
from pardnn.shard.partition.interning import interned_call
from pardnn.shard.partition.regions import Region, WorkerResult
from pardnn.shard.partition.worker_ops import WorkerOp

#: The same elements in the same order; the second argument is the shape.
VIEWS = frozenset({
    "aten.view.default", "aten._unsafe_view.default", "aten.reshape.default",
    "aten.view_copy.default",
})  # fmt: skip


def cut_in_runs(
    number: int, marks: Mapping[str, Mark], points: Sequence[int], written: frozenset[str]
) -> CallCut | None:
    """Return how to cut a call that merges the batch with earlier dims, or reads it merged.

    Args:
        number: Of the call, see `partition.interning`.
        marks: By slot, inputs that are in pieces or may be.
        points: First sample of each piece, and the number of samples.
        written: Slots that it changes in place.

    Returns:
        The cut; None if there is none.
    """
    call = interned_call(number)
    if call.kind in VIEWS:
        return _cut_view(call, marks, points)
    return _cut_rows(number, marks, points, written)


def _cut_view(call: Call, marks: Mapping[str, Mark], points: Sequence[int]) -> CallCut | None:
    mark, made = marks.get("self"), call.outputs[0]
    shape = call.shapes.get("self", ())
    if mark is None or made is None or len(call.args) != 2 or 0 in shape:
        return None
    at = at_after_view(shape, made, mark.at, points[-1])
    if at is None:
        return None

    def piece(number: int) -> WorkerOp:
        source = piece_box(shape, mark.at, points, number)
        target = piece_box(made, at, points, number)
        local = Call(
            call.kind, (call.args[0], list(lengths(target))), call.kwargs,
            {"self": lengths(source)}, (lengths(target),), call.dtypes,
        )  # fmt: skip
        result = WorkerResult(target, None, 1.0)
        return WorkerOp(local, {"self": Region(source)}, (result,), points[number])

    pieces = tuple(map(piece, range(len(points) - 1)))
    return CallCut("batch", pieces, {"self": mark.at}, frozenset(), (at,))


def at_after_view(
    before: Sequence[int], after: Sequence[int], at: BatchDim, samples: int
) -> BatchDim | None:
    """Return where the batch is in a view; None if it is not in a single dim.

    Args:
        before: Shape of what is viewed.
        after: Shape of the view.
        at: Where the batch is in what is viewed.
        samples: Of the batch.
    """
    outside = math.prod(before[: at.dim]) * at.outer
    inside = math.prod(before[at.dim + 1 :]) * at.scale
    for dim, size in enumerate(after):
        # Of an element, what is before and after its sample stays as many.
        outer, no_more = divmod(outside, math.prod(after[:dim]))
        scale, no_less = divmod(inside, math.prod(after[dim + 1 :]))
        if no_more == no_less == 0 and outer * samples * scale == size:
            return BatchDim(dim, scale, outer)
    return None


def _cut_rows(
    number: int,
    marks: Mapping[str, Mark],
    points: Sequence[int],
    written: frozenset[str],
) -> CallCut | None:
    """Cut an op that does the same to each row, as if the rows of a sample stood together."""
    merged = {(mark.at.scale, mark.at.outer) for mark in marks.values()}
    if len(merged) != 1 or not all(mark.is_made for mark in marks.values()):
        return None
    ((scale, outer),) = merged
    in_order = BatchDim(0, scale * outer)
    together = {
        slot: Mark(in_order._replace(dim=mark.at.dim), True) for slot, mark in marks.items()
    }
    found = cut_call(number, together, points, written)
    if found is None or not _is_alike(found, points[1] * scale * outer):
        return None
    cut = {slot for slot, at in found.inputs.items() if at is not None}
    results = [at for at in found.outputs if isinstance(at, BatchDim)]
    if not cut <= marks.keys() or any(at.scale != scale * outer for at in results):
        return None
    return found._replace(
        inputs={slot: marks[slot].at if slot in cut else None for slot in found.inputs},
        outputs=tuple(
            BatchDim(at.dim, scale, outer) if isinstance(at, BatchDim) else at
            for at in found.outputs
        ),
    )


def _is_alike(found: CallCut, begin: int) -> bool:
    """Whether an op does the same to each row, wherever that stands.

    Args:
        found: Its cut.
        begin: First row of the second piece: the loop takes one row at a time.
    """
    first, *others = ((piece.call.args, piece.call.kwargs) for piece in found.pieces)
    return all(each == first for each in others) and found.pieces[1].begin == begin
