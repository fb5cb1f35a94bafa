"""Whether a box is one run of memory: the addresses of its elements, one by one."""

import itertools

import pytest

from pardnn.graph.ir import Tensor
from pardnn.plan.cut.runs_of_memory import is_run


def _dense(shape: tuple[int, ...], order: tuple[int, ...]) -> Tensor:
    """A tensor without gaps whose dims lie in this order, the slowest first."""
    strides, step = [0] * len(shape), 1
    for dim in reversed(order):
        strides[dim], step = step, step * shape[dim]
    return Tensor(name="t", bytes=4 * step, shape=shape, strides=tuple(strides), dtype="float32")


@pytest.mark.parametrize("shape", [(2, 3), (4, 1, 2), (1, 2, 3), (2, 2, 2), (6,)])
def test_a_run_takes_the_bytes_of_a_shard_in_order(shape: tuple[int, ...]) -> None:
    dims = range(len(shape))
    seen = {True: 0, False: 0}
    for order, shard_order in itertools.product(itertools.permutations(dims), repeat=2):
        buffer = _dense(shape, order)
        for ends in itertools.product(*([(0, n), (0, 1), (n - 1, n)] for n in shape)):
            sizes = tuple(b - a for a, b in ends)
            shard = _dense(sizes, shard_order)
            assert buffer.strides is not None
            assert shard.strides is not None
            elements = sorted(
                itertools.product(*(range(n) for n in sizes)),
                key=lambda e: sum(i * s for i, s in zip(e, shard.strides or (), strict=True)),
            )
            at = [sum(i * s for i, s in zip(e, buffer.strides, strict=True)) for e in elements]
            expected = at == list(range(len(at)))
            assert is_run(buffer, shard, [list(pair) for pair in ends]) == expected
            seen[expected] += 1
    assert seen[True]
    assert seen[False] or len(shape) == 1
