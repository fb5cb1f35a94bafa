"""A run that was interrupted goes on as if it had not been, on other ranks and other plans."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.backends.torch import models
from tests.backends.torch.checkpoint.training import (
    Factory,
    in_double,
    plan_of,
    resumed,
    saved_at,
    uninterrupted,
)

#: Unlike `tofu`, it cuts small tensors too.
CUT = "allrow-greedy"


def double_lstm() -> models.Entry:
    return in_double(models.lstm)


def number(bits: str) -> float:
    return torch.frombuffer(bytearray.fromhex(bits), dtype=torch.float64).item()


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("factory", [models.gpt2, models.gan], ids=lambda f: f.__name__)
def test_placed_to_placed_keeps_every_bit(factory: Factory, size: int, tmp_path: Path) -> None:
    expected = uninterrupted(factory, 6)
    path = tmp_path / "runs" / "a"
    assert saved_at(factory, plan_of(factory, 3), path) == [expected[:3]] * 3
    found = resumed(factory, plan_of(factory, size, seed=4), path, (3, 6))
    assert found == [expected[3:]] * size


@pytest.mark.parametrize(("first", "then"), [("placed", CUT), (CUT, "placed")])
def test_placed_and_cut_read_each_other(first: str, then: str, tmp_path: Path) -> None:
    expected = uninterrupted(double_lstm, 6)
    saved_at(double_lstm, plan_of(double_lstm, 3, first), tmp_path)
    for losses in resumed(double_lstm, plan_of(double_lstm, 2, then), tmp_path, (3, 6)):
        for found, wanted in zip(losses[:3], expected[3:6], strict=True):
            assert number(found) == pytest.approx(number(wanted), rel=1e-10)
        assert losses[3] == expected[6]
