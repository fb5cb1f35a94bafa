"""Indexing at positions that only a run knows, as MoCo's queue at its pointer."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pardnn.backends.torch.capture.capture import capture
from pardnn.errors import UnsupportedError
from tests.backends.torch import models
from tests.backends.torch.beside_eager import assert_equal
from tests.backends.torch.capture import test_capture_equal
from tests.backends.torch.capture.test_advice import entry

Use = Callable[[Any, torch.Tensor], torch.Tensor]


class Queue(nn.Module):
    """Keys of earlier batches, and where the next ones go."""

    queue: torch.Tensor
    use: Use

    def __init__(self, use: Use) -> None:
        super().__init__()
        self.encoder, self.use = nn.Linear(6, 5), use
        self.register_buffer("queue", torch.randn(5, 12))
        self.register_buffer("counts", torch.zeros(12))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        keys = F.normalize(self.encoder(x), dim=1)
        logits = keys @ self.queue.clone().detach()
        return logits.exp().mean() + self.keep(keys.detach())

    @torch.no_grad()
    def keep(self, keys: torch.Tensor) -> torch.Tensor:
        return self.use(self, keys)


def slices(m: Any, keys: torch.Tensor) -> torch.Tensor:
    """MoCo's own lines."""
    pointer = int(m.pointer)
    m.queue[:, pointer : pointer + len(keys)] = keys.T
    m.pointer[0] = (pointer + len(keys)) % 12
    return keys.sum()


def bounds_of_tensors(m: Any, keys: torch.Tensor) -> torch.Tensor:
    """The pointer stays a tensor, changes before its number is used, and counts rows."""
    first, row = m.pointer, m.pointer.item()
    m.queue.T[first : first + 4, :] = keys
    m.pointer.copy_(torch.tensor([(row + 4) % 11]))
    m.counts[row] += 1
    m.queue[1, row : row + 2] = 0.5
    return m.counts.sum()


def reads(m: Any, keys: torch.Tensor) -> torch.Tensor:
    """Rows, columns and slices, with the strides of views: sums go by them."""
    i: Any = torch.randint(5, (1,)).item()
    at = (m.pointer[0] + 3) % 5
    m.pointer[0] = at
    part, column = m.queue[:, i : i + 7], m.queue[..., i]
    assert (part.stride(), column.stride()) == ((12, 1), (12,))
    some = part.mean() + column.sum() + m.queue.narrow(1, i, 3).std()
    some = some + m.queue[:, i : 3 + i].sum()
    row = m.queue[at].clone() + m.queue[at.item() - 4].sum()
    m.queue[at] = row * 0.5
    return some + keys[:, i].sum() + row.sum()


def moved(m: Any, keys: torch.Tensor) -> torch.Tensor:
    """Sums of a number of the batch: positions of it are not read as numbers."""
    i: Any = keys[0].argmax().item()
    j = (keys[1].argmax() + 1).item() + 2
    m.queue[:, j] = keys[0]
    return (
        m.queue[:, i + 2 : i + 5].sum() + m.queue.narrow(1, i + 1, 3).std() + m.queue[i - 1].sum()
    )


def written_through(m: Any, keys: torch.Tensor) -> torch.Tensor:
    m.queue[:, int(m.pointer)].copy_(keys[0])
    return m.queue.sum()


def read_too_late(m: Any, keys: torch.Tensor) -> torch.Tensor:
    i = int(m.pointer)
    column = m.queue[:, i]
    m.queue[:, i] = keys[0]
    return column.sum()


def up_to_a_length(m: Any, keys: torch.Tensor) -> torch.Tensor:
    return keys[: int(m.pointer)].sum()


def made(use: Use) -> models.Entry:
    torch.manual_seed(0)
    model = Queue(use)
    optimizer = torch.optim.Adam(model.encoder.parameters())
    return entry(lambda m, x: m(x))[0], (model, optimizer, torch.randn(4, 6))


def test_the_pointer_of_a_queue() -> None:
    assert_equal(functools.partial(made, slices))


@pytest.mark.parametrize("use", [bounds_of_tensors, reads, moved])
def test_positions(use: Use) -> None:
    test_capture_equal.assert_equal(functools.partial(made, use))


@pytest.mark.parametrize("use", [written_through, read_too_late, up_to_a_length])
def test_copies_that_would_differ_from_views(use: Use) -> None:
    step, args = made(use)
    with pytest.raises(UnsupportedError) as caught:
        capture(step, *args)
    assert caught.value.code == "E803"
    assert "test_positions.py" in caught.value.details["source"]
