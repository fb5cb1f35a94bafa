"""Optimizers that update lists of tensors at once are cut as those that update one at a time."""

import dataclasses
import functools
import random
from typing import Any

import pytest
import torch
from torch import nn

import pardnn
from pardnn.api.advice import planned as planned_result
from pardnn.backends.torch.capture.capture import capture
from pardnn.cluster import Cluster
from pardnn.graph.ir import Graph
from pardnn.plan.mesh import make_mesh
from pardnn.plan.plan import Plan, planned_graph
from pardnn.planner.options import PlanOptions
from pardnn.report.text import console, plan_text
from pardnn.shard.search.tofu import search
from pardnn.shard.spmd.legalize import legalize
from testbed.zoo import gpt2
from tests.backends.torch import models, spmd
from tests.long_cases import long_but
from tests.shard.spmd.torch.test_partitioner import certified_run

FOREACH = {
    "adamw": (torch.optim.AdamW, {"foreach": True}),
    "nadam": (torch.optim.NAdam, {"foreach": True}),
    "rprop": (torch.optim.Rprop, {"foreach": True}),
    "fused_adamw": (torch.optim.AdamW, {"fused": True}),
    "fused_adam": (torch.optim.Adam, {"fused": True, "amsgrad": True}),
    "fused_sgd": (torch.optim.SGD, {"fused": True, "weight_decay": 0.1}),
    "fused_adagrad": (torch.optim.Adagrad, {"fused": True}),
}


def network(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(),
        nn.Linear(8 * 16, 24), nn.ReLU(), nn.Linear(24, 12),
    ).to(dtype)  # fmt: skip
    return model, torch.randn(6, 3, 6, 6, dtype=dtype), torch.randint(12, (6,))


@pytest.mark.parametrize("name", long_but(set(FOREACH) - {"nadam", "rprop"}, FOREACH))
def test_lists_are_cut_and_compute_the_same(name: str) -> None:
    make, options = FOREACH[name]
    model, x, y = network(torch.float64)
    args = (model, make(model.parameters(), lr=0.1, **options), x, y)
    graph = capture(models.classify_step, *args)
    values = spmd.source_values(models.classify_step, args, graph)
    for shape in ((2,), (2, 2)):
        sharding = legalize(graph, search(graph, make_mesh(shape)))
        updates = [op.name for op in graph.ops if "foreach" in op.kind or "fused" in op.kind]
        assert any(any(sharding.axes[update]) for update in updates)
        plan = certified_run(
            graph, values, spmd.run_whole(graph, values), sharding, random.Random(1)
        )
        assert not plan.notes


@functools.cache
def planned(model: str, **options: Any) -> tuple[Graph, Plan]:
    if model == "gpt2":
        step, (module, _, *batch) = gpt2.small()
    else:
        step, (module, *batch) = models.classify_step, network()
    graph = capture(step, module, torch.optim.AdamW(module.parameters(), **options), *batch)
    return graph, pardnn.plan(graph, Cluster.uniform(4), "tofu", "bytes", costs="v100")


def residual_bytes(graph: Graph, plan: Plan) -> int:
    held = [0] * plan.num_devices
    for op in planned_graph(graph, plan).ops:
        if op.memory == "residual":
            held[plan.placement[op.name]] += sum(tensor.bytes for tensor in op.outputs)
    return max(held)


@pytest.mark.parametrize("option", ["foreach", "fused"])
@pytest.mark.parametrize("model", long_but({"network"}, ["network", "gpt2"]))
def test_lists_take_no_more_memory_than_one_tensor_at_a_time(model: str, option: str) -> None:
    one = planned(model, foreach=False)
    lists = planned(model, **{option: True})
    assert residual_bytes(*lists) <= 1.02 * residual_bytes(*one)
    predicted = [plan.predicted for _, plan in (one, lists)]
    assert predicted[0] is not None
    assert predicted[1] is not None
    assert max(predicted[1].peak_bytes) <= 1.02 * max(predicted[0].peak_bytes)


def test_state_that_an_undescribed_update_keeps_whole_is_named_first() -> None:
    model, x, y = network()
    graph = capture(models.classify_step, model, torch.optim.SGD(model.parameters(), lr=0.1), x, y)
    ops = (
        dataclasses.replace(op, kind=op.kind.replace("aten.add_", "aten.add2_")) for op in graph.ops
    )
    undescribed = dataclasses.replace(graph, ops=tuple(ops))
    options = PlanOptions(algorithm="tofu", objective="bytes", costs="v100")
    plan, result = planned_result(undescribed, Cluster.uniform(2), options)
    first = plan.notes[0]
    assert first.startswith("whole on every device, 14.17 KiB of parameters and states: ")
    assert "'model.4.weight', 'model.6.weight', 'model.0.weight' and 4 more; aten.add2_" in first
    assert "models.py" in first
    assert "has no description" in first
    with (terminal := console()).capture() as shown:
        terminal.print(plan_text(undescribed, plan, result))
    lines = shown.get().splitlines()
    assert lines[3].startswith("whole on every device: 7 of 10 parameters")
    assert lines[4] == f"note: {first}"
    assert not any(n.startswith("whole on") for n in planned("network", foreach=True)[1].notes)
