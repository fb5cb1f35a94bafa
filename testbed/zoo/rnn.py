"""RNN-L-H: L LSTM layers of H hidden units, unrolled over 20 steps.

The recurrent models of Tofu (Wang, Huang, Li: Supporting Very Large Models using Automatic
Dataflow Graph Partitioning, EuroSys 2019), after the large language model of Jozefowicz et al.
(2016). A layer has two linear maps without bias, input to gates [4 H, inputs] and hidden to gates
[4 H, H]; inputs and classes are 512; one classifier and one softmax serve all steps.

Weight, gradient and one history (SGD's momentum) take 12 bytes per parameter. Computed here against
Table 2 there, GiB (where 25.5 is misprinted as 28.5):

    L     H = 4K            H = 6K            H = 8K
    6      8.37 (8.4)      18.74 (18.6)      33.23 (33.0)
    8     11.37 (11.4)     25.49 (25.5)      45.23 (45.3)
    10    14.37 (14.4)     32.24 (32.1)      57.23 (57.0)
"""

from functools import partial

import torch
from torch import nn

STEPS = 20
FEATURES = CLASSES = 512


class Cell(nn.Module):
    """One layer of LSTM without bias, one step at a time."""

    def __init__(self, inputs, hidden):
        super().__init__()
        self.i2h = nn.Linear(inputs, 4 * hidden, bias=False)
        self.h2h = nn.Linear(hidden, 4 * hidden, bias=False)

    def forward(self, x, h, c):
        """Return the new hidden and cell state, each [batch, hidden]."""
        i, f, g, o = (self.i2h(x) + self.h2h(h)).chunk(4, dim=1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        return o.sigmoid() * c.tanh(), c


class RNN(nn.Module):
    """Layers of LSTM and a classifier, the same at every step."""

    def __init__(self, layers, hidden, features=FEATURES, classes=CLASSES):
        super().__init__()
        self.hidden = hidden
        self.cells = nn.ModuleList(
            Cell(features if layer == 0 else hidden, hidden) for layer in range(layers)
        )
        self.classifier = nn.Linear(hidden, classes, bias=False)

    def forward(self, inputs):
        """Return logits [steps * batch, classes] of inputs [steps, batch, features]."""
        zeros = inputs.new_zeros(inputs.shape[1], self.hidden)
        states = [(zeros, zeros)] * len(self.cells)
        outputs = []
        for x in inputs.unbind():
            for layer, cell in enumerate(self.cells):
                states[layer] = cell(x, *states[layer])
                x = states[layer][0]
            outputs.append(x)
        return self.classifier(torch.cat(outputs))


def step(model, optimizer, inputs, labels):
    """One training step."""
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(inputs), labels)
    loss.backward()
    optimizer.step()
    return loss


def network(layers, hidden):
    """Return RNN-`layers`-`hidden`."""
    return RNN(layers, hidden)


def training(layers, hidden, batch_size=512):
    """Return the step of RNN-`layers`-`hidden`, and its arguments."""
    torch.manual_seed(0)
    model = network(layers, hidden)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    inputs = torch.randn(STEPS, batch_size, FEATURES)
    return step, (model, optimizer, inputs, torch.randint(CLASSES, (STEPS * batch_size,)))


def small(batch_size=4):
    """Two layers of 16 units, 5 steps."""
    torch.manual_seed(0)
    model = RNN(2, 16, features=8, classes=6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    inputs = torch.randn(5, batch_size, 8)
    return step, (model, optimizer, inputs, torch.randint(6, (5 * batch_size,)))


rnn_4_4k = partial(training, 4, 4 * 1024)
rnn_4_6k = partial(training, 4, 6 * 1024)
rnn_4_8k = partial(training, 4, 8 * 1024)
rnn_6_4k = partial(training, 6, 4 * 1024)
rnn_6_6k = partial(training, 6, 6 * 1024)
rnn_6_8k = partial(training, 6, 8 * 1024)
rnn_8_4k = partial(training, 8, 4 * 1024)
rnn_8_6k = partial(training, 8, 6 * 1024)
rnn_8_8k = partial(training, 8, 8 * 1024)
rnn_10_4k = partial(training, 10, 4 * 1024)
rnn_10_6k = partial(training, 10, 6 * 1024)
rnn_10_8k = partial(training, 10, 8 * 1024)
