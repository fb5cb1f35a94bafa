"""Ranks with optimizer state on the host train bit by bit as the user's step does."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

import pardnn
from pardnn.backends.torch.ops.host_memory import host_tensor, is_on_host, on_host
from pardnn.backends.torch.parallelize import parallelize
from pardnn.backends.torch.runtime.memory.limits import data_bytes
from pardnn.backends.torch.runtime.memory.meter import live_bytes
from pardnn.cluster import Cluster
from pardnn.errors import InfeasibleError
from pardnn.graph.ir import Graph, Op, Tensor
from pardnn.plan.check import check_plan
from pardnn.plan.file import plan_from_json, plan_to_json, stamped
from pardnn.plan.plan import Plan, on_devices
from pardnn.plan.rewritten.offload import graph_with_host, may_offload
from pardnn.planner.check_cut import prove
from tests.backends.torch import models
from tests.backends.torch.executors import assert_equal, captured, perceptron
from tests.backends.torch.ranks import connect, run_ranks
from tests.backends.torch.runtime.test_executor_sharded import one_device
from tests.backends.torch.runtime.test_microbatched_ranks import double
from tests.backends.torch.runtime.test_mixed_ranks import towers
from tests.long_cases import long_but

CPU = torch.device("cpu")


def wide() -> models.Entry:
    """Layers whose optimizer state is most of what a step holds."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(48, 48), nn.Tanh()) for _ in range(4)]
    model = nn.Sequential(*layers, nn.Dropout(0.1)).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    x, y = torch.randn(8, 48, dtype=torch.float64), torch.randint(48, (8,))
    return models.classify_step, (model, optimizer, x, y)


CUTS: list[Any] = [
    ("zero-1", 2, 2, 1.0),
    ("1f1b", 2, 2, 1.0),
    *long_but(
        (),
        [
            ("data-parallel", 2, None, 1.0),
            ("zero-3", 2, None, 1.0),
            ("zero-2", 4, None, 1.0),
            ("megatron*1f1b", 4, 2, 1.0),
            ("zero-1", 2, None, 0.9),
        ],
    ),
]


@pytest.mark.parametrize(("algorithm", "size", "pieces", "less"), CUTS)
def test_state_of_cut_steps_on_the_host_trains_as_one_device(
    algorithm: str, size: int, pieces: int | None, less: float
) -> None:
    """Under a limit that the same cut exceeds; with second calls, too, where it is lower still."""
    factory = wide if "*" not in algorithm else double(towers)
    graph, options = captured(factory), {"reserve": 0.0, "costs": "v100", "microbatches": pieces}
    whole = pardnn.plan(graph, Cluster.uniform(size), algorithm, **options)
    assert whole.predicted is not None
    states = min(sum(t.bytes for t in held) for held in _states(graph, whole, size))
    limit = int(less * (max(whole.predicted.peak_bytes) - states // 2))
    cluster = Cluster.uniform(size, memory=limit)
    with pytest.raises(InfeasibleError):
        pardnn.plan(graph, cluster, algorithm, **options)
    made = pardnn.plan(graph, cluster, algorithm, offload=True, recompute=less < 1, **options)
    assert made.offload
    assert (made.partition is None) == (algorithm == "1f1b")
    plan = plan_from_json(plan_to_json(made))
    prove(graph, plan)
    expected, predicted = one_device(factory), plan.predicted
    assert predicted is not None

    def body(rank: int, store: str) -> list[Any]:
        connect(rank, size, store, 20.0)
        step, args = factory()
        fast = parallelize(step, *args, plan=plan, device="cpu", timeout=20)
        torch.manual_seed(99)
        losses = [fast(*args[2:]).item() for _ in range(5)]
        peak = fast.peak_bytes
        held = {
            f"model.{n}": fast.whole(f"model.{n}").tolist() for n, _ in args[0].named_parameters()
        }
        fast.close()
        return [losses, peak, held]

    for outcome, peak in zip(run_ranks(size, body), predicted.peak_bytes, strict=True):
        assert outcome.status == 0, outcome.error
        assert outcome.value[0] == pytest.approx(expected[0], rel=1e-10)
        assert 0.99 * peak <= outcome.value[1] <= peak <= limit
        for name, value in outcome.value[2].items():
            found, wanted = (
                torch.tensor(v, dtype=torch.float64) for v in (value, expected[1][name])
            )
            torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)


def _states(graph: Graph, plan: Plan, size: int) -> list[list[Tensor]]:
    """Return the shards of states on each device."""
    found: list[list[Tensor]] = [[] for _ in range(size)]
    for op in on_devices(graph, plan).ops:
        if op.kind == "state":
            found[plan.placement[op.name]] += op.outputs
    return found


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
