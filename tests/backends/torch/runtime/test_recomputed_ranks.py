"""Ranks that call ops a second time train bit by bit as the user's step does, in less memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import pardnn
from pardnn.cluster import Cluster
from pardnn.graph.ir import Graph, Op, storage_owners, writes
from pardnn.place.recompute import search
from pardnn.place.recompute.placed import recomputed_plan
from pardnn.plan.check import check_plan
from pardnn.plan.file import plan_from_json, plan_to_json, stamped
from pardnn.plan.memory import peak_bytes
from pardnn.plan.plan import Plan, plan_arrays, planned_graph
from pardnn.plan.rewritten.recompute import SecondCall, graph_with_calls
from pardnn.planner.costs import costs_for
from tests.backends.torch import models
from tests.backends.torch.executors import assert_equal, captured, perceptron
from tests.backends.torch.runtime.test_microbatched_ranks import assert_trained, double
from tests.long_cases import long_but

#: Of each search: a quick one.
WORK = 5_000_000


def everything_again(graph: Graph) -> tuple[SecondCall, ...]:
    """Return calls of all that the backward pass reads of the forward pass and may be recomputed.

    What is written in place is made and written again, but for what is there before the step.
    """
    ops = [graph.ops[i] for i in graph.arrays.topological.tolist()]
    owners, home = storage_owners(ops), {t.name: op for op in ops for t in op.outputs}
    backward = False
    forward: dict[str, Op] = {}
    readers: dict[str, list[str]] = {}
    for op in ops:
        backward = backward or op.backward_of is not None
        for name in op.inputs:
            readers.setdefault(name, []).append(op.name)
        is_call = op.memory != "residual" and not op.is_source and bool(op.outputs)
        is_new = all(home[owners[name] or ""].name in forward for name in writes(op))
        if not backward and is_call and is_new:
            forward[op.name] = op
    calls: dict[str, SecondCall] = {}
    for op in reversed(list(forward.values())):
        read_by = {r: None for t in op.outputs for r in readers.get(t.name, [])}
        late = [f"{r}~2" if r in calls else r for r in read_by if r not in forward or r in calls]
        if late:
            calls[op.name] = SecondCall(op=op.name, readers=tuple(late))
    return tuple(calls.values())


def planned(graph: Graph, size: int) -> Plan:
    """Return a plan that recomputes, its ops scattered, as ranks read it from its file."""
    calls = everything_again(graph)
    algorithm = "single" if size == 1 else "round-robin"
    made = pardnn.plan(graph_with_calls(graph, calls), Cluster.uniform(size), algorithm,
                       reserve=0.0, costs="v100")  # fmt: skip
    plan = stamped(dataclasses.replace(made, recompute=calls), graph)
    check_plan(graph, plan)
    return plan_from_json(plan_to_json(plan))


CASES: list[Any] = [
    (perceptron, 2), (models.MODELS["resnet"], 1),
    *long_but((), [(perceptron, 1), (models.MODELS["gpt2"], 2)]),
]  # fmt: skip


@pytest.mark.parametrize(("factory", "size"), CASES)
def test_recomputed_steps_keep_every_bit(factory: Callable[[], Any], size: int) -> None:
    graph = captured(factory)
    plan = planned(graph, size)
    outcomes = assert_equal(factory, plan, steps=3)
    assert all(outcome.value[2] <= outcome.value[3] for outcome in outcomes)
    assert plan.predicted is not None
    assert [outcome.value[3] for outcome in outcomes] == list(plan.predicted.peak_bytes)


@pytest.mark.parametrize(
    ("name", "size"), [("gpt2", 1), *long_but((), [("resnet", 1), ("lstm", 1)])]
)
def test_chosen_second_calls_keep_every_bit_at_a_limit_that_binds(name: str, size: int) -> None:
    factory = models.MODELS[name]
    graph, cluster = captured(factory), Cluster.uniform(size)
    algorithm = "single" if size == 1 else "round-robin"
    whole = pardnn.plan(graph, cluster, algorithm, reserve=0.0, costs="v100")
    assert whole.predicted is not None
    residual = residual_bytes(graph, whole, size)
    limits = [
        least + (peak - least) * 9 // 10
        for least, peak in zip(residual, whole.predicted.peak_bytes, strict=True)
    ]
    seconds = next(iter(costs_for(graph, cluster, "v100").seconds.values()))
    chosen = recomputed_plan(graph, whole, np.tile(seconds, (size, 1)), limits, work=WORK)
    assert chosen.recompute
    rewritten = planned_graph(graph, chosen)
    peaks = peak_bytes(rewritten, plan_arrays(rewritten, chosen))
    assert all(peak <= limit for peak, limit in zip(peaks, limits, strict=True))
    plan = stamped(dataclasses.replace(chosen, predicted=None), graph)
    check_plan(graph, plan)
    outcomes = assert_equal(factory, plan_from_json(plan_to_json(plan)), steps=5)
    assert [outcome.value[3] for outcome in outcomes] == peaks
    for outcome in outcomes:
        # GPT-2 and ResNet measure 1 % less at most; the LSTM, 54,212 of 56,132 bytes.
        assert 0.95 * outcome.value[3] <= outcome.value[2] <= outcome.value[3]


def deep() -> models.Entry:
    """Return layers of which each keeps little beside what it computes with, with dropout."""
    torch.manual_seed(0)
    layers = [(nn.Linear(32, 32), nn.Tanh(), nn.Dropout(0.2)) for _ in range(4)]
    model = nn.Sequential(*(layer for each in layers for layer in each))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return models.classify_step, (model, optimizer, torch.randn(128, 32), torch.arange(128) % 32)


@pytest.mark.parametrize(
    ("algorithm", "size", "pieces"),
    [("1f1b", 2, 2), ("megatron*1f1b", 4, 2), *long_but((), [("tofu", 2, 1)])],
)
def test_cut_steps_that_call_ops_again_train_as_one_device(
    algorithm: str, size: int, pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "MOST_ROUNDS", 10)
    assert_trained(double(deep), size, pieces, algorithm, part=0.9)


def residual_bytes(graph: Graph, plan: Plan, size: int) -> list[int]:
    """Bytes of parameters and states on each device."""
    found = [0] * size
    for op in graph.ops:
        if op.memory == "residual":
            found[plan.placement[op.name]] += sum(t.bytes for t in op.outputs if not t.alias_of)
    return found
