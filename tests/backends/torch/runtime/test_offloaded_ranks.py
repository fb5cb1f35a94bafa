"""Ranks with optimizer state on the host train bit by bit as the user's step does."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import pardnn
from pardnn.backends.torch.ops.host_memory import host_tensor, is_on_host, on_host
from pardnn.backends.torch.runtime.memory_limits import data_bytes
from pardnn.backends.torch.runtime.memory_meter import live_bytes
from pardnn.cluster import Cluster
from pardnn.graph.ir import Op, Tensor
from pardnn.plan.check import check_plan
from pardnn.plan.file import plan_from_json, plan_to_json, stamped
from pardnn.plan.rewritten.offload import graph_with_host, may_offload
from tests.backends.torch.executors import assert_equal, captured, perceptron

CPU = torch.device("cpu")


@pytest.mark.parametrize("size", [1, 2])
def test_states_on_the_host_keep_every_bit(size: int) -> None:
    graph = captured(perceptron)
    names = tuple(op.name for op in may_offload(graph))
    assert names
    algorithm = "single" if size == 1 else "round-robin"
    made = pardnn.plan(graph_with_host(graph, names), Cluster.uniform(size), algorithm,
                       reserve=0.0, costs="v100")  # fmt: skip
    plan = stamped(dataclasses.replace(made, offload=names), graph)
    check_plan(graph, plan)
    outcomes = assert_equal(perceptron, plan_from_json(plan_to_json(plan)), steps=3)
    assert plan.predicted is not None
    for outcome, peak in zip(outcomes, plan.predicted.peak_bytes, strict=True):
        assert 0.99 * peak <= outcome.value[2] <= peak


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64", "bool"])
def test_host_memory_is_none_of_the_ranks(dtype: str) -> None:
    size = getattr(torch, dtype).itemsize
    shape = (3, 1 << 20)
    tensor = Tensor(name="s", bytes=3 * size << 20, shape=shape, dtype=dtype, strides=(1, 3))
    before = data_bytes()
    made = host_tensor(tensor, CPU).fill_(1)
    assert data_bytes() - before < size << 20  # of three times as much
    assert made.stride() == (1, 3)
    assert bool((made == 1).all())
    assert is_on_host(made)
    assert live_bytes({"s": made, "x": torch.ones(1)}) == 4
    op = Op(name="s", kind="state", memory="host", outputs=(tensor,))
    assert on_host(made, op, CPU) is made
    copied = on_host(made.clone(), op, CPU)
    assert copied.data_ptr() != made.data_ptr()
    assert torch.equal(copied, made)
    address = made.data_ptr()
    del made
    assert not is_on_host(torch.ones(3))
    assert address != copied.data_ptr()
