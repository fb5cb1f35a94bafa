"""Ranks that run mixed plans, cut inside of submeshes and placed on them, train as one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pardnn.cluster import Cluster
from pardnn.cost.costs import preset_costs
from pardnn.plan.partitioned_graph import SLICE
from pardnn.plan.plan import planned_graph
from pardnn.planner.make_plan import make_plan
from pardnn.planner.options import PlanOptions
from pardnn.planner.problem import Problem
from pardnn.shard.boxes import is_dense
from tests.backends.torch import models
from tests.backends.torch.executors import captured, perceptron
from tests.backends.torch.runtime.test_microbatched_ranks import assert_trained, double
from tests.long_cases import long_but


def towers() -> models.Entry:
    """Return pairs of products, which Megatron cuts by columns and rows, with dropout between."""
    torch.manual_seed(0)
    pairs = [nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(4)]
    model = nn.Sequential(*pairs[:2], nn.Dropout(0.1), *pairs[2:])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return models.classify_step, (model, optimizer, torch.randn(6, 16), torch.randint(16, (6,)))


CASES: list[Any] = [
    (double(towers), 4, 2, "megatron*1f1b"),
    (double(towers), 4, 2, "zero-1*1f1b"),
    (double(perceptron), 4, 3, "tofu*round-robin"),
    (double(models.gan), 4, 2, "tofu*pardnn"),
    *long_but(
        (),
        [
            (double(models.MODELS["resnet"]), 4, 1, "tofu*pardnn"),
            (double(models.MODELS["lstm"]), 4, 2, "tofu*pardnn"),
        ],
    ),
]


@pytest.mark.parametrize(("factory", "size", "pieces", "algorithm"), CASES)
def test_mixed_plans_train_as_one_device(
    factory: Callable[[], models.Entry], size: int, pieces: int, algorithm: str
) -> None:
    assert_trained(factory, size, pieces, algorithm)


def test_messages_between_submeshes_are_copied_by_no_rank() -> None:
    """A slice with gaps, of a weight that stays, is packed by an op of the plan: memory counts."""
    graph = captured(models.MODELS["resnet"])
    options = PlanOptions(algorithm="megatron*pardnn", microbatches=2)
    cluster = Cluster.uniform(4, bandwidth=12e9)
    problem = Problem(graph, cluster, preset_costs(graph, "v100"), options)
    plan, _ = make_plan(problem)
    made = planned_graph(graph, plan)
    ops = {t.name: op for op in made.ops for t in op.outputs}
    tensors = {t.name: t for op in made.ops for t in op.outputs}
    cut = [op for op in (ops[message.tensor] for message in plan.messages) if op.kind == SLICE]
    assert cut
    for op in cut:
        reference, ends = (op.arguments or {})["args"]
        source = tensors[reference["tensor"]]
        own = tuple((0, size) for size in source.shape or ())
        assert is_dense(source, own, tuple((a, b) for a, b in ends)), op.name
