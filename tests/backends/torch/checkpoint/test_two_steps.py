"""Two steps on one state save what each reaches, and go on from both on other ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce

import pardnn
from pardnn.backends.torch.parallelize import parallelize
from tests.backends.torch.checkpoint.training import values
from tests.backends.torch.executors import bits
from tests.backends.torch.ranks import connect, run_ranks
from tests.long_cases import long_but


def critic_step(critic: Any, generator: Any, optimizer: Any, real: Any, noise: Any) -> Any:
    optimizer.zero_grad()
    found = critic(torch.cat([real, generator(noise).detach()]))
    loss = bce(found, torch.cat([torch.ones(len(real), 1), torch.zeros(len(noise), 1)]))
    loss.backward()
    optimizer.step()
    return loss


def generator_step(critic: Any, generator: Any, optimizer: Any, noise: Any) -> Any:
    optimizer.zero_grad()
    loss = bce(critic(generator(noise)), torch.ones(len(noise), 1))
    loss.backward()
    optimizer.step()
    return loss


def decide(graph: Any, size: int, state: Any) -> Any:
    cluster = pardnn.Cluster.uniform(size)
    return pardnn.plan(graph, cluster, "round-robin", costs="v100", state=state)


def rounds(steps: Any, numbers: range) -> list[str]:
    """Train both by turns; each round has a batch of its own."""
    losses = []
    for number in numbers:
        own = torch.Generator().manual_seed(number)
        real, noise = torch.randn(6, 4, generator=own), torch.randn(6, 2, generator=own)
        losses += [bits(steps[0](real, noise)), bits(steps[1](noise))]
    return losses


def built(seed: int) -> Any:
    """Return the models, an optimizer of each, and both steps on one device."""
    torch.manual_seed(seed)
    critic = nn.Sequential(nn.Linear(4, 8), nn.LeakyReLU(0.2), nn.Dropout(0.3), nn.Linear(8, 1))
    generator = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
    both = critic, generator
    optimizers = [torch.optim.Adam(model.parameters(), lr=1e-2) for model in both]
    eager = (
        lambda *batch: critic_step(*both, optimizers[0], *batch),
        lambda *batch: generator_step(*both, optimizers[1], *batch),
    )
    return both, optimizers, eager


def on_ranks(size: int, body: Any, seed: int) -> list[Any]:
    def run(rank: int, store: str) -> Any:
        connect(rank, size, store, 40).close()
        both, optimizers, _ = built(seed)
        batches = (torch.zeros(6, 4), torch.zeros(6, 2)), (torch.zeros(6, 2),)
        steps = [
            parallelize(step, *both, optimizer, *batch, decide=decide, device="cpu", timeout=40)
            for step, optimizer, batch in zip(
                (critic_step, generator_step), optimizers, batches, strict=True
            )
        ]
        try:
            return body(steps)
        finally:
            for step in steps:
                step.close()

    return values(run_ranks(size, run, limit_s=120))


@pytest.mark.long
@pytest.mark.parametrize(("before", "after"), [(2, 3), *long_but((), [(3, 1)])])
def test_both_go_on_with_every_bit(before: int, after: int, tmp_path: Path) -> None:
    names = "critic", "generator"

    def first(steps: Any) -> list[str]:
        losses = rounds(steps, range(2))
        for name, step in zip(names, steps, strict=True):
            step.save(tmp_path / name, wait=name == "critic")
        return losses

    def second(steps: Any) -> list[str]:
        for name, step in zip(names, steps, strict=True):
            step.load(tmp_path / name)
        return [*rounds(steps, range(2, 4)), str([step.steps for step in steps])]

    (expected,) = values(run_ranks(1, lambda *_: rounds(built(0)[2], range(4))))
    assert all(found == expected[:4] for found in on_ranks(before, first, seed=0))
    for found in on_ranks(after, second, seed=1):
        assert found == [*expected[4:], "[4, 4]"]
