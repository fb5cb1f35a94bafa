"""A step that talks to other processes itself, as scripts for DDP do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._C._distributed_c10d import HashStore
from torch.distributed import _functional_collectives as functional

from pardnn.backends.torch.capture.capture import capture
from pardnn.errors import UnsupportedError
from tests.backends.torch.stepping import small


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=HashStore())
    yield
    dist.destroy_process_group()


def of_gradients(model: Any, _loss: torch.Tensor) -> None:
    for p in model.parameters():
        dist.all_reduce(p.grad)


def of_the_loss(_model: Any, loss: torch.Tensor) -> None:
    whole: Any = dist.group.WORLD
    mean = functional.all_reduce(loss.detach(), "sum", whole)
    print(f"{mean.item():.3f}")


def of_weights(model: Any, _loss: torch.Tensor) -> None:
    dist.broadcast(model[0].weight.data, 0)


def of_time(_model: Any, _loss: torch.Tensor) -> None:
    dist.barrier()


def of_objects(_model: Any, loss: torch.Tensor) -> None:
    dist.all_gather_object([None], {"loss": loss.item()})


def of_lists(_model: Any, _loss: torch.Tensor) -> None:
    dist.broadcast_object_list(["run"], 0)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(
    "exchange", [of_gradients, of_the_loss, of_weights, of_time, of_objects, of_lists]
)
def test_a_collective_is_refused_by_name(exchange: Callable[..., None]) -> None:
    model, x, y = small()

    def step(model, optimizer, x, y):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        exchange(model, loss)
        optimizer.step()
        return loss

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UnsupportedError, match=r"torch.distributed \(\w") as caught:
        capture(step, model, optimizer, x, y)
    assert caught.value.code == "E804"
    assert "test_collectives.py:" in str(caught.value)
