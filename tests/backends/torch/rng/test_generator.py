"""Generators are moved past calls as if these had run, and calls are measured exactly."""

from __future__ import annotations

import pytest
import torch

from pardnn.backends.torch.rng import generator as rng
from pardnn.backends.torch.rng import mt19937
from pardnn.errors import UnsupportedError
from tests.backends.torch.rng.random_calls import CPU, NAMES, random_calls


@pytest.mark.parametrize("name", NAMES)
def test_measured_draws_skip_exactly(name: str) -> None:
    for size in (*range(1, 40), 47, 48, 49, 100):
        make = random_calls(size, torch.float32)[name]
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
    assert rng.measure(lambda: torch.empty(100).uniform_(), CPU).without_spare.count == 100
    assert (
        rng.measure(
            lambda: torch.empty(100, dtype=torch.float64).uniform_(), CPU
        ).without_spare.count
        == 200
    )
    assert rng.measure(lambda: torch.empty(96).normal_(), CPU).without_spare.count == 96
    # A last group of 16 is drawn again where the size is no multiple of 16.
    assert rng.measure(lambda: torch.empty(100).normal_(), CPU).without_spare.count == 116
    assert rng.measure(lambda: None, CPU).without_spare.count == 0
    pair = rng.measure(lambda: torch.empty(3).normal_(), CPU)
    assert pair == rng.Draws(rng.Effect(8, "new"), rng.Effect(4, "none"))


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


def test_a_call_that_reseeds_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="E816"):
        rng.measure(lambda: torch.manual_seed(77), CPU)


def test_data_dependent_draws_are_known() -> None:
    assert rng.has_fixed_draws(torch.ops.aten.normal_.default)
    assert not rng.has_fixed_draws(torch.ops.aten.poisson.default)
    assert not rng.has_fixed_draws(torch.ops.aten._standard_gamma.default)
