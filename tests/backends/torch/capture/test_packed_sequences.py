"""Packed sequences of lengths that are known at capture, and what to write where they are not."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import rnn

from pardnn.backends.torch.capture.capture import capture
from pardnn.errors import UnsupportedError, UserCodeError
from tests.backends.torch import models
from tests.backends.torch.beside_eager import assert_equal
from tests.backends.torch.capture import test_capture_equal
from tests.long_cases import long_but

Loss = Callable[[Any, torch.Tensor], torch.Tensor]


def trained(loss_of: Loss, layer: Callable[..., nn.Module], *more: torch.Tensor) -> models.Entry:
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(3, 4), layer(4, 5)])
    batch = torch.randn(6, 3, 3), *more

    def step(model, optimizer, x, *more):
        return models.train(model, optimizer, loss_of(model[1], model[0](x), *more))

    return step, (model, torch.optim.Adam(model.parameters(), lr=0.01), *batch)


def listed(layer: Any, x: torch.Tensor) -> torch.Tensor:
    out, (hidden, _) = layer(rnn.pack_padded_sequence(x, [6, 4, 4]))
    padded, lengths = rnn.pad_packed_sequence(out, padding_value=0.5, total_length=7)
    return padded.square().mean() + hidden.mean() + lengths.sum()


def unsorted(layer: Any, x: torch.Tensor) -> torch.Tensor:
    lengths = torch.tensor([2, 5, 3])
    packed = rnn.pack_padded_sequence(
        x.transpose(0, 1), lengths, batch_first=True, enforce_sorted=False
    )
    out, hidden = layer(packed)
    padded, _ = rnn.pad_packed_sequence(out, batch_first=True)
    return padded.sin().mean() + hidden.square().mean()


def separate(layer: Any, x: torch.Tensor) -> torch.Tensor:
    out, _ = layer(rnn.pack_sequence([x[:5, 0], x[:2, 1], x[:1, 2]]))
    return sum(part.square().mean() for part in rnn.unpack_sequence(out))


CASES: dict[str, Any] = {
    "lstm": (listed, nn.LSTM),
    "gru": (unsorted, functools.partial(nn.GRU, bidirectional=True)),
    "rnn": (separate, nn.RNN),
}


@pytest.mark.parametrize("name", long_but({"gru"}, CASES))
def test_known_lengths(name: str) -> None:
    compare = assert_equal if name == "lstm" else test_capture_equal.assert_equal
    compare(functools.partial(trained, *CASES[name]))


@pytest.mark.parametrize("lengths", [[6, 4], [4, 6, 4], [7, 4, 4], [6, 4, 0]])
def test_wrong_lengths_are_the_users(lengths: list[int]) -> None:
    step, args = trained(lambda layer, x: layer(rnn.pack_padded_sequence(x, lengths)), nn.GRU)
    with pytest.raises(RuntimeError):
        step(*args)
    with pytest.raises(UserCodeError, match="RuntimeError"):
        capture(step, *args)


def packed(layer: Any, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    out, hidden = layer(rnn.pack_padded_sequence(x, lengths, enforce_sorted=False))
    padded, _ = rnn.pad_packed_sequence(out, total_length=len(x))
    return padded.square().sum() + hidden[0].sum()


def masked(layer: Any, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """As the refusal advises."""
    out = layer(x)[0]
    mask = torch.arange(len(x))[:, None, None] < lengths[:, None]
    return (out * mask).square().sum() + out[lengths - 1, torch.arange(len(lengths))].sum()


def test_lengths_of_the_batch_are_refused_with_a_rewrite_that_works() -> None:
    lengths = torch.tensor([2, 6, 4])
    step, args = trained(packed, nn.GRU, lengths)
    with pytest.raises(UnsupportedError, match=r"out\[lengths - 1") as caught:
        capture(step, *args)
    assert caught.value.code == "E803"
    rewritten, others = trained(masked, nn.GRU, lengths)
    torch.testing.assert_close(rewritten(*others), step(*args))
    test_capture_equal.assert_equal(functools.partial(trained, masked, nn.GRU, lengths))
