"""Pieces of the batch in rows, and an owner of each state: what `auto` finds on many devices."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

import pardnn
from pardnn import backends
from pardnn.cluster import Cluster
from pardnn.graph.ir import Graph
from pardnn.plan.check import plan_problems
from pardnn.plan.pieces import piece_number
from pardnn.plan.plan import Plan

WIDTH, LAYERS, DEVICES = 256, 4, 8


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Any, y: Any) -> Any:
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    return loss


def entry() -> tuple[Any, tuple[Any, ...]]:
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    x = torch.randn(64 * DEVICES, WIDTH)
    return step, (model, optimizer, x, torch.randn_like(x))


@functools.cache
def graph() -> Graph:
    return backends.capture_factory(entry)


def cluster(memory: int | None = None) -> Cluster:
    return Cluster.uniform(DEVICES, bandwidth=100e9, latency=5e-6, memory=memory)


@functools.cache
def planned(algorithm: str, pieces: Any, memory: int | None = None) -> Plan:
    return pardnn.plan(
        graph(), cluster(memory), algorithm, reserve=0.0, costs="h100", microbatches=pieces
    )


def seconds(plan: Plan) -> float:
    assert plan.predicted is not None
    return plan.predicted.makespan_s


def test_each_device_has_a_piece_and_updates_what_it_owns() -> None:
    plan = planned("owners", DEVICES)
    assert plan_problems(graph(), plan) == []
    of_pieces = [op for op in plan.pieces.ops if piece_number(op.name) >= 0]  # type: ignore[union-attr]
    apart = [op for op in of_pieces if op.kind == "aten.tanh.default"]
    assert {plan.placement[op.name] for op in apart} == set(range(DEVICES))
    assert all(plan.placement[op.name] == piece_number(op.name) for op in apart)
    updates = [op for op in graph().ops if op.kind == "aten._fused_adamw_.default"]
    owners = [plan.placement[op.name] for op in updates]
    assert len(updates) == 2 * LAYERS
    assert sorted(owners) == list(range(DEVICES))


def test_auto_finds_it_where_a_cut_makes_every_device_update_all() -> None:
    """Launches count: each of the cuts makes every device launch every update."""
    best, cut = planned("auto", "auto"), min(seconds(planned(n, None)) for n in ("tofu", "zero-3"))
    assert seconds(best) <= seconds(planned("owners", DEVICES))
    assert 1.2 * seconds(best) < cut


def test_tight_memory_does_not_make_devices_wait_for_pieces_of_others() -> None:
    """Stated one piece after the other, a device would add up what others make before its own."""
    free = planned("owners", DEVICES)
    assert free.predicted is not None
    limit = max(free.predicted.peak_bytes) * 7 // 10
    tight = planned("owners", DEVICES, limit)
    assert tight.predicted is not None
    assert max(tight.predicted.peak_bytes) <= limit
    assert seconds(tight) < 1.5 * seconds(free)


def test_two_pieces_per_device_are_added_up_where_they_are_made() -> None:
    plan = planned("owners", 2 * DEVICES)
    assert plan_problems(graph(), plan) == []
    ops = {op.name for op in plan.pieces.ops}  # type: ignore[union-attr]
    gathered = [name for name in ops if ":gather@" in name]
    assert gathered
    assert len(gathered) % (DEVICES - 1) == 0
    assert plan.placement["addmm@0"] == plan.placement["addmm@1"] != plan.placement["addmm@2"]


def test_the_same_bytes_of_plan_each_time() -> None:
    again = pardnn.plan(
        graph(), cluster(), "owners", reserve=0.0, costs="h100", microbatches=DEVICES
    )
    assert again == planned("owners", DEVICES)
