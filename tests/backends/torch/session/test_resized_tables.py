"""A table that the first step builds for the shape of its batch, in place of one of another shape.

ConViT's positions are one: a buffer of one zero that its first call replaces.
"""

import functools
from typing import Any

import pytest
import torch
from torch import nn

import pardnn
from tests.backends.torch.ranks import connect, run_ranks

LENGTHS = (5, 5, 7, 7)


class Tabled(nn.Module):
    def __init__(self, *, is_buffer: bool) -> None:
        super().__init__()
        self.values, self.weigh = nn.Linear(4, 4).double(), nn.Linear(2, 1).double()
        first = torch.zeros(1, 1, 2, dtype=torch.float64)
        if is_buffer:
            self.register_buffer("table", first, persistent=False)
        else:
            self.table = first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.table.shape[1] != x.shape[1]:
            self.table = self.built(x.shape[1])
        return self.weigh(self.table).squeeze(-1).softmax(-1) @ self.values(x)

    def built(self, length: int) -> torch.Tensor:
        places = torch.arange(length, dtype=torch.float64)
        off = places.view(1, -1) - places.view(-1, 1)
        return torch.stack([off, off.square()], -1).to(self.weigh.weight.device)


class Counted(Tabled):
    """As rotary tables of Llama: empty at first, and a number says how long they are."""

    def __init__(self, *, is_buffer: bool) -> None:
        super().__init__(is_buffer=is_buffer)
        self.longest, self.table = 0, torch.empty(0, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[1]
        if length > self.longest:
            self.longest, table = length, self.built(length)
            self.register_buffer("table", table, persistent=False)
        table = self.table[:length, :length]
        return self.weigh(table).squeeze(-1).softmax(-1) @ self.values(x)


def step(model: Any, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss


def trained(
    kind: type[Tabled], *, is_buffer: bool, algorithm: str | None
) -> tuple[list[float], list[int], list[float]]:
    """Return losses, the shape of the table after them, and its numbers."""
    torch.manual_seed(0)
    model = kind(is_buffer=is_buffer)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batches = [torch.randn(2, length, 4).double() for length in LENGTHS]
    fast: Any = None
    run: Any = functools.partial(step, model, optimizer)
    if algorithm:
        run = fast = pardnn.parallelize(
            step, model, optimizer, batches[0], algorithm=algorithm, costs="v100", timeout=20
        )
    losses = [run(x).item() for x in batches]
    table = fast.whole("model.table") if algorithm else model.table
    if fast is not None:
        fast.close()
    return losses, list(model.table.shape), table.flatten().tolist()


@pytest.mark.parametrize(
    ("kind", "is_buffer", "size", "algorithm"),
    [
        (Tabled, False, 1, "single"),
        (Tabled, True, 2, "tofu"),
        (Counted, True, 2, "round-robin"),
    ],
)
def test_a_table_follows_the_length_of_the_batch(
    kind: type[Tabled], is_buffer: bool, size: int, algorithm: str
) -> None:
    def body(rank: int, path: str) -> Any:
        connect(rank, size, path, 20).close()
        return [trained(kind, is_buffer=is_buffer, algorithm=each) for each in (algorithm, None)]

    for outcome in run_ranks(size, body):
        assert outcome.status == 0, outcome.error
        (losses, shape, table), (expected, eager_shape, eager_table) = outcome.value
        assert losses == pytest.approx(expected, rel=1e-12)
        assert shape == eager_shape
        assert table == eager_table
