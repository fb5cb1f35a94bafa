"""`parallelize` starts from a plan and meets constraints, as `plan` does."""

import itertools
from typing import Any

import pytest
import torch
from torch import nn

import pardnn
from pardnn.errors import UsageError
from tests.backends.torch.ranks import connect, run_ranks


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss


def made(*widths: int) -> tuple[nn.Module, torch.optim.Optimizer, torch.Tensor]:
    torch.manual_seed(0)
    pairs = itertools.pairwise(widths)
    model = nn.Sequential(*(nn.Linear(*pair) for pair in pairs))
    return model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(4, widths[0])


def test_the_first_plan_is_made_from_another_under_constraints() -> None:
    """The model has one layer more than it had; two ranks train as one device does."""
    before = pardnn.capture(step, *made(6, 8))
    old = pardnn.plan(before, pardnn.Cluster.uniform(2), "round-robin", costs="v100")
    alone, optimizer, x = made(6, 8, 4)
    expected = [step(alone, optimizer, x).item() for _ in range(3)]

    def body(rank: int, store: str) -> Any:
        connect(rank, 2, store, 20)
        model, optimizer, x = made(6, 8, 4)
        cluster = pardnn.Cluster.uniform(2, named="cpu")
        given = {
            "cluster": cluster,
            "costs": "v100",
            "constraints": [pardnn.pin("layer:model.1", 1)],
        }
        fast = pardnn.parallelize(step, model, optimizer, x, start=old, **given)
        losses = [fast(x).item() for _ in range(3)]
        plan, weight = fast.plan, "model.1.weight"
        fast.close()
        return losses, plan.notes, plan.placement[weight], plan.constraints is not None

    for outcome in run_ranks(2, body):
        assert outcome.status == 0, outcome.error
        losses, notes, place, is_recorded = outcome.value
        assert losses == expected
        assert any(note.startswith("started from a plan") for note in notes)
        assert (place, is_recorded) == (1, True)


def test_a_plan_and_one_to_start_from_are_one_too_many() -> None:
    args = made(6, 8)
    plan = pardnn.plan(pardnn.capture(step, *args), pardnn.Cluster.uniform(1), costs="v100")
    with pytest.raises(UsageError, match="leave one out") as error:
        pardnn.parallelize(step, *args, plan=plan, start=plan)
    assert error.value.code == "E206"
