"""WRN-L-k: wide residual networks (Zagoruyko and Komodakis, 2016) on CIFAR-100.

The third model of ParDNN's Table 5.1: WRN-610-14 and WRN-304-28. A network of L layers has three
groups of (L - 4) / 6 units with 16 k, 32 k and 64 k channels; a unit is twice batch norm, ReLU and
a 3 x 3 convolution, and the way around them. SGD with Nesterov momentum 0.9 and weight decay
0.0005, as in that paper.

Parameters, billions, here against the thesis's: WRN-610-14 1.912 (1.91), WRN-304-28 3.776 (3.77).
"""

from functools import partial

import torch
from torch import nn

CLASSES = 100


class Unit(nn.Module):
    """Two convolutions after batch norm and ReLU; a 1 x 1 convolution where the shape changes."""

    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.norm1 = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.shortcut = (
            nn.Conv2d(inputs, outputs, 1, stride, bias=False) if inputs != outputs else None
        )

    def forward(self, x):
        """Return images of `outputs` channels, `stride` times smaller."""
        active = self.norm1(x).relu()
        y = self.conv2(self.norm2(self.conv1(active)).relu())
        return y + (x if self.shortcut is None else self.shortcut(active))


class WRN(nn.Module):
    """First convolution, three groups of units, batch norm, mean over the image, classifier."""

    def __init__(self, units, widening, classes=CLASSES, base=16):
        super().__init__()
        self.first = nn.Conv2d(3, base, 3, padding=1, bias=False)
        blocks, channels = [], base
        for group in range(3):
            outputs = base * 2**group * widening
            for unit in range(units):
                blocks.append(Unit(channels, outputs, 2 if unit == 0 and group > 0 else 1))
                channels = outputs
        self.groups = nn.Sequential(*blocks)
        self.norm = nn.BatchNorm2d(channels)
        self.classifier = nn.Linear(channels, classes)

    def forward(self, images):
        """Return logits [batch, classes] of images [batch, 3, height, width]."""
        x = self.norm(self.groups(self.first(images))).relu()
        return self.classifier(x.mean(dim=(2, 3)))


def step(model, optimizer, images, labels):
    """One training step."""
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    return loss


def _optimizer(model, rate):
    return torch.optim.SGD(
        model.parameters(), lr=rate, momentum=0.9, nesterov=True, weight_decay=5e-4
    )


def network(layers, widening):
    """Return WRN-`layers`-`widening`."""
    return WRN((layers - 4) // 6, widening)


def training(layers, widening, batch_size=1):
    """Return the step of WRN-`layers`-`widening` on images of 32 x 32, and its arguments."""
    torch.manual_seed(0)
    model = network(layers, widening)
    images = torch.randn(batch_size, 3, 32, 32)
    labels = torch.randint(CLASSES, (batch_size,))
    return step, (model, _optimizer(model, 0.1), images, labels)


def small(batch_size=4):
    """WRN-10-2 with 4 base channels, on images of 16 x 16."""
    torch.manual_seed(0)
    model = WRN(1, 2, classes=10, base=4)
    images = torch.randn(batch_size, 3, 16, 16)
    return step, (model, _optimizer(model, 0.05), images, torch.randint(10, (batch_size,)))


wrn_610_14 = partial(training, 610, 14)
wrn_304_28 = partial(training, 304, 28)
