"""Muon cut over ranks is off by what its iterations in bfloat16 lose, and by no more."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import _muon

from tests.backends.torch.stepping import Entry, cut_plan, eager, on_ranks


def train(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    return loss


def entry() -> Entry:
    torch.manual_seed(0)
    layers = nn.Linear(16, 32, bias=False), nn.Tanh(), nn.Linear(32, 8, bias=False)
    model = nn.Sequential(*layers).double()
    x, y = torch.randn(4, 16).double(), torch.randn(4, 8).double()
    return train, (model, torch.optim.Muon(model.parameters(), lr=0.05), x, y)


def in_full_precision(grad: torch.Tensor, ns: Any, steps: int, eps: float) -> torch.Tensor:
    """Iterate as `_zeropower_via_newtonschulz` does, in the gradient's own type."""
    a, b, c = ns
    is_tall = grad.size(0) > grad.size(1)
    x = grad.T if is_tall else grad
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


@pytest.mark.parametrize(("is_full", "most"), [(True, 1e-14), (False, 1e-2)])
def test_a_cut_muon_is_off_by_its_bfloat16_alone(
    is_full: bool, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_full:
        monkeypatch.setattr(_muon, "_zeropower_via_newtonschulz", in_full_precision)
    expected = [float.fromhex(loss) for loss, *_ in eager(entry, steps=4)]
    for found in on_ranks(entry, 2, steps=4, plan_of=cut_plan):
        assert [float.fromhex(loss) for loss, *_ in found] == pytest.approx(expected, rel=most)
