"""Ranks that share a step's random ops draw the numbers of one device."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pardnn.backends.torch.rng import generator as rng
from pardnn.backends.torch.rng import stream as stream_module
from pardnn.backends.torch.rng.stream import RandomStream
from pardnn.errors import MismatchError
from tests.backends.torch.rng.random_calls import CPU, NAMES, random_calls
from tests.strategies import examples

DTYPES = [torch.float32, torch.float64, torch.bfloat16]
OP = st.tuples(
    st.sampled_from(NAMES),
    st.one_of(st.integers(1, 100), st.sampled_from([15, 16, 17, 700, 5000])),
    st.sampled_from(DTYPES),
    st.integers(0, 2),
)


@examples(50)
@given(st.lists(OP, min_size=1, max_size=12), st.integers(0, 1 << 40), st.randoms())
def test_three_ranks_draw_the_numbers_of_one_device(
    steps: list[tuple[str, int, torch.dtype, int]], seed: int, random: Random
) -> None:
    makes = [random_calls(size, dtype)[name] for name, size, dtype, _ in steps]
    torch.manual_seed(seed)
    # Two rounds: the second starts with whatever spare sample the first has left.
    expected = [[make() for make in makes] for _ in range(2)]
    final = rng.read_state(torch.default_generator)
    calls = [rng.measure(make, CPU) for make in makes]
    order = [str(index) for index in range(len(makes))]
    for rank in range(3):
        mine = [order[index] for index, step in enumerate(steps) if step[3] == rank]
        mine += [name for name in mine if random.random() < 0.2]  # copies of one draw
        if random.random() < 0.7:
            random.shuffle(mine)
        torch.manual_seed(seed)
        stream = RandomStream(order, calls, mine, torch.default_generator)
        for values in expected:
            for name in mine:
                stream.before(name)
                assert torch.equal(makes[int(name)](), values[int(name)])
            stream.finish()
        assert rng.read_state(torch.default_generator) == final


def test_what_others_draw_is_passed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    passed: list[int] = []

    def skip(_generator: torch.Generator, calls: Sequence[Any], **_: Any) -> None:
        passed.extend(call.without_spare.count for call in calls)

    monkeypatch.setattr(stream_module, "skip_calls", skip)
    order = [str(index) for index in range(8)]
    draws = [rng.fixed(1 << index) for index in range(8)]
    for mine, expected in (["0", "2", "4", "6"], 1010_1010), (["4", "6", "0", "2"], 1010_1111):
        passed.clear()
        stream = RandomStream(order, draws, mine, torch.Generator())
        for name in mine:
            stream.before(name)
        stream.finish()
        assert f"{sum(passed):b}" == str(expected)


def test_the_stream_refuses_ops_that_the_rank_does_not_run() -> None:
    once = rng.fixed(1)
    stream = RandomStream(["a", "b", "c"], [once] * 3, ["a", "c"], torch.Generator())
    with pytest.raises(MismatchError, match="no run of random op 'b' .*\n +2 of its 2 runs"):
        stream.before("b")
    stream.before("a")
    with pytest.raises(MismatchError, match="no run of random op 'a' .*\n +1 of its 2 runs"):
        stream.before("a")
    with pytest.raises(MismatchError, match="1 random ops of this rank not run"):
        stream.finish()
    with pytest.raises(MismatchError, match="do not fit together"):
        RandomStream(["a"], [once, once], ["a"], torch.Generator())
    with pytest.raises(MismatchError, match="do not fit together"):
        RandomStream(["a"], [once], ["z"], torch.Generator())
