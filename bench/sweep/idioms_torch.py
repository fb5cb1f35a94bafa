"""Idioms of torch's own: caches at first use, packed sequences, solvers, functional transforms."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils import rnn

from bench.sweep.steps import Entry, Factory, adam, loss_step, small


class Attention(nn.Module):
    """Attends causally, with slopes of ALiBi, by a table that it makes at its first use."""

    def __init__(self, is_registered: bool) -> None:
        super().__init__()
        self.query, self.is_registered, self.table = nn.Linear(8, 8), is_registered, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the attended sequence."""
        length = x.shape[1]
        if self.is_registered and not hasattr(self, "mask"):
            self.register_buffer("mask", torch.ones(length, length).tril() == 0, persistent=False)
        if not self.is_registered and self.table is None:
            at = torch.arange(length)
            slopes = torch.tensor([0.5, 0.25])[:, None, None]
            mask = torch.triu(torch.full((length, length), -torch.inf), 1)
            self.table = (mask - slopes * (at[:, None] - at).abs()).sum(0)
        scores = self.query(x) @ x.transpose(1, 2)
        scores = scores.masked_fill(self.mask, -9.0) if self.is_registered else scores + self.table
        return scores.softmax(-1) @ x


def _attention(is_registered: bool) -> Factory:
    def factory() -> Entry:
        torch.manual_seed(0)
        model = nn.Sequential(Attention(is_registered), nn.Linear(8, 4))
        return loss_step, (model, adam(model), torch.randn(4, 6, 8), torch.randn(4, 6, 4))

    return factory


class RunningMean(nn.Module):
    """Subtracts a running mean that it begins with its first use."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.mean = nn.Linear(16, 8), None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the centred features."""
        if self.mean is None:
            self.mean = torch.zeros(8)
        y = self.layer(x)
        self.mean.lerp_(y.detach().mean(0), 0.1)
        return y - self.mean.clone()


def running_mean_at_first_use() -> Entry:
    _, x, y = small()
    model = RunningMean()
    return loss_step, (model, adam(model), x, y)


class Reader(nn.Module):
    """Reads sequences of given lengths, packed."""

    def __init__(self, layer: str, lengths: list[int]) -> None:
        super().__init__()
        self.cells = getattr(nn, layer)(8, 8, batch_first=True)
        self.head, self.lengths = nn.Linear(8, 4), lengths

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the head of each state, padded."""
        packed = rnn.pack_padded_sequence(x, self.lengths, batch_first=True, enforce_sorted=False)
        padded, _ = rnn.pad_packed_sequence(self.cells(packed)[0], batch_first=True)
        return self.head(padded)


def _packed(layer: str) -> Factory:
    def factory() -> Entry:
        torch.manual_seed(0)
        model = Reader(layer, [6, 3, 4, 4])
        return loss_step, (model, adam(model), torch.randn(4, 6, 8), torch.randn(4, 6, 4))

    return factory


CASES: dict[str, Factory] = {
    "mask_at_first_use": _attention(False),
    "buffer_at_first_use": _attention(True),
    "running_mean_at_first_use": running_mean_at_first_use,
    "packed_lstm": _packed("LSTM"),
    "packed_gru": _packed("GRU"),
}
