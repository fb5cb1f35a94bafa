"""Megatron's cut of a block: columns then rows, two all-reduces per pass, the eager numbers."""

import functools
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from pardnn.backends.torch.capture.capture import capture
from pardnn.errors import UsageError
from pardnn.graph.ir import Graph
from pardnn.plan.check import plan_problems
from pardnn.plan.mesh import make_mesh
from pardnn.plan.plan import Plan, planned_graph
from pardnn.planner.check_cut import cut_problems
from pardnn.shard.recipes.megatron import megatron
from pardnn.shard.spmd.legalize import legalize
from pardnn.shard.spmd.partitioner import spmd_partition
from tests.backends.torch import spmd

BATCH, TOKENS, WIDTH = 3, 5, 8


class Block(nn.Module):
    """Attention with 4 heads, and an MLP, each beside the residual stream."""

    def __init__(self, joined: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        made = (3,) if joined else (1, 1, 1)
        self.qkv = nn.ModuleList([nn.Linear(WIDTH, n * WIDTH) for n in made])
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = [linear(self.norm(x)) for linear in self.qkv]
        parts = made if len(made) == 3 else made[0].split(WIDTH, 2)
        q, k, v = (part.unflatten(2, (4, -1)).transpose(1, 2) for part in parts)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(x)))


@functools.cache
def training(joined: bool) -> tuple[Any, Any, Graph]:
    torch.manual_seed(0)
    model = Block(joined).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(model, optimizer, x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    args = (model, optimizer, torch.randn(BATCH, TOKENS, WIDTH, dtype=torch.float64))
    return step, args, capture(step, *args)


def planned(graph: Graph, *shape: int) -> Plan:
    plan = spmd_partition(graph, legalize(graph, megatron(graph, make_mesh(shape))))
    assert plan_problems(graph, plan) == []
    assert list(cut_problems(graph, plan)) == []
    return plan


@pytest.mark.parametrize("joined", [False, True])
def test_numbers_are_those_of_one_device(joined: bool) -> None:
    step, args, graph = training(joined)
    values = spmd.source_values(step, args, graph)
    plan = planned(graph, 2)
    assert spmd.run_partitioned(graph, plan, values, spmd.run_whole(graph, values)) == []


@pytest.mark.parametrize("joined", [False, True])
def test_columns_then_rows(joined: bool) -> None:
    _, _, graph = training(joined)
    layouts = legalize(graph, megatron(graph, make_mesh((2, 2)))).layouts
    names = [op.outputs[0].name for op in graph.ops if op.kind in ("parameter", "state")]
    columns, rows = ("qkv", "up"), ("out.weight", "down.weight")
    for name in names:
        dim = 0 if any(n in name for n in columns) else 1 if any(n in name for n in rows) else None
        assert layouts[name] == (dim, dim), name


def test_two_all_reduces_per_block_and_pass() -> None:
    """Of what a block makes; made at once, queries, keys and values take all-to-alls besides."""
    _, _, graph = training(True)
    plan = planned(graph, 2)
    backward = {op.name for op in graph.ops if op.backward_of}
    made = {t.name: op.name for op in graph.ops for t in op.outputs}
    found = Counter[bool]()
    for op in planned_graph(graph, plan).ops:
        of = op.outputs[0].name.rpartition("@")[0] if op.outputs else ""
        is_sum = (op.arguments or {}).get("collective", {}).get("collective") == "all_reduce"
        if is_sum and op.name.endswith("@0"):
            assert op.outputs[0].shape == (BATCH * TOKENS, WIDTH)
            found[made[of] in backward] += 1
    assert found == {False: 2, True: 2}


def test_an_mlp_moves_two_all_reduces_of_its_width() -> None:
    torch.manual_seed(0)
    layers = nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)
    model = nn.Sequential(nn.LayerNorm(8), nn.Sequential(*layers)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(model, optimizer, x):
        optimizer.zero_grad()
        y = model[0](x)
        loss = (y + model[1](y)).square().sum()
        loss.backward()
        optimizer.step()
        return loss

    graph = capture(step, model, optimizer, torch.randn(6, 8, dtype=torch.float64))
    plan = planned(graph, 2)
    size = {t.name: t.bytes for op in planned_graph(graph, plan).ops for t in op.outputs}
    sent = sum(size[message.tensor] for message in plan.messages if message.source == 0)
    assert sent == 2 * 2 * 6 * 8 * 8 // 2  # forward and backward, 2 (k - 1) / k of 6 x 8 numbers


def test_a_step_without_two_products_in_a_row_is_refused() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(model, optimizer, x):
        loss = model(x).sum()
        loss.backward()
        optimizer.step()
        return loss

    graph = capture(step, model, optimizer, torch.randn(6, 4))
    with pytest.raises(UsageError, match="no two products") as caught:
        megatron(graph, make_mesh((2,)))
    assert caught.value.code == "E228"
