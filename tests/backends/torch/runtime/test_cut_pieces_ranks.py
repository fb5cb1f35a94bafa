"""Ranks that cut every op of a step in pieces train as one device does, within the proven peaks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.backends.torch import models
from tests.backends.torch.executors import perceptron
from tests.backends.torch.runtime.test_cut_recipes import transformer
from tests.backends.torch.runtime.test_microbatched_ranks import assert_trained, double
from tests.long_cases import long_but

CASES: list[Any] = [
    (double(models.gan), 2, 3, "data-parallel"),
    *long_but(
        (),
        [
            (transformer, 2, 2, "zero-1"),
            (transformer, 2, 2, "zero-2"),
            (transformer, 2, 2, "zero-3"),
            (double(perceptron), 2, 2, "tofu"),
            (double(models.MODELS["resnet"]), 2, 2, "zero-1"),
            (double(models.MODELS["lstm"]), 2, 1, "zero-3"),
            (double(models.gan), 3, 2, "zero-2"),
            (double(models.gan), 4, 2, "zero-1"),
            (transformer, 4, 1, "zero-1*megatron"),
        ],
    ),
]


@pytest.mark.parametrize(("factory", "size", "pieces", "algorithm"), CASES)
def test_cut_pieces_train_as_one_device(
    factory: Callable[[], models.Entry], size: int, pieces: int, algorithm: str
) -> None:
    assert_trained(factory, size, pieces, algorithm)


@pytest.mark.long
def test_second_calls_of_cut_pieces() -> None:
    assert_trained(transformer, 2, 2, "zero-1", part=0.97)
