"""Ranks that share a step's random ops draw the numbers of one device."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pardnn.backends.torch.rng import generator as rng
from pardnn.backends.torch.rng.stream import RandomStream
from pardnn.errors import MismatchError
from tests.backends.torch.rng.random_calls import CPU, NAMES, random_calls

DTYPES = [torch.float32, torch.float64, torch.bfloat16]
OP = st.tuples(
    st.sampled_from(NAMES),
    st.one_of(st.integers(1, 100), st.sampled_from([15, 16, 17, 700, 5000])),
    st.sampled_from(DTYPES),
    st.integers(0, 2),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(OP, min_size=1, max_size=12), st.integers(0, 1 << 40))
def test_three_ranks_draw_the_numbers_of_one_device(
    steps: list[tuple[str, int, torch.dtype, int]], seed: int
) -> None:
    makes = [random_calls(size, dtype)[name] for name, size, dtype, _ in steps]
    torch.manual_seed(seed)
    # Two rounds: the second starts with whatever spare sample the first has left.
    expected = [[make() for make in makes] for _ in range(2)]
    final = rng.read_state(torch.default_generator)
    calls = [rng.measure(make, CPU) for make in makes]
    order = [str(index) for index in range(len(makes))]
    for rank in range(3):
        mine = {order[index] for index, step in enumerate(steps) if step[3] == rank}
        torch.manual_seed(seed)
        stream = RandomStream(order, calls, mine, torch.default_generator)
        for values in expected:
            for name in sorted(mine, key=int):
                if int(name) % 2:
                    stream.ahead()
                stream.before(name)
                assert torch.equal(makes[int(name)](), values[int(name)])
            stream.finish()
        assert rng.read_state(torch.default_generator) == final


def test_the_stream_refuses_another_order() -> None:
    once = rng.fixed(1)
    stream = RandomStream(["a", "b", "c"], [once] * 3, {"a", "c"}, torch.Generator())
    with pytest.raises(MismatchError, match="'c' is not the next"):
        stream.before("c")
    with pytest.raises(MismatchError, match="'b' is not the next"):
        stream.before("b")
    stream.before("a")
    with pytest.raises(MismatchError, match="1 random ops of this rank not run"):
        stream.finish()
    with pytest.raises(MismatchError, match="do not fit together"):
        RandomStream(["a"], [once, once], {"a"}, torch.Generator())
    with pytest.raises(MismatchError, match="do not fit together"):
        RandomStream(["a"], [once], {"z"}, torch.Generator())
