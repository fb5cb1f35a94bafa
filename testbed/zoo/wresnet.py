"""WResNet-L-W: bottleneck ResNets (He et al., 2016) of depth L, every convolution W times as wide.

The convolutional models of Tofu (Wang, Huang, Li: Supporting Very Large Models using Automatic
Dataflow Graph Partitioning, EuroSys 2019). As in its Table 2 they come without batch norm and
without any bias, `wresnet_152_10`; `wresnet_152_10_norm` has batch norm after each convolution.

Weight, gradient and one history (SGD's momentum) take 12 bytes per parameter. Computed here against
printed there, GiB:

    L      W = 4            W = 6            W = 8            W = 10
    50     4.28 (4.2)       9.57 (9.6)      16.95 (17.1)     26.43 (26.7)
    101    7.67 (7.8)      17.19 (17.1)     30.50 (30.6)     47.60 (47.7)
    152   10.46 (10.5)     23.47 (23.4)     41.66 (41.7)     65.03 (65.1)

The printed numbers are three times a weight size rounded to 0.1 GiB, so that 4.2 stands for 4.05 to
4.35; all differ by less than 2.02 %.
"""

from functools import partial

import torch
from torch import nn

UNITS = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}


def convolution(inputs, outputs, size, stride=1, *, norm):
    """A convolution that keeps the image size at stride 1, with batch norm or with nothing."""
    conv = nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs)) if norm else conv


class Bottleneck(nn.Module):
    """1 x 1 down to a quarter of the channels, 3 x 3, 1 x 1 back up, and a way around them."""

    def __init__(self, inputs, outputs, stride, *, is_first, norm):
        super().__init__()
        middle = outputs // 4
        self.down = convolution(inputs, middle, 1, norm=norm)
        self.across = convolution(middle, middle, 3, stride, norm=norm)
        self.up = convolution(middle, outputs, 1, norm=norm)
        self.shortcut = (
            convolution(inputs, outputs, 1, stride, norm=norm) if is_first else nn.Identity()
        )

    def forward(self, x):
        """Return images of `outputs` channels, `stride` times smaller."""
        y = self.down(x).relu()
        y = self.across(y).relu()
        return (self.up(y) + self.shortcut(x)).relu()


class WResNet(nn.Module):
    """Stem, four stages of bottlenecks, mean over the image, classifier.

    Args:
        units: Bottlenecks per stage.
        stem: Channels of the stem; the stages have 4, 8, 16 and 32 times as many.
        classes: Of the classifier.
        norm: Whether batch norm follows each convolution.
    """

    def __init__(self, units, stem, classes=1000, *, norm=False):
        super().__init__()
        self.stem = convolution(3, stem, 7, 2, norm=norm)
        blocks, channels = [], stem
        for stage, count in enumerate(units):
            outputs = 4 * stem * 2**stage
            for unit in range(count):
                is_first = unit == 0
                stride = 2 if is_first and stage > 0 else 1
                blocks.append(Bottleneck(channels, outputs, stride, is_first=is_first, norm=norm))
                channels = outputs
        self.stages = nn.Sequential(*blocks)
        self.classifier = nn.Linear(channels, classes, bias=False)

    def forward(self, images):
        """Return logits [batch, classes] of images [batch, 3, height, width]."""
        x = nn.functional.max_pool2d(self.stem(images).relu(), 3, stride=2, padding=1)
        x = self.stages(x).mean(dim=(2, 3))
        return self.classifier(x)


def step(model, optimizer, images, labels):
    """One training step."""
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    return loss


def network(depth, widening, *, norm=False):
    """Return WResNet-`depth`-`widening`."""
    return WResNet(UNITS[depth], 64 * widening, norm=norm)


def training(depth, widening, batch_size=8, *, norm=False):
    """Return the step of WResNet-`depth`-`widening` on images of 224 x 224, and its arguments."""
    torch.manual_seed(0)
    model = network(depth, widening, norm=norm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    images = torch.randn(batch_size, 3, 224, 224)
    return step, (model, optimizer, images, torch.randint(1000, (batch_size,)))


def small(batch_size=4, *, norm=False):
    """All kinds of layers at 1 / 16 of the width, on images of 32 x 32."""
    torch.manual_seed(0)
    model = WResNet((1, 2, 1, 1), 4, classes=10, norm=norm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    images = torch.randn(batch_size, 3, 32, 32)
    return step, (model, optimizer, images, torch.randint(10, (batch_size,)))


small_norm = partial(small, norm=True)
wresnet_50_4 = partial(training, 50, 4)
wresnet_50_6 = partial(training, 50, 6)
wresnet_50_8 = partial(training, 50, 8)
wresnet_50_10 = partial(training, 50, 10)
wresnet_101_4 = partial(training, 101, 4)
wresnet_101_6 = partial(training, 101, 6)
wresnet_101_8 = partial(training, 101, 8)
wresnet_101_10 = partial(training, 101, 10)
wresnet_152_4 = partial(training, 152, 4)
wresnet_152_6 = partial(training, 152, 6)
wresnet_152_8 = partial(training, 152, 8)
wresnet_152_10 = partial(training, 152, 10)
wresnet_50_4_norm = partial(training, 50, 4, norm=True)
wresnet_50_6_norm = partial(training, 50, 6, norm=True)
wresnet_50_8_norm = partial(training, 50, 8, norm=True)
wresnet_50_10_norm = partial(training, 50, 10, norm=True)
wresnet_101_4_norm = partial(training, 101, 4, norm=True)
wresnet_101_6_norm = partial(training, 101, 6, norm=True)
wresnet_101_8_norm = partial(training, 101, 8, norm=True)
wresnet_101_10_norm = partial(training, 101, 10, norm=True)
wresnet_152_4_norm = partial(training, 152, 4, norm=True)
wresnet_152_6_norm = partial(training, 152, 6, norm=True)
wresnet_152_8_norm = partial(training, 152, 8, norm=True)
wresnet_152_10_norm = partial(training, 152, 10, norm=True)
