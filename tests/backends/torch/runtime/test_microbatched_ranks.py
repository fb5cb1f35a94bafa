"""Ranks that run a step in pieces of its batch train as one device does, and hold no more."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import pardnn
from pardnn.backends.torch.capture.result import loss_of
from pardnn.backends.torch.parallelize import parallelize
from pardnn.cluster import Cluster
from pardnn.graph.ir import Graph
from pardnn.plan.file import plan_from_json, plan_to_json
from pardnn.plan.plan import Plan
from tests.backends.torch import models
from tests.backends.torch.executors import captured, perceptron
from tests.backends.torch.ranks import connect, run_ranks
from tests.backends.torch.runtime.test_executor_sharded import one_device
from tests.long_cases import long_but

STEPS = 5


def double(factory: Callable[[], models.Entry]) -> Callable[[], models.Entry]:
    @functools.wraps(factory)
    def made() -> models.Entry:
        step, args = factory()
        for arg in args:
            if isinstance(arg, torch.nn.Module):
                arg.double()
        return step, tuple(
            x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in args
        )

    return made


def planned(graph: Graph, size: int, pieces: int, algorithm: str, part: float = 1.0) -> Plan:
    """Return a plan as ranks read it from its file; round-robin scatters the pieces.

    With second calls, if its limit is to be a part of what it needs without.
    """
    plan = pardnn.plan(graph, Cluster.uniform(size), algorithm, reserve=0.0, costs="v100",
                       microbatches=pieces)  # fmt: skip
    assert plan.predicted is not None
    if part < 1.0:
        less = Cluster.uniform(size, memory=int(part * max(plan.predicted.peak_bytes)))
        plan = pardnn.plan(graph, less, algorithm, reserve=0.0, costs="v100", microbatches=pieces,
                           recompute=True)  # fmt: skip
        assert plan.recompute
    return plan_from_json(plan_to_json(plan))


def trained(
    factory: Callable[[], models.Entry], size: int, pieces: int, algorithm: str, part: float
) -> list[Any]:
    """Losses, whole parameters, generator, and peaks of each rank."""
    plan = planned(captured(factory), size, pieces, algorithm, part)

    def body(rank: int, store: str) -> list[Any]:
        connect(rank, size, store, 20.0)
        step, args = factory()
        fast = parallelize(step, *args, plan=plan, device="cpu", timeout=20)
        batch = [args[k] for k in fast._binding._batch]
        torch.manual_seed(99)
        losses = [loss_of(fast(*batch)).item() for _ in range(STEPS)]
        random, peak = int(torch.get_rng_state().sum()), fast.peak_bytes
        fast.sync_model()
        whole = args[0].named_parameters() if rank == 0 else ()
        held = {f"model.{k}": v.tolist() for k, v in whole}
        fast.close()
        return [losses, held, random, peak]

    outcomes = run_ranks(size, body)
    for outcome in outcomes:
        assert outcome.status == 0, outcome.error
    assert plan.predicted is not None
    for outcome, peak in zip(outcomes, plan.predicted.peak_bytes, strict=True):
        # What random ops draw for all devices is counted as workspace, which is not measured.
        assert (0.0 if part == 1.0 else 0.9 * peak) <= outcome.value[3] <= peak
    return [outcome.value for outcome in outcomes]


def assert_trained(
    factory: Callable[[], models.Entry], size: int, pieces: int, algorithm: str, part: float = 1.0
) -> None:
    expected, tolerance = one_device(factory), 1e-10
    found = trained(factory, size, pieces, algorithm, part)
    for losses, _, random, _ in found:
        assert losses == pytest.approx(expected[0], rel=tolerance, abs=tolerance)
        assert random == expected[2]
    for name, value in found[0][1].items():
        torch.testing.assert_close(
            torch.tensor(value, dtype=torch.float64),
            torch.tensor(expected[1][name], dtype=torch.float64), rtol=tolerance, atol=tolerance,
        )  # fmt: skip


def encoder() -> models.Entry:
    """Return a step of attention that puts the sequence first: rows of a sample are no box."""
    torch.manual_seed(1)
    layer = torch.nn.TransformerEncoderLayer(6, 2, 8, dropout=0.3, batch_first=True)
    model = torch.nn.Sequential(layer, torch.nn.Linear(6, 5))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)

    def step(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return step, (model, optimizer, torch.randn(5, 4, 6), torch.randn(5, 4, 5))


CASES: list[Any] = [
    (double(encoder), 2, 3, "round-robin"),
    (double(perceptron), 2, 3, "modulo"),
    *long_but(
        (),
        [
            (double(perceptron), 2, 3, "round-robin"),
            (double(models.gan), 2, 2, "round-robin"),
            (double(models.MODELS["gpt2"]), 2, 3, "modulo"),
        ],
    ),
]


@pytest.mark.parametrize(("factory", "size", "pieces", "algorithm"), CASES)
def test_pieces_train_as_one_device(
    factory: Callable[[], models.Entry], size: int, pieces: int, algorithm: str
) -> None:
    assert_trained(factory, size, pieces, algorithm)
