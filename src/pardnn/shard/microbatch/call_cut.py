"""One call cut along the batch: which loop, what each piece reads, and what becomes of its results.

Problem: some inputs of a call are in pieces of the batch. Find the loop that reads them so.
Idea: the description gives for each loop the box of every input and result, with the loop cut
where the samples are. An input suits a loop if each piece needs its own samples, or if all pieces
need all of it; a result is then in pieces, or a partial result to be added up.
Complexity: O(loops x pieces x dims) per distinct call.
Reference: Tofu (EuroSys 2019), section 4.2; GPipe (NeurIPS 2019) for the use of the pieces.
Deviations: pieces need not be equal; halos and overlapping results leave a call whole.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pardnn.errors import PardnnError
from pardnn.plan.mesh import Box
from pardnn.shard.aten.lookup import description_of
from pardnn.shard.boxes import whole
from pardnn.shard.cache import cached
from pardnn.shard.partition.analysis import analyse
from pardnn.shard.partition.interning import interned_call
from pardnn.shard.partition.strategy import COMBINED
from pardnn.shard.partition.worker_ops import WorkerOp, extents_of, worker_ops_of
from pardnn.shard.tdl.language import Reducer

#: Reducers whose partial results of pieces are combined.
PIECEWISE = COMBINED | {"quotient"}


class BatchDim(NamedTuple):
    """Where the batch is in a tensor.

    Attributes:
        dim: The dim that runs over the samples.
        scale: Consecutive elements per sample: 8 texts of 16 tokens have 16 in a dim of 128.
        outer: How often the batch is repeated (see `runs`): 16 tokens of 8 texts have it 16 times
            in a dim of 128.
    """

    dim: int
    scale: int
    outer: int = 1


class Mark(NamedTuple):
    """An input that is, or may be, in pieces.

    Attributes:
        at: Where the batch is.
        is_made: Whether its pieces are results of pieces; otherwise it is whole and can be sliced.
    """

    at: BatchDim
    is_made: bool


class CallCut(NamedTuple):
    """A call cut along the batch.

    Attributes:
        loop: The loop that is cut.
        pieces: The call of each piece.
        inputs: By slot, where the batch is; None for an input that each piece reads whole.
        unread: Slots of which only the shape is read.
        outputs: By result, where the batch is; what combines partial results; or None: each piece
            has the same, or it is not computed.
    """

    loop: str
    pieces: tuple[WorkerOp, ...]
    inputs: Mapping[str, BatchDim | None]
    unread: frozenset[str]
    outputs: tuple[BatchDim | Reducer | None, ...]


#: By number of a call, marks by slot, and where pieces begin.
_FOUND: dict[Any, CallCut | None] = cached({})


def cut_call(
    number: int, marks: Mapping[str, Mark], points: Sequence[int], written: frozenset[str]
) -> CallCut | None:
    """Return how a call is cut along the batch; None if it has to run whole.

    Of several loops, the one that leaves most of its inputs in pieces is taken.

    Args:
        number: Of the call, see `partition.interning`.
        marks: By slot, inputs that are in pieces or may be.
        points: First sample of each piece, and the number of samples.
        written: Slots that it changes in place.
    """
    key = (number, tuple(sorted(marks.items())), tuple(points), written)
    if key not in _FOUND:
        found = [
            (joined, order, cut)
            for order, (joined, cut) in enumerate(_cuts(number, marks, points, written))
        ]
        _FOUND[key] = min(found, key=lambda each: each[:2])[2] if found else None
    return _FOUND[key]


def _cuts(
    number: int, marks: Mapping[str, Mark], points: Sequence[int], written: frozenset[str]
) -> list[tuple[int, CallCut]]:
    """Return the cuts of all loops that can be, each with the elements that it needs joined."""
    call = interned_call(number)
    description = description_of(call.kind)
    if description is None:
        return []
    found: list[tuple[int, CallCut]] = []
    try:
        analysis, bound = analyse(description, call)
        extents = extents_of(description, analysis, bound)
    except PardnnError:
        return []
    for loop in analysis.loops:
        extent = extents.get(loop, 0)
        if extent == 0 or extent % points[-1]:
            continue
        ends = [point * (extent // points[-1]) for point in points]
        try:
            pieces = worker_ops_of(description, analysis, bound, loop, len(points) - 1, points=ends)
        except PardnnError:
            continue
        cut = None if pieces is None else _cut(loop, pieces, call, marks, points, written)
        if cut is not None:
            found.append(cut)
    return found


def _cut(
    loop: str,
    pieces: tuple[WorkerOp, ...],
    call: Any,
    marks: Mapping[str, Mark],
    points: Sequence[int],
    written: frozenset[str],
) -> tuple[int, CallCut] | None:
    """Return a cut, and the elements of inputs in pieces that it reads whole."""
    inputs: dict[str, BatchDim | None] = {}
    unread: set[str] = set()
    joined, reads_pieces = 0, False
    for slot, shape in call.shapes.items():
        regions = [piece.regions[slot] for piece in pieces if slot in piece.regions]
        if not regions:
            continue
        mark = marks.get(slot)
        if not any(region.content for region in regions):
            if slot in written and (mark is None or not mark.is_made):
                return None
            inputs[slot] = None if mark is None else mark.at
            unread.add(slot)
            continue
        boxes = [region.box for region in regions]
        at = batch_dim(boxes, shape, points) if len(boxes) == len(pieces) else None
        is_whole = all(box == whole(shape) for box in boxes)
        if at is None and not is_whole:
            return None
        if at is not None and mark is not None and mark.at != at:
            return None
        if slot in written and (at is None or mark is None or not mark.is_made):
            return None
        joined += math.prod(shape) if is_whole and mark is not None and mark.is_made else 0
        reads_pieces |= mark is not None and at is not None
        inputs[slot] = at
    outputs = _outputs(pieces, call, points)
    if outputs is None or not (reads_pieces or (not joined and unread & marks.keys())):
        return None
    return joined, CallCut(loop, pieces, inputs, frozenset(unread), outputs)


def _outputs(
    pieces: tuple[WorkerOp, ...], call: Any, points: Sequence[int]
) -> tuple[BatchDim | Reducer | None, ...] | None:
    """Return what becomes of each result; None if of one that no plan can say."""
    found: list[BatchDim | Reducer | None] = []
    for number, shape in enumerate(call.outputs):
        results = [piece.results[number] for piece in pieces]
        known = [result for result in results if result is not None]
        if shape is None or len(known) < len(results):
            found.append(None)
            continue
        reducer = known[0].reducer
        boxes = [result.box for result in known]
        if reducer is None:
            at = batch_dim(boxes, shape, points)
            if at is None and any(box != whole(shape) for box in boxes):
                return None
            found.append(at)
        elif reducer.name in PIECEWISE and all(box == whole(shape) for box in boxes):
            found.append(reducer)
        else:
            return None
    return tuple(found)


def batch_dim(boxes: Sequence[Box], shape: Sequence[int], points: Sequence[int]) -> BatchDim | None:
    """Return the dim along which boxes are the pieces of a batch; None if they are not.

    Args:
        boxes: One per piece.
        shape: Of the whole tensor.
        points: First sample of each piece, and the number of samples.
    """
    cut = [d for d, n in enumerate(shape) if any(box[d] != (0, n) for box in boxes)]
    if len(cut) != 1 or shape[cut[0]] % points[-1]:
        return None
    at = BatchDim(cut[0], shape[cut[0]] // points[-1])
    return at if tuple(boxes) == piece_boxes(shape, at, points) else None


def piece_boxes(shape: Sequence[int], at: BatchDim, points: Sequence[int]) -> tuple[Box, ...]:
    """Return the box of each piece of a tensor.

    Args:
        shape: Of the whole one.
        at: Where the batch is.
        points: First sample of each piece, and the number of samples.
    """
    return tuple(piece_box(shape, at, points, piece) for piece in range(len(points) - 1))


def piece_box(shape: Sequence[int], at: BatchDim, points: Sequence[int], piece: int) -> Box:
    """Return the box of one piece of a tensor, as if the rows of a sample were adjacent.

    Args:
        shape: Of the whole one.
        at: Where the batch is.
        points: First sample of each piece, and the number of samples.
        piece: From 0 on.
    """
    full = whole(shape)
    scale = at.scale * at.outer
    rows = (points[piece] * scale, points[piece + 1] * scale)
    return (*full[: at.dim], rows, *full[at.dim + 1 :])
