"""Steps of users that once were refused, captured wrongly, or ended in a traceback."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pardnn.backends.torch.capture import tracer
from pardnn.backends.torch.capture.capture import capture
from pardnn.errors import UnsupportedError
from tests.backends.torch.capture.test_capture_equal import assert_equal
from tests.backends.torch.models import classify_step, small

ADAM = functools.partial(torch.optim.Adam, lr=0.01)


class Last(nn.Module):
    """A recurrent layer, of which the last output is classified."""

    def __init__(self, layer: nn.Module, width: int) -> None:
        super().__init__()
        self.layer, self.out = layer, nn.Linear(width, 3)

    def forward(self, x):
        return self.out(self.layer(x)[0][:, -1])


@pytest.mark.parametrize(
    ("make", "width"),
    [
        (lambda: nn.GRU(6, 4, num_layers=2, dropout=0.2, batch_first=True), 4),
        (lambda: nn.RNN(6, 4, bidirectional=True, batch_first=True), 8),
    ],
)
def test_recurrent_layers_transpose_in_place(make, width):
    def factory():
        torch.manual_seed(0)
        model = Last(make(), width)
        x, y = torch.randn(5, 3, 6), torch.randint(3, (5,))
        return classify_step, (model, ADAM(model.parameters()), x, y)

    assert_equal(factory)


class Pooled(nn.Module):
    """Hands its layer norm a gradient that is laid out in another way than its input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(6), nn.Linear(6, 3)

    def forward(self, x):
        return self.out(F.adaptive_avg_pool1d(self.norm(x).transpose(1, 2), 1).flatten(1))


def test_the_gradient_of_a_layer_norm_is_laid_out_as_its_input():
    def factory():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 6), Pooled())
        x, y = torch.randn(5, 4, 6), torch.randint(3, (5,))
        return classify_step, (model, ADAM(model.parameters()), x, y)

    assert_equal(factory)


def test_a_gradient_that_nobody_wants_is_none():
    def factory():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
        model[1].eval()
        model[0].requires_grad_(False)
        trained = [p for p in model.parameters() if p.requires_grad]
        x, y = torch.randn(5, 6), torch.randint(3, (5,))
        return classify_step, (model, ADAM(trained), x, y)

    graph = assert_equal(factory)
    (backward,) = [op for op in graph.ops if "batch_norm_backward" in op.kind]
    assert len(backward.outputs) == 2


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_scripted_modules_are_refused_by_name():
    _, (model, optimizer, x, y) = small(ADAM)
    traced = torch.jit.trace(model, x)
    with pytest.raises(UnsupportedError, match="'model' is made by torch.jit"):
        capture(classify_step, traced, optimizer, x, y)


def test_our_own_bugs_are_not_blamed_on_the_step(monkeypatch):
    monkeypatch.setattr(tracer, "written_names", None)
    with pytest.raises(TypeError, match="not callable"):
        capture(classify_step, *small(ADAM)[1])
