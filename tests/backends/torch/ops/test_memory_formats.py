"""Group norm of a batch of one sample, whose strides say nothing of its memory format."""

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pardnn.backends.torch.ops.codec import find_call
from pardnn.backends.torch.ops.memory_formats import BACKWARD, in_format, in_format_of
from tests.backends.torch.beside_eager import assert_equal
from tests.backends.torch.models import Entry


@pytest.mark.parametrize(
    ("strides", "found"),
    [
        ((32, 1, 256, 32), (2048, 1, 256, 32)),
        ((7, 64, 8, 1), (2048, 64, 8, 1)),
        ((2048, 1, 32, 256), (2048, 1, 32, 256)),
    ],
)
def test_a_view_has_the_strides_of_its_format(
    strides: tuple[int, ...], found: tuple[int, ...]
) -> None:
    value = torch.arange(2048.0).as_strided((1, 32, 8, 8), strides)
    view = in_format(value)
    assert view.stride() == found
    assert torch.equal(view, value)
    assert view.data_ptr() == value.data_ptr()


def test_a_gradient_in_another_format_is_that_of_the_input() -> None:
    x = torch.randn(1, 8, 4, 4).to(memory_format=torch.channels_last)
    x = x.as_strided(x.shape, (8, 1, 32, 8))
    grad, mean, rstd, weight = torch.randn(1, 8, 4, 4), torch.zeros(1, 2), torch.ones(1, 2), None
    rest = mean, rstd, weight, 1, 8, 16, 2, [True, False, False]
    backward = find_call(BACKWARD)
    expected = backward(grad, x.contiguous(), *rest)[0]
    found = backward(in_format_of(grad, x), in_format(x), *rest)[0]
    torch.testing.assert_close(found, expected)


class Normed(nn.Module):
    """Channels come last out of a linear layer, as attention has them in a U-Net."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.norm = nn.Linear(8, 8), nn.GroupNorm(2, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = self.mix(x.flatten(2).transpose(1, 2)).transpose(1, 2).reshape(x.shape)
        return self.norm(mixed + x).tanh()


def made(samples: int) -> Entry:
    torch.manual_seed(0)
    model = Normed()

    def step(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return step, (model, optimizer, torch.randn(samples, 8, 4, 4), torch.randn(samples, 8, 4, 4))


def test_the_samples_of_a_batch_of_two_are_normalised_apart() -> None:
    assert_equal(functools.partial(made, 2))
