"""`torch.cond` on data: losses, gradients and zeros are those of eager, whichever way is taken."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pardnn.backends.torch.capture.capture import capture
from pardnn.errors import UnsupportedError
from tests.backends.torch.stepping import Entry, assert_as_eager
from tests.long_cases import long_but


class Ways(nn.Module):
    """Two layers, of which data chooses one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(5, 4), nn.Linear(5, 4), nn.Linear(4, 3)

    def forward(self, x):
        def other(x):
            return (self.b(x) * 2).tanh()

        return self.c(torch.cond(x.sum() > 0, lambda x: self.a(x).relu(), other, (x,)))


class Root(Ways):
    """The way that is not taken has derivatives that are NaN."""

    def forward(self, x):
        found = self.a(x)
        return self.c(torch.cond(found.min() > 0, lambda y: y.sqrt(), lambda y: y * 1.5, (found,)))


class Nested(Ways):
    """One of the ways chooses again, and both give two results."""

    def forward(self, x):
        def one(x, y):
            inner = torch.cond(y.sum() > 1, lambda y: y.sin(), lambda y: y * y, (y,))
            return inner, x.sum()

        def other(x, y):
            return y.cos(), x.mean()

        found, scale = torch.cond(x.mean() > 0, one, other, (x, self.b(x)))
        return self.c(found) * scale


def made(kind: type[Ways]) -> Entry:
    torch.manual_seed(0)
    model = kind()

    def step(model, optimizer, x, y):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)  # a zero is not nothing to it
    return step, (model, optimizer, torch.randn(4, 5), torch.randn(4, 3))


def batch(i: int) -> dict[int, Any]:
    torch.manual_seed(i)
    return {2: torch.randn(4, 5).abs() * (1 if i % 3 else -1)}


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of torch's own, in eager code
@pytest.mark.parametrize("kind", long_but({"Nested"}, [Ways, Root, Nested]))
def test_each_way_is_as_eager(kind: type[Ways]) -> None:
    assert_as_eager(lambda: made(kind), batch, steps=6, sizes=(1, 2))


def test_the_way_not_taken_gets_zeros() -> None:
    """Eager code gives a parameter that only that way uses a gradient of zeros, and not None."""
    step, args = made(Ways)
    step(*args[:2], batch(1)[2], args[3])
    assert not args[0].b.weight.grad.any()
    assert args[0].a.weight.grad.any()


def _wide(x):
    return x[:2]


def _written(x):
    return x.add_(1)


def _added(x):
    x += 1
    return x


@pytest.mark.parametrize("way", [_wide, _written, _added, F.dropout])
def test_what_only_one_way_may_do_is_refused(way: Any) -> None:
    class Other(Ways):
        def forward(self, x):
            return self.c(torch.cond(x.sum() > 0, way, lambda x: x * 2, (self.a(x),)))

    step, args = made(Other)
    with pytest.raises(UnsupportedError, match=r"both functions of torch\.cond") as caught:
        capture(step, *args)
    assert caught.value.code == "E801"
    assert "test_cond.py:" in caught.value.details["source"]
