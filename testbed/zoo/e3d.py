"""E3D: the eidetic 3D LSTM for video prediction (Wang et al., 2019).

The fifth model of ParDNN's Table 5.1: four layers of 320 channels on patches of 4 x 4 (E3D), of 512
channels on patches of 8 x 8 (E3D-2), filters of 2 x 5 x 5 over windows of two frames. Ten frames of
Moving MNIST, 64 x 64, are read and the next ten predicted. A cell has, beside an LSTM's state, a
memory that goes up through the layers and attention to all of its own earlier states. Layer norm is
over all but the batch, with a scale and shift per channel; Adam, squared plus absolute error.

Parameters, billions: 0.315 and 0.813. The thesis's 0.95 and 2.4 are three times as many, which is
what TensorFlow's variables hold once Adam's two moments stand beside each weight (here 0.945
and 2.440); four layers, the number in the model's paper, cannot have 0.95 billion weights of these
shapes.
"""

from functools import partial

import torch
from torch import nn

READ, TOTAL, SIZE = 10, 20, 64
WINDOW = 2


class Convolution(nn.Module):
    """A 3D convolution that keeps the shape: a last frame of zeros is added to the window."""

    def __init__(self, inputs, outputs, size):
        super().__init__()
        padding = (0, size // 2, size // 2)
        self.conv = nn.Conv3d(inputs, outputs, (WINDOW, size, size), padding=padding)

    def forward(self, x):
        """Return [batch, outputs, window, height, width]."""
        return self.conv(nn.functional.pad(x, (0, 0, 0, 0, 0, WINDOW - 1)))


def normed(inputs, outputs, size):
    """Return a convolution with layer norm."""
    return nn.Sequential(Convolution(inputs, outputs, size), nn.GroupNorm(1, outputs))


def attend(query, history):
    """Return, per place, the mean of earlier states weighted by likeness to the query.

    Args:
        query: [batch, channels, window, height, width].
        history: States one after the other, [batch, channels, window * states, height, width].
    """
    q, k = query.flatten(2).transpose(1, 2), history.flatten(2)
    weights = (q @ k).softmax(dim=-1)
    return (weights @ k.transpose(1, 2)).transpose(1, 2).unflatten(2, query.shape[2:])


class Cell(nn.Module):
    """One layer, one step at a time."""

    def __init__(self, inputs, channels, size):
        super().__init__()
        self.of_input = normed(inputs, 7 * channels, size)
        self.of_hidden = normed(channels, 4 * channels, size)
        self.of_memory = normed(channels, 4 * channels, size)
        self.norm = nn.GroupNorm(1, channels)
        self.output_cell = Convolution(channels, channels, size)
        self.output_memory = Convolution(channels, channels, size)
        self.mix = nn.Conv3d(2 * channels, channels, 1)

    def forward(self, x, hidden, cell, memory, history):
        """Return the new hidden state, cell state and memory, each like `cell`."""
        i_x, g_x, r_x, o_x, mi_x, mg_x, mf_x = self.of_input(x).chunk(7, dim=1)
        i_h, g_h, r_h, o_h = self.of_hidden(hidden).chunk(4, dim=1)
        i_m, g_m, f_m, m_m = self.of_memory(memory).chunk(4, dim=1)
        recalled = attend((r_x + r_h).sigmoid(), history)
        cell = self.norm(cell + recalled) + (i_x + i_h).sigmoid() * (g_x + g_h).tanh()
        kept = (mf_x + f_m + 1.0).sigmoid() * m_m.tanh()
        memory = kept + (mi_x + i_m).sigmoid() * (mg_x + g_m).tanh()
        gate = o_x + o_h + self.output_cell(cell) + self.output_memory(memory)
        hidden = self.mix(torch.cat((cell, memory), dim=1)).tanh() * gate.tanh().sigmoid()
        return hidden, cell, memory


class E3D(nn.Module):
    """Layers of cells and the convolution that makes a frame.

    Args:
        frame: Channels of a frame cut into patches.
        channels: Of the states.
        layers: Of cells.
        size: Height and width of the filters.
    """

    def __init__(self, frame, channels, layers=4, size=5):
        super().__init__()
        self.channels = channels
        self.cells = nn.ModuleList(
            Cell(channels if layer else frame, channels, size) for layer in range(layers)
        )
        self.draw = nn.Conv3d(channels, frame, (WINDOW, 1, 1), (WINDOW, 1, 1))

    def forward(self, frames, shown):
        """Return predictions of all frames but the first.

        Args:
            frames: [batch, frames, patch channels, height, width].
            shown: Weight of the true frame where the model could go on from its own, one number
                for each frame that is not read for sure: [frames - read - 1, batch, 1, 1, 1].
        """
        batch, total, _, height, width = frames.shape
        zeros = frames.new_zeros(batch, self.channels, WINDOW, height, width)
        read = total - 1 - len(shown)
        hidden = [zeros] * len(self.cells)
        cells, histories, memory = list(hidden), list(hidden), zeros
        before, drawn, made = torch.zeros_like(frames[:, 0]), None, []
        for time in range(total - 1):
            frame = frames[:, time]
            if time >= read:
                frame = shown[time - read] * frame + (1 - shown[time - read]) * drawn
            x = torch.stack((before, frame), dim=2)
            before = frame
            for layer, run in enumerate(self.cells):
                if time > 0:
                    histories[layer] = torch.cat((histories[layer], cells[layer]), dim=2)
                hidden[layer], cells[layer], memory = run(
                    x, hidden[layer], cells[layer], memory, histories[layer]
                )
                x = hidden[layer]
            drawn = self.draw(x).squeeze(2)
            made.append(drawn)
        return torch.stack(made, dim=1)


def step(model, optimizer, frames, shown):
    """One training step."""
    optimizer.zero_grad()
    error = model(frames, shown) - frames[:, 1:]
    loss = error.square().sum() / 2 + error.abs().sum()
    loss.backward()
    optimizer.step()
    return loss


def network(channels, patch):
    """Return the model for Moving MNIST in patches of `patch` x `patch`."""
    return E3D(patch * patch, channels)


def training(channels, patch, batch_size=1):
    """Return the step on 20 frames, and its arguments."""
    torch.manual_seed(0)
    model = network(channels, patch)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    frames = torch.rand(batch_size, TOTAL, patch * patch, SIZE // patch, SIZE // patch)
    shown = torch.randint(2, (TOTAL - READ - 1, batch_size, 1, 1, 1)).float()
    return step, (model, optimizer, frames, shown)


def small(batch_size=2):
    """Two layers of 4 channels on 4 frames of 4 x 4 patches, filters of 3 x 3."""
    torch.manual_seed(0)
    model = E3D(4, 4, layers=2, size=3)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    frames = torch.rand(batch_size, 4, 4, 4, 4)
    return step, (model, optimizer, frames, torch.ones(1, batch_size, 1, 1, 1))


e3d = partial(training, 320, 4)
e3d_2 = partial(training, 512, 8)
