"""Data parallelism across groups, Megatron inside: eager numbers, both layouts, bytes by hand."""

import functools
from typing import Any

import pytest
import torch
from torch import nn

from pardnn.backends.torch.capture.capture import capture
from pardnn.errors import UsageError
from pardnn.graph.ir import Graph
from pardnn.plan.check import plan_problems
from pardnn.plan.mesh import make_mesh
from pardnn.plan.plan import Plan, planned_graph
from pardnn.planner.check_cut import cut_problems
from pardnn.shard.recipes.product import PRODUCTS
from pardnn.shard.sharding import Sharding
from pardnn.shard.spmd.legalize import legalize
from pardnn.shard.spmd.partitioner import spmd_partition
from tests.backends.torch import spmd
from tests.shard.recipes.torch import test_megatron

#: Numbers of a device's parameters on a mesh of 2 x 2: both weights and the inner bias are halves.
HELD = 64 + 8 + 64 + 8 + 16
#: Of those, what has an owner along the first axis: the inner bias has no dim left.
OWNED = HELD - 8
#: Numbers that a device sends for its parameters: gradients to the other one of the first axis,
#: halves of them where these are scattered, and halves of parameters that are gathered.
SENT = {
    "data-parallel*megatron": HELD,
    "zero-1*megatron": HELD + OWNED // 2,
    "zero-2*megatron": HELD,
}


def cut(graph: Graph, name: str, *shape: int) -> Sharding:
    return legalize(graph, PRODUCTS[name](graph, make_mesh(shape)))


def planned(graph: Graph, name: str, *shape: int) -> Plan:
    plan = spmd_partition(graph, cut(graph, name, *shape))
    assert plan_problems(graph, plan) == []
    assert list(cut_problems(graph, plan)) == []
    return plan


@functools.cache
def perceptron() -> Graph:
    """A norm, and two products between which the width is doubled; 8 samples, Adam."""
    torch.manual_seed(0)
    layers = nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)
    model = nn.Sequential(nn.LayerNorm(8), nn.Sequential(*layers)).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

    def step(model, optimizer, x):
        optimizer.zero_grad()
        y = model[0](x)
        loss = (y + model[1](y)).square().sum()
        loss.backward()
        optimizer.step()
        return loss

    return capture(step, model, optimizer, torch.randn(8, 8, dtype=torch.float64))


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("name", PRODUCTS)
def test_numbers_are_those_of_one_device(name: str, joined: bool) -> None:
    """Of a block of attention and an MLP, three samples over two groups."""
    step, args, graph = test_megatron.training(joined)
    values = spmd.source_values(step, args, graph)
    plan = planned(graph, name, 2, 2)
    assert spmd.run_partitioned(graph, plan, values, spmd.run_whole(graph, values)) == []


@pytest.mark.parametrize("name", PRODUCTS)
def test_each_axis_cuts_what_is_its_own(name: str) -> None:
    found: Any = cut(perceptron(), name, 2, 2).layouts
    owner = None if name.startswith("data") else 0
    assert found["x"] == (0, None)
    assert found["model.1.0.weight"] == found["model.1.0.bias"] == (None, 0)
    assert found["model.1.2.weight"] == (None, 1)
    assert found["model.1.2.bias"] == found["model.0.weight"] == (None, None)
    states = {n.removeprefix("optimizer.state.model."): n for n in found if "exp_avg_sq" in n}
    assert found[states["1.0.weight.exp_avg_sq"]] == (None if owner is None else 1, 0)
    assert found[states["1.0.bias.exp_avg_sq"]] == (None, 0)
    assert found[states["1.2.weight.exp_avg_sq"]] == (owner, 1)
    assert found[states["0.weight.exp_avg_sq"]] == (owner, None)


@pytest.mark.parametrize("name", PRODUCTS)
def test_bytes_are_those_of_the_hand(name: str) -> None:
    graph = perceptron()
    plan = planned(graph, name, 2, 2)
    size = {t.name: t.bytes for op in planned_graph(graph, plan).ops for t in op.outputs}
    sent = sum(size[message.tensor] for message in plan.messages if size[message.tensor] > 8)
    activations = 2 * 4 * 8  # forward and backward, of four samples each, to the other half
    assert sent == 4 * 8 * (activations + SENT[name])


def test_one_axis_is_refused() -> None:
    with pytest.raises(UsageError, match="one mesh axis") as caught:
        PRODUCTS["zero-2*megatron"](perceptron(), make_mesh((3,)))
    assert caught.value.code == "E229"
