"""Char-CRN: a language model that reads words letter by letter (Kim et al., 2016).

The second model of ParDNN's Table 5.1: letters of embedding size 15, convolutions of widths 1 to 7
with 50 to 200 features each and the maximum over the word (1,100 numbers per word), two highway
layers, 8 (Char-CRN) or 32 (Char-CRN-2) layers of LSTM of 2048 units over 35 words, a softmax over
the 10,000 words of the Penn Treebank; dropout 0.5 between layers, plain SGD, gradients clipped to
norm 5. Words have up to 21 letters and two marks for their ends, of 51 kinds.

Parameters, billions, here against the thesis's: Char-CRN 0.286 (0.23), Char-CRN-2 1.092 (1.09).
The second agrees; the first cannot agree with it, for 24 layers of 2048 units have 0.806 billion
whatever else the model holds, and 1.092 - 0.806 is the 0.286 counted here.
"""

from functools import partial

import torch
from torch import nn

LETTERS, WORDS = 51, 10_000
LENGTH, STEPS = 23, 35
FEATURES = {1: 50, 2: 100, 3: 150, 4: 200, 5: 200, 6: 200, 7: 200}


class Highway(nn.Module):
    """A layer whose gate lets part of its input through unchanged."""

    def __init__(self, features):
        super().__init__()
        self.change = nn.Linear(features, features)
        self.gate = nn.Linear(features, features)
        nn.init.constant_(self.gate.bias, -2.0)

    def forward(self, x):
        """Return [batch, features]."""
        gate = self.gate(x).sigmoid()
        return gate * self.change(x).relu() + (1 - gate) * x


class Cell(nn.Module):
    """One layer of LSTM, one step at a time; input and hidden state share one product."""

    def __init__(self, inputs, hidden):
        super().__init__()
        self.gates = nn.Linear(inputs + hidden, 4 * hidden)

    def forward(self, x, h, c):
        """Return the new hidden and cell state, each [batch, hidden]."""
        i, g, f, o = self.gates(torch.cat((x, h), dim=1)).chunk(4, dim=1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        return o.sigmoid() * c.tanh(), c


class CharCRN(nn.Module):
    """Letters to words to the next word.

    Args:
        layers: Of LSTM.
        hidden: Units per layer.
        features: Of the convolutions over letters, by width.
        letters: Kinds of letters.
        words: Kinds of words.
        embedding: Size of a letter's vector.
    """

    def __init__(
        self, layers, hidden, features=FEATURES, letters=LETTERS, words=WORDS, embedding=15
    ):
        super().__init__()
        self.hidden = hidden
        self.embedding = nn.Embedding(letters, embedding)
        self.convolutions = nn.ModuleList(
            nn.Conv1d(embedding, count, width) for width, count in features.items()
        )
        word = sum(features.values())
        self.highways = nn.Sequential(Highway(word), Highway(word))
        self.cells = nn.ModuleList(
            Cell(hidden if layer else word, hidden) for layer in range(layers)
        )
        self.softmax = nn.Linear(hidden, words)

    def read(self, letters):
        """Return a vector per word, [words, features], of letters [words, length]."""
        x = self.embedding(letters).transpose(1, 2)
        found = [conv(x).tanh().amax(dim=2) for conv in self.convolutions]
        return self.highways(torch.cat(found, dim=1))

    def forward(self, letters):
        """Return logits [steps * batch, words] of letters [steps, batch, length]."""
        steps, batch, length = letters.shape
        read = self.read(letters.view(steps * batch, length)).view(steps, batch, -1)
        zeros = read.new_zeros(batch, self.hidden)
        states = [(zeros, zeros)] * len(self.cells)
        outputs = []
        for x in read.unbind():
            for layer, cell in enumerate(self.cells):
                states[layer] = cell(x, *states[layer])
                x = nn.functional.dropout(states[layer][0], 0.5)
            outputs.append(x)
        return self.softmax(torch.cat(outputs))


def step(model, optimizer, letters, targets):
    """One training step."""
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(letters), targets)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    optimizer.step()
    return loss


def network(layers, hidden=2048):
    """Return the model for the Penn Treebank."""
    return CharCRN(layers, hidden)


def training(layers, batch_size=8):
    """Return the step on 35 words, and its arguments."""
    torch.manual_seed(0)
    model = network(layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    letters = torch.randint(LETTERS, (STEPS, batch_size, LENGTH))
    return step, (model, optimizer, letters, torch.randint(WORDS, (STEPS * batch_size,)))


def small(batch_size=4):
    """Two layers of 16 units, 3 words of 8 letters."""
    torch.manual_seed(0)
    model = CharCRN(2, 16, {1: 4, 2: 6, 3: 8}, letters=12, words=30, embedding=5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    letters = torch.randint(12, (3, batch_size, 8))
    return step, (model, optimizer, letters, torch.randint(30, (3 * batch_size,)))


char_crn = partial(training, 8)
char_crn_2 = partial(training, 32)
