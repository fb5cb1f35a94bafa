"""Steps whose last layer tells many classes apart: most of its work is the update of its weight.

Placed on two devices, the body begins the next step while the head is updated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from testbed.small_models import classify_step

Entry = tuple[Callable[..., Any], tuple[Any, ...]]


class Pooled(nn.Module):
    """A body, the mean of what it makes of a sequence, and a linear layer.

    Args:
        body: Any module; of a tuple the first element counts.
        width: Its features.
        classes: Of the last layer.
    """

    def __init__(self, body: nn.Module, width: int, classes: int) -> None:
        super().__init__()
        self.body, self.head = body, nn.Linear(width, classes)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return a row of scores per sample."""
        hidden = self.body(inputs)
        hidden = hidden[0] if isinstance(hidden, tuple) else hidden
        return self.head(hidden.mean(1) if hidden.dim() == 3 else hidden)


def _entry(body: nn.Module, width: int, classes: int, inputs: torch.Tensor) -> Entry:
    model = Pooled(body, width, classes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return classify_step, (model, optimizer, inputs, torch.randint(classes, (len(inputs),)))


def faces() -> Entry:
    """Five convolutions, 16 images of 48 x 48, 200,000 people."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for inputs, outputs, stride in (
        (3, 64, 2), (64, 96, 1), (96, 96, 1), (96, 128, 2), (128, 128, 1)
    ):  # fmt: skip
        layers += [nn.Conv2d(inputs, outputs, 3, stride, 1), nn.GroupNorm(8, outputs), nn.ReLU()]
    body = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return _entry(body, 128, 200_000, torch.randn(16, 3, 48, 48))


def sentences(num_layers: int = 3) -> Entry:
    """A transformer of width 192, 16 sequences of 64, 150,000 labels."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(
        192, 4, 768, dropout=0.0, batch_first=True, norm_first=True
    )  # fmt: skip
    body = nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False)
    return _entry(body, 192, 150_000, torch.randn(16, 64, 192))


def speech(num_layers: int = 2) -> Entry:
    """Recurrent layers of 256 units, 16 sequences of 40, 100,000 words."""
    torch.manual_seed(0)
    body = nn.GRU(80, 256, num_layers=num_layers, batch_first=True)
    return _entry(body, 256, 100_000, torch.randn(16, 40, 80))
