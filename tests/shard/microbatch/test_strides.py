"""Strides of pieces, by hand."""

from pardnn.shard.microbatch.call_cut import BatchDim
from pardnn.shard.microbatch.strides import piece_strides


def test_dims_around_the_batch_are_shorter() -> None:
    assert piece_strides((3, 8, 5), (40, 5, 1), BatchDim(1, 1), 2) == (10, 5, 1)
    assert piece_strides((8, 3, 5), (15, 5, 1), BatchDim(0, 1), 2) == (15, 5, 1)
    assert piece_strides((3, 8), (1, 0), BatchDim(1, 1), 2) == (1, 0)
