"""Placed plans keep every bit, whatever the layout of what is sent."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pardnn
from pardnn.backends.torch.parallelize import parallelize
from pardnn.cluster import Cluster
from pardnn.errors import InvalidPlanError
from pardnn.graph.build import build_graph
from pardnn.graph.ir import Graph, span_bytes
from pardnn.plan.check import plan_problems
from pardnn.plan.plan import Plan
from tests.backends.torch import models
from tests.backends.torch.executors import (
    STEPS,
    assert_equal,
    captured,
    eager,
    misaligned,
    on_ranks,
)
from tests.backends.torch.messages import LAYOUTS
from tests.backends.torch.plans import random_plan
from tests.backends.torch.ranks import connect, run_ranks


def views() -> models.Entry:
    """Views with gaps, repetitions and overlaps, and readers whose bits hang on the layout."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(8, 24, 4, padding=3), nn.Linear(16, 8))

    def step(model: Any, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        h = model[0](x)  # 3, 24, 19
        gate, value = F.silu(h[..., :16]).chunk(2, 1)
        mixed = model[1](gate * torch.tanh(value))
        first = h[:, :1, :8].expand(-1, 12, -1).exp() + mixed
        windows = h[:, 3].unfold(1, 8, 3).sigmoid()
        rows = torch.cat([h[0].t()[2:9, ::3].sin(), model[1].bias.repeat(7, 1)], 1)
        loss = first.logsumexp(1).mean() + windows.sum(0).square().mean() + rows.mean()
        loss.backward()
        optimizer.step()
        return loss

    return step, (model, torch.optim.Adam(model.parameters(), lr=1e-2), torch.randn(3, 8, 16))


def gaps(plan: Plan) -> int:
    """Messages of tensors with gaps or repetitions."""
    tensors = {t.name: t for op in captured(views).ops for t in op.outputs}
    return sum(span_bytes(tensors[m.tensor]) != tensors[m.tensor].bytes for m in plan.messages)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_views_with_gaps_are_read_as_on_one_device(seed: int) -> None:
    plan = random_plan(captured(views), 2, seed=seed)
    assert gaps(plan) >= 8
    for outcome in assert_equal(views, plan):
        _, _, measured, predicted, *_ = outcome.value
        assert measured <= predicted


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_what_is_misaligned_is_read_as_on_one_device(seed: int) -> None:
    graph = captured(misaligned)
    tensors = {tensor.name: tensor for op in graph.ops for tensor in op.outputs}
    plan = random_plan(graph, 2, seed=seed)
    assert sum(bool(tensors[m.tensor].misaligned_bytes) for m in plan.messages) >= 2
    for outcome in assert_equal(misaligned, plan):
        _, _, measured, predicted, *_ = outcome.value
        assert measured <= predicted


def restrided() -> models.Entry:
    """A view of a view by an offset in the storage, which reaches beyond the view."""
    torch.manual_seed(0)
    model = nn.Linear(8, 8)

    def step(model: Any, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        h = model(x)
        loss = h[2:].as_strided((3, 4), (8, 2), 9).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return step, (model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(6, 8))


@pytest.mark.parametrize("seed", range(4))
def test_an_offset_in_a_storage_is_one_in_the_whole_storage(seed: int) -> None:
    assert_equal(restrided, random_plan(captured(restrided), 2, seed=seed))


def test_an_offset_in_a_storage_is_not_applied_to_a_fetched_part() -> None:
    graph = captured(restrided)
    plan = pardnn.plan(graph, Cluster.uniform(2), "tofu", costs="v100", objective="bytes")
    assert plan.partition is not None
    expected = losses(eager(restrided, None, STEPS)[0])
    for outcome in on_ranks(restrided, plan):
        assert outcome.status == 0, outcome.error
        torch.testing.assert_close(losses(outcome.value[0]), expected)


def losses(found: list[str]) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex("".join(found)), dtype=torch.float32)


def test_a_plan_that_takes_an_offset_in_a_sent_copy_is_not_valid() -> None:
    graph = captured(restrided)
    plan = random_plan(graph, 2)
    ops = [dataclasses.replace(op, group=None) for op in graph.ops]
    scattered = build_graph(graph.name, ops)
    found = [problem for seed in range(4) for problem in problems(scattered, seed)]
    assert any("addresses the storage of 'slice'" in problem for problem in found)
    assert not plan_problems(graph, plan)


def problems(graph: Graph, seed: int) -> list[str]:
    try:
        random_plan(graph, 2, seed)
    except InvalidPlanError as error:
        return error.details["problems"]
    return []


def activated() -> models.Entry:
    """Several readers of the batch, whose bits hang on its strides."""
    torch.manual_seed(0)
    model = nn.Linear(20, 4)

    def step(model: Any, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(F.silu(x)) + x.exp().mean() + x.logsumexp(1).sin().mean()).mean()
        loss.backward()
        optimizer.step()
        return loss

    return step, (model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(30, 20))


@pytest.mark.parametrize("layout", ["transposed", "every second", "expanded back"])
def test_a_batch_of_other_strides_is_captured_anew(layout: str) -> None:
    step, args = activated()
    batch = LAYOUTS[layout](args[2])
    expected = [step(args[0], args[1], batch).item() for _ in range(3)]

    def decide(graph: Graph, n: int, _: Any) -> Plan:
        plans = (random_plan(graph, n, seed=seed) for seed in range(50))
        return next(plan for plan in plans if any(m.tensor == "x" for m in plan.messages))

    def body(rank: int, store: str) -> list[float]:
        step, args = activated()
        connect(rank, 2, store, 20).close()
        fast = parallelize(step, *args, decide=decide, timeout=20, device="cpu")
        found = [fast(batch).item() for _ in range(3)]
        assert fast.captures == 2
        fast.close()
        return found

    for outcome in run_ranks(2, body):
        assert outcome.value == expected, outcome.error
