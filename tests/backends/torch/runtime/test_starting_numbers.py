"""States that start from a setting: it may change after the first step, and not before it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import pardnn
from pardnn.backends.torch.parallelize import Parallel
from pardnn.errors import MismatchError


class Scaled(torch.optim.Optimizer):
    """Fills a state with the learning rate of the first step."""

    def __init__(self, params, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if "scale" not in state:
                    state["scale"] = torch.full_like(p, group["lr"])
                p.sub_(state["scale"] * p.grad)


def step(model, optimizer, x):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss


def started(kind) -> tuple[Parallel, torch.optim.Optimizer, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer, x = kind(model.parameters(), lr=0.1), torch.randn(4, 3)
    return pardnn.parallelize(step, model, optimizer, x, costs="v100"), optimizer, x


@pytest.mark.parametrize("kind", [Scaled, torch.optim.Rprop])
def test_a_setting_that_a_state_starts_from_is_refused_before_the_first_step(kind) -> None:
    fast, optimizer, x = started(kind)
    optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(MismatchError, match=r"was 0\.1 when .* and is 0\.5 at") as error:
        fast(x)
    assert error.value.code == "E528"


def test_it_may_change_after_the_first_step_and_where_no_state_starts_from_it() -> None:
    fast, optimizer, x = started(Scaled)
    fast(x)
    optimizer.param_groups[0]["lr"] = 0.5
    fast(x)
    fast, optimizer, x = started(torch.optim.SGD)
    optimizer.param_groups[0]["lr"] = 0.5
    fast(x)


def test_a_call_with_the_model_and_the_optimizer_is_told_what_to_pass() -> None:
    fast, optimizer, x = started(torch.optim.SGD)
    with pytest.raises(MismatchError, match=r"takes 1 argument besides .*; 3 were given") as error:
        fast(nn.Linear(3, 2), optimizer, x)
    assert error.value.code == "E505"
    assert "without the models" in error.value.message
    fast(x)
