"""Memory limits under `parallelize`: those of the cluster bind, and the device's own by default."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import pardnn
from pardnn.backends.torch.devices import rank_memory_bytes
from pardnn.backends.torch.runtime import memory_limits
from pardnn.errors import InfeasibleError
from tests.backends.torch.ranks import connect, run_ranks

MIB = 1 << 20


def step(model: Any, optimizer: Any, x: Any) -> Any:
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss


def made(width: int) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, width), nn.Linear(width, 4))
    return model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(4, width)


def in_child(body: Any) -> Any:
    """Limits are of the process, so each test has one of its own."""

    def connected(rank: int, path: str) -> Any:
        connect(rank, 1, path, 20).close()
        return body()

    (outcome,) = run_ranks(1, connected)
    assert outcome.status == 0, outcome.error
    return outcome.value


def test_the_limit_of_the_cluster_is_enforced_in_the_users_process() -> None:
    def body() -> Any:
        cluster = pardnn.Cluster.uniform(1, memory="64MiB")
        fast = pardnn.parallelize(step, *made(256), cluster=cluster, costs="v100")
        first = fast(made(256)[2]).item()
        try:
            torch.ones(800 * MIB // 4)
        except RuntimeError as error:
            refused = memory_limits.is_out_of_memory(error)
        else:
            refused = False
        fast.close()
        torch.ones(200 * MIB // 4)  # lifted again
        return [first > 0, refused, fast.plan.cluster.devices[0].memory]

    assert in_child(body) == [True, True, 64 * MIB]


def test_what_does_not_fit_the_limit_is_no_plan() -> None:
    def body() -> Any:
        cluster = pardnn.Cluster.uniform(1, memory="1MiB")
        with pytest.raises(InfeasibleError):
            pardnn.parallelize(step, *made(1024), cluster=cluster, costs="v100")
        return True

    assert in_child(body)


def test_without_a_cluster_the_devices_own_memory_is_the_limit() -> None:
    def body() -> Any:
        fast = pardnn.parallelize(step, *made(64), costs="v100")
        fast.close()
        return fast.plan.cluster.devices[0].memory

    assert in_child(body) == rank_memory_bytes()
