"""Ranks that share a step's random ops draw the numbers of one device."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pardnn.backends.torch.rng import generator as rng
from pardnn.backends.torch.rng import mt19937
from pardnn.errors import MismatchError, UnsupportedError

CPU = torch.device("cpu")
Make = Callable[[], torch.Tensor]


def _gapped(size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(2 * size, dtype=dtype)[::2]


def _ops(size: int, dtype: torch.dtype) -> dict[str, Make]:
    flat = torch.zeros(size, dtype=dtype)
    return {
        "uniform_": lambda: torch.empty(size, dtype=dtype).uniform_(),
        "normal_": lambda: torch.empty(size, dtype=dtype).normal_(),
        "normal_ gapped": lambda: _gapped(size, dtype).normal_(),
        "uniform_ gapped": lambda: _gapped(size, dtype).uniform_(),
        "bernoulli_": lambda: torch.empty(size, dtype=dtype).bernoulli_(0.3),
        "bernoulli_ gapped": lambda: _gapped(size, dtype).bernoulli_(0.3),
        "bernoulli tensor": lambda: torch.bernoulli(torch.full((size,), 0.4, dtype=dtype)),
        "dropout": lambda: torch.native_dropout(flat + 1, 0.3, True)[0],
        "rand": lambda: torch.rand(size, dtype=dtype),
        "randn": lambda: torch.randn(size, dtype=dtype),
        "randn transposed": lambda: torch.zeros(size, 3, dtype=dtype).t().normal_(),
        "rand_like": lambda: torch.rand_like(flat),
        "randint": lambda: torch.randint(0, 1000, (size,)),
        "randint wide": lambda: torch.randint(0, 1 << 40, (size,)),
        "randperm": lambda: torch.randperm(size),
        "multinomial": lambda: torch.multinomial(torch.ones(size + 1), size),
        "multinomial replaced": lambda: torch.multinomial(torch.ones(7), size, replacement=True),
        "exponential_": lambda: torch.empty(size, dtype=dtype).exponential_(),
        "log_normal_": lambda: torch.empty(size, dtype=dtype).log_normal_(),
        "cauchy_": lambda: torch.empty(size, dtype=dtype).cauchy_(),
        "geometric_": lambda: torch.empty(size, dtype=dtype).geometric_(0.3),
        "nothing": lambda: flat + 1,
    }


NAMES = sorted(_ops(1, torch.float32))
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
    makes = [_ops(size, dtype)[name] for name, size, dtype, _ in steps]
    torch.manual_seed(seed)
    # Two rounds: the second starts with whatever spare sample the first has left.
    expected = [[make() for make in makes] for _ in range(2)]
    final = rng.read_state(torch.default_generator)
    calls = [rng.measure(make, CPU) for make in makes]
    order = [str(index) for index in range(len(makes))]
    for rank in range(3):
        mine = {order[index] for index, step in enumerate(steps) if step[3] == rank}
        torch.manual_seed(seed)
        stream = rng.RandomStream(order, calls, mine, torch.default_generator)
        for values in expected:
            for name in sorted(mine, key=int):
                if int(name) % 2:
                    stream.ahead()
                stream.before(name)
                assert torch.equal(makes[int(name)](), values[int(name)])
            stream.finish()
        assert rng.read_state(torch.default_generator) == final


@pytest.mark.parametrize("name", NAMES)
def test_measured_draws_skip_exactly(name: str) -> None:
    for size in (*range(1, 40), 47, 48, 49, 100):
        make = _ops(size, torch.float32)[name]
        call = rng.measure(make, CPU)
        for spare in (0, 1):
            torch.manual_seed(3)
            torch.zeros(spare).normal_()
            start = rng.read_state(torch.default_generator)
            make()
            end = rng.read_state(torch.default_generator)
            rng.write_state(torch.default_generator, start)
            rng.skip_calls(torch.default_generator, [call])
            assert rng.read_state(torch.default_generator) == end, (name, size, spare)


def test_known_counts_of_this_library() -> None:
    assert rng.draws(lambda: torch.empty(100).uniform_(), CPU) == 100
    assert rng.draws(lambda: torch.empty(100, dtype=torch.float64).uniform_(), CPU) == 200
    assert rng.draws(lambda: torch.empty(96).normal_(), CPU) == 96
    # A last group of 16 is drawn again where the size is no multiple of 16.
    assert rng.draws(lambda: torch.empty(100).normal_(), CPU) == 116
    assert rng.draws(lambda: None, CPU) == 0
    odd = rng.measure(lambda: torch.empty(3).normal_(), CPU)
    assert odd == rng.Draws(rng.Effect(8, "new"), rng.Effect(4, "none"))


def test_measuring_restores_the_generator() -> None:
    torch.manual_seed(1)
    torch.empty(3).normal_()
    before = rng.read_state(torch.default_generator)
    rng.measure(lambda: torch.rand(1000), CPU)
    assert rng.read_state(torch.default_generator) == before


def test_measuring_a_generator_of_the_users_own() -> None:
    own = torch.Generator().manual_seed(9)
    assert rng.measure(lambda: torch.rand(10, generator=own), CPU, own) == rng.fixed(10)


@pytest.mark.parametrize("count", [0, 1, 5, 623, 624, 625, 1248, 1 << 15, 32_769, 100_000])
@pytest.mark.parametrize("spare", [False, True])
def test_advance_is_drawing(count: int, spare: bool) -> None:
    for before in (0, 1, 623, 624):
        torch.manual_seed(5)
        torch.empty(before, dtype=torch.int32).random_()
        torch.empty(int(spare)).normal_()
        start = rng.read_state(torch.default_generator)
        torch.empty(count, dtype=torch.int32).random_()
        expected = rng.read_state(torch.default_generator)
        rng.write_state(torch.default_generator, start)
        rng.advance(torch.default_generator, count)
        assert rng.read_state(torch.default_generator) == expected


@pytest.mark.parametrize("count", [mt19937.JUMP_FROM, mt19937.JUMP_FROM + 12_345])
def test_a_jump_is_a_walk(count: int) -> None:
    torch.manual_seed(5)
    for _ in range(4):
        torch.empty(count // 4, dtype=torch.int32).random_()
    torch.empty(count % 4, dtype=torch.int32).random_()
    expected = rng.read_state(torch.default_generator)
    torch.manual_seed(5)
    rng.advance(torch.default_generator, count)
    assert rng.read_state(torch.default_generator) == expected


def test_a_repeated_jump_is_a_walk() -> None:
    start = mt19937.Twister(np.arange(1, 625, dtype=np.uint32), 624)
    for count in (mt19937.REPEATED_JUMP_FROM, mt19937.REPEATED_JUMP_FROM + 1000):
        for position in (1, 300, 623, 624):
            here = start._replace(position=position)
            jumped = mt19937.skip(here, count, is_repeated=True)
            walked = mt19937.skip(here, count)
            assert jumped.position == walked.position
            assert np.array_equal(jumped.key, walked.key)


def test_jumps_add_up() -> None:
    start = mt19937.Twister(np.arange(1, 625, dtype=np.uint32), 17)
    whole = mt19937.skip(start, 30_000_000_000)
    parts = mt19937.skip(mt19937.skip(start, 20_000_000_017), 9_999_999_983)
    assert whole.position == parts.position
    assert np.array_equal(whole.key, parts.key)


def test_characteristic_polynomial_by_berlekamp_massey() -> None:
    degree = mt19937.DEGREE
    bits = (np.random.MT19937(7).random_raw(2 * degree + 64) & 1).tolist()
    current, previous, length, shift, window = 1, 1, 0, 1, 0
    for n, bit in enumerate(bits):
        window = ((window << 1) | bit) & ((1 << (degree + 2)) - 1)
        if (current & window).bit_count() % 2 == 0:
            shift += 1
            continue
        kept, current = current, current ^ (previous << shift)
        if 2 * length <= n:
            length, previous, shift = n + 1 - length, kept, 1
        else:
            shift += 1
    found = {length - i for i in range(current.bit_length()) if current >> i & 1}
    assert length == degree
    assert found == {degree, *mt19937.EXPONENTS}


def test_a_call_that_reseeds_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rng, "MAX_DRAWS", 1 << 20)
    with pytest.raises(UnsupportedError, match="E816"):
        rng.measure(lambda: torch.manual_seed(77), CPU)


def test_data_dependent_draws_are_known() -> None:
    assert rng.has_fixed_draws(torch.ops.aten.normal_.default)
    assert not rng.has_fixed_draws(torch.ops.aten.poisson.default)
    assert not rng.has_fixed_draws(torch.ops.aten._standard_gamma.default)


def test_the_stream_refuses_another_order() -> None:
    once = rng.fixed(1)
    stream = rng.RandomStream(["a", "b", "c"], [once] * 3, {"a", "c"}, torch.Generator())
    with pytest.raises(MismatchError, match="'c' is not the next"):
        stream.before("c")
    with pytest.raises(MismatchError, match="'b' is not the next"):
        stream.before("b")
    stream.before("a")
    with pytest.raises(MismatchError, match="1 random ops of this rank not run"):
        stream.finish()
    with pytest.raises(MismatchError, match="do not fit together"):
        rng.RandomStream(["a"], [once, once], {"a"}, torch.Generator())
    with pytest.raises(MismatchError, match="do not fit together"):
        rng.RandomStream(["a"], [once], {"z"}, torch.Generator())
