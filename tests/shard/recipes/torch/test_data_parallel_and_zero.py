"""Data parallelism and ZeRO: the eager step's numbers, 1/k where it is promised, bytes by hand."""

import functools
import itertools
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
from pardnn.planner.algorithms import SHARDED
from pardnn.planner.check_cut import cut_problems
from pardnn.shard.spmd.legalize import legalize
from pardnn.shard.spmd.partitioner import spmd_partition
from tests.backends.torch import spmd
from tests.long_cases import long_but

#: What moves per device, in (k - 1) / k of the parameters' bytes: an all-reduce is two; ZeRO-1
#: gathers parameters besides, ZeRO-2 scatters in place of the all-reduce.
BYTES = {"data-parallel": 2, "zero-1": 3, "zero-2": 2}
#: Whether parameters, gradients and states are cut.
CUT = {
    "data-parallel": (False, False, False),
    "zero-1": (False, False, True),
    "zero-2": (False, True, True),
    "zero-3": (True, True, True),
}


@functools.cache
def training(width: int = 12, clip: bool = False, fused: bool = False) -> tuple[Any, Any, Graph]:
    """An MLP without biases, in double precision, and Adam."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(width, width, bias=False), nn.Tanh(), nn.Linear(width, width, bias=False)
    ).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)

    def step(model, optimizer, x, y):
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()
        return loss

    args = (model, optimizer, *torch.randn(2, 24, width, dtype=torch.float64))
    return step, args, capture(step, *args)


def planned(graph: Graph, name: str, *shape: int) -> Plan:
    plan = spmd_partition(graph, legalize(graph, SHARDED[name](graph, make_mesh(shape))))
    assert plan_problems(graph, plan) == []
    assert list(cut_problems(graph, plan)) == []
    return plan


def held(graph: Graph, plan: Plan, tensor: str) -> float:
    """What the first device holds of a tensor."""
    mine = {t.name: t.bytes for op in planned_graph(graph, plan).ops for t in op.outputs}
    return mine[f"{tensor}@0"] / next(
        t.bytes for op in graph.ops for t in op.outputs if t.name == tensor
    )


@pytest.mark.parametrize("name", CUT)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("clip", [False, True])
def test_numbers_are_those_of_one_device(name: str, clip: bool, fused: bool) -> None:
    step, args, graph = training(clip=clip, fused=fused)
    values = spmd.source_values(step, args, graph)
    whole = spmd.run_whole(graph, values)
    for shape in ((2,), (2, 2)):
        plan = planned(graph, name, *shape)
        assert spmd.run_partitioned(graph, plan, values, whole) == []


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", CUT)
def test_each_device_holds_what_the_recipe_promises(name: str, fused: bool) -> None:
    _, _, graph = training(fused=fused)
    plan = planned(graph, name, 3)
    updates = [op for op in graph.ops if op.kind.startswith(("aten.lerp_", "aten._fused_adamw_"))]
    gradients = [tensor for op in updates for tensor in op.inputs[1:2]]
    kinds = {op.outputs[0].name: op for op in graph.ops if op.outputs and op.outputs[0].shape}
    for tensors, is_cut in zip(
        (
            [n for n, op in kinds.items() if op.kind == "parameter"],
            gradients,
            [n for n, op in kinds.items() if op.kind == "state"],
        ),
        CUT[name],
        strict=True,
    ):
        assert len(tensors) in (2, 4)
        assert [held(graph, plan, tensor) for tensor in tensors] == [
            1 / 3 if is_cut else 1.0
        ] * len(tensors)


@pytest.mark.parametrize("name", ["zero-1", "zero-2"])
@pytest.mark.parametrize("made", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
def test_a_part_of_a_parameter_that_is_no_run_of_memory_is_updated(name: str, made: Any) -> None:
    """Two rows for three devices are cut by columns; fused kernels take each part for a run."""
    torch.manual_seed(0)
    model = nn.Linear(6, 2, bias=False).double()
    momentum = {"momentum": 0.9} if made is torch.optim.SGD else {}
    optimizer = made(model.parameters(), lr=0.1, fused=True, **momentum)

    def step(model, optimizer, x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    args = (model, optimizer, torch.randn(6, 6, dtype=torch.float64))
    graph = capture(step, *args)
    plan = planned(graph, name, 3)
    values = spmd.source_values(step, args, graph)
    assert spmd.run_partitioned(graph, plan, values, spmd.run_whole(graph, values)) == []


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", BYTES)
@pytest.mark.parametrize("k", [2, 4])
def test_bytes_are_those_of_the_hand(name: str, k: int, fused: bool) -> None:
    """A fused update reads gradients alone, whatever its schema says of gradient scalers."""
    width = 64  # 32 KiB a weight: its reduction is spread over the devices
    _, _, graph = training(width, fused=fused)
    plan = planned(graph, name, k)
    size = {t.name: t.bytes for op in planned_graph(graph, plan).ops for t in op.outputs}
    parameters = 2 * 64 * 64 * 8
    sent = [0] * k
    for message in plan.messages:
        if size[message.tensor] > 8:  # the loss
            sent[message.source] += size[message.tensor]
    times = BYTES[name]
    assert sent == [times * (k - 1) * parameters // k] * k


@functools.cache
def classifying(reduction: str, weighted: bool) -> tuple[Any, Any, Graph]:
    """Scores of the next token, where some do not count: the end of a language model."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 12), nn.Linear(12, 9)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    weight = torch.rand(9, dtype=torch.float64) if weighted else None

    def step(model, optimizer, tokens, labels):
        optimizer.zero_grad()
        scores = model(tokens).flatten(0, 1)
        loss = nn.functional.cross_entropy(scores, labels.flatten(), weight, reduction=reduction)
        loss.backward()
        optimizer.step()
        return loss

    tokens, labels = torch.randint(7, (6, 5)), torch.randint(9, (6, 5))
    labels[:3], labels[4, 2:] = -100, -100  # the first device of two has nothing that counts
    args = (model, optimizer, tokens, labels)
    return step, args, capture(step, *args)


@pytest.mark.parametrize(
    ("reduction", "weighted"),
    long_but([("mean", True), ("sum", False)], itertools.product(["mean", "sum"], [False, True])),
)
def test_cross_entropy_is_cut_by_rows(reduction: str, weighted: bool) -> None:
    """The mean is of all that counts, and scores stay where they are."""
    step, args, graph = classifying(reduction, weighted)
    values = spmd.source_values(step, args, graph)
    whole = spmd.run_whole(graph, values)
    shape_of = {t.name: t.shape for op in graph.ops for t in op.outputs}
    for shape in ((2,), (2, 3)):
        plan = planned(graph, "data-parallel", *shape)
        assert spmd.run_partitioned(graph, plan, values, whole) == []
        moved = {message.tensor.partition("@")[0].partition(":")[0] for message in plan.messages}
        assert moved
        assert not any(shape_of[name] == (30, 9) for name in moved)


def test_a_batch_of_fewer_samples_than_devices_is_refused() -> None:
    _, _, graph = training()
    with pytest.raises(UsageError, match="cannot be cut in 48 pieces") as caught:
        SHARDED["data-parallel"](graph, make_mesh((48,)))
    assert caught.value.code == "E226"
