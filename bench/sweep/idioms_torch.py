"""Idioms of torch's own: caches at first use, packed sequences, solvers, functional transforms."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import rnn

from bench.sweep.steps import Entry, Factory, adam, loss_step, small

Loss = Callable[[Any, torch.Tensor], torch.Tensor]


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


def _loss(loss_of: Loss) -> Factory:
    """Return a case of a linear layer and a loss of it, `loss_of(layer, x)`."""

    def factory() -> Entry:
        torch.manual_seed(0)
        model = nn.Linear(8, 8)

        def step(model, optimizer, x):
            optimizer.zero_grad()
            loss = loss_of(model, x)
            loss.backward()
            optimizer.step()
            return loss

        return step, (model, adam(model), torch.randn(4, 8))

    return factory


def _solved(model, x):
    grid = torch.linspace(0, 1, 5)
    for t0, t1 in itertools.pairwise(grid):
        dt = t1 - t0
        k1 = torch.tanh(model(x)) * t0
        k2 = torch.tanh(model(x + dt / 2 * k1)) * (t0 + dt / 2)
        k3 = torch.tanh(model(x + dt / 2 * k2)) * (t0 + dt / 2)
        k4 = torch.tanh(model(x + dt * k3)) * t1
        x = x + dt / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
    return x.square().mean()


def _stepped(model, x):
    t, dt = 0.0, 0.25
    while t < 1.0:
        x, t = x + dt * torch.tanh(model(x) + t), t + dt
    return x.square().mean()


def _of_each(model, x):
    def loss_of(parameters, x):
        return torch.func.functional_call(model, parameters, (x,)).square().mean()

    slopes = torch.func.vmap(torch.func.grad(loss_of), in_dims=(None, 0))
    return sum(
        slope.square().mean() for slope in slopes(dict(model.named_parameters()), x).values()
    )


def _chosen(model, x):
    is_wide = torch.tensor(x.shape[1]) > 3
    return torch.cond(is_wide, lambda x: model(x).sin(), lambda x: -model(x), (x,)).mean()


def _scalar(model):
    return lambda z: model(z).sin().sum()


class Queue(nn.Module):
    """Compares with the keys of earlier batches, as MoCo does."""

    def __init__(self, by_index: bool) -> None:
        super().__init__()
        self.encoder, self.by_index = nn.Linear(16, 8), by_index
        self.register_buffer("queue", torch.randn(8, 12))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the similarities, and replace the oldest keys."""
        keys = F.normalize(self.encoder(x), dim=1)
        found, size = keys @ self.queue.clone().detach(), len(keys)
        if self.by_index:
            at = (self.pointer + torch.arange(size)) % 12
            self.queue.index_copy_(1, at, keys.detach().T)
            self.pointer.add_(size).remainder_(12)
        else:
            first = int(self.pointer)
            self.queue[:, first : first + size] = keys.detach().T
            self.pointer[0] = (first + size) % 12
        return found


def _queue(by_index: bool) -> Factory:
    def factory() -> Entry:
        _, x, _ = small()
        model = Queue(by_index)
        return loss_step, (model, adam(model), x, torch.zeros(4, 12))

    return factory


def packed_by_data() -> Entry:
    torch.manual_seed(0)
    model = nn.GRU(8, 8)

    def step(model, optimizer, x, lengths):
        optimizer.zero_grad()
        packed = rnn.pack_padded_sequence(x, lengths, enforce_sorted=False)
        loss = model(packed)[0].data.square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return step, (model, adam(model), torch.randn(6, 3, 8), torch.tensor([6, 3, 4]))


def _hessians(model, x):
    return torch.func.vmap(torch.func.hessian(_scalar(model)))(x).mean()


def _curvature(model, x):
    return torch.func.jvp(torch.func.grad(_scalar(model)), (x,), (x,))[1].mean()


def _cond(model, x):
    return torch.cond(x.mean() > 0, lambda x: model(x), lambda x: -model(x), (x,)).mean()


def _jagged(model, x):
    parts = torch.nested.nested_tensor([x, x[:2]], layout=torch.jagged)
    return model(parts).values().mean()


#: Losses of a linear layer, the last six of which are refused.
LOSSES: dict[str, Loss] = {
    "runge_kutta": _solved,
    "euler": _stepped,
    "gradients_of_each": _of_each,
    "cond_on_constants": _chosen,
    "hessian": lambda m, x: torch.func.hessian(_scalar(m))(x[0]).square().mean(),
    "hessian_vector": _curvature,
    "jacobian": lambda m, x: torch.func.vmap(torch.func.jacrev(lambda z: m(z).sin()))(x).mean(),
    "hessian_of_each": _hessians,
    "cond_on_data": _cond,
    "unique": lambda m, x: m(x).mean() * len(torch.unique((x > 0).long())),
    "bincount": lambda m, x: m(x).mean() * torch.bincount((x[0] > 0).long(), minlength=2)[0],
    "nonzero": lambda m, x: m(x)[torch.nonzero(x[:, 0] > 0).squeeze(1)].mean(),
    "jagged": _jagged,
}

CASES: dict[str, Factory] = {
    "mask_at_first_use": _attention(False),
    "buffer_at_first_use": _attention(True),
    "running_mean_at_first_use": running_mean_at_first_use,
    "packed_lstm": _packed("LSTM"),
    "packed_gru": _packed("GRU"),
    "packed_by_data": packed_by_data,
    "queue_by_index": _queue(True),
    "queue_by_pointer": _queue(False),
    **{name: _loss(loss_of) for name, loss_of in LOSSES.items()},
}
