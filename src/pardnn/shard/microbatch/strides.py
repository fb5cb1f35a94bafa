"""Strides of pieces: of slices of a whole tensor, and of views of a piece's own storage."""

from __future__ import annotations

from collections.abc import Sequence

from pardnn.graph.ir import Tensor, contiguous_strides
from pardnn.shard.microbatch.call_cut import BatchDim


def strides_of(tensor: Tensor) -> tuple[int, ...]:
    """Return the strides of a tensor, even if it is contiguous."""
    return contiguous_strides(tensor.shape or ()) if tensor.strides is None else tensor.strides


def stated(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return strides as a tensor states them: None if it is contiguous."""
    pairs = zip(shape, strides, contiguous_strides(shape), strict=True)
    return None if all(n == 1 or a == b for n, a, b in pairs) else strides


def piece_strides(
    shape: Sequence[int], strides: Sequence[int], at: BatchDim, size: int
) -> tuple[int, ...]:
    """Return the strides of a view of a piece's own storage: dims around the batch are shorter.

    Args:
        shape: Of the whole view.
        strides: Of the whole view.
        at: Where the batch is.
        size: Of that dim in the piece.
    """
    step, length = strides[at.dim], shape[at.dim]
    if step == 0:
        return tuple(strides)
    return tuple(
        s // length * size if s >= step * length and s % length == 0 else s for s in strides
    )
