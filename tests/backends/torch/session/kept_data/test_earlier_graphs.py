"""Tensors that a step keeps with the graph that made them: `self.h = h`, `self.total += loss`."""

from typing import Any

import pytest
import torch
from torch import nn

from pardnn.backends.torch.capture.capture import capture
from pardnn.errors import UnsupportedError
from tests.backends.torch.stepping import assert_leaves_as_eager


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cell = nn.RNNCell(4, 4).double()
        self.optimizer = torch.optim.SGD(self.cell.parameters(), lr=0.1)
        self.hidden: Any = torch.zeros(3, 4, dtype=torch.float64)
        self.total: Any = torch.zeros((), dtype=torch.float64)


def trained(model: Recurrent, x: torch.Tensor, hidden: Any, **keywords: Any) -> Any:
    hidden = model.cell(x, hidden)
    loss = hidden.square().mean()
    model.optimizer.zero_grad()
    loss.backward(**keywords)
    model.optimizer.step()
    return hidden, loss


def rows() -> torch.Tensor:
    return torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(3, 4)


@pytest.mark.parametrize("keywords", [{}, {"retain_graph": True}])
def test_a_backward_pass_into_the_step_before_is_refused(keywords: dict[str, Any]) -> None:
    model = Recurrent()

    def step(x: torch.Tensor) -> Any:
        model.hidden, loss = trained(model, x, model.hidden, **keywords)
        return loss

    told = r"test_earlier_graphs.py:\d+\) goes on through 'model.hidden'"
    with pytest.raises(UnsupportedError, match=told) as caught:
        capture(step, rows())
    assert caught.value.code == "E807"
    assert torch.equal(model.hidden, torch.zeros(3, 4, dtype=torch.float64))


def in_place(model: Recurrent, x: torch.Tensor) -> Any:
    hidden, loss = trained(model, x, model.hidden.detach())
    model.total += loss
    model.hidden = hidden
    return loss


def anew(model: Recurrent, x: torch.Tensor) -> Any:
    hidden, loss = trained(model, x, model.hidden.detach())
    model.hidden, model.total = hidden, model.total + loss
    return loss


@pytest.mark.parametrize("body", [in_place, anew])
def test_what_is_kept_for_its_numbers_is_followed(body: Any) -> None:
    def made() -> Any:
        model = Recurrent()
        held = lambda: [model.cell, model.hidden.detach(), model.total.detach()]  # noqa: E731
        return body, (model, rows()), held

    assert assert_leaves_as_eager(made) == 1
