"""Word-RNN: layers of LSTM that predict the next word of a text.

The first model of ParDNN's Table 5.1 (8 layers, hidden size 2048 or 4096, sequences of 28 or 25
words), as in Kim's word-rnn-tensorflow on Tiny Shakespeare, whose 25,670 distinct words are the
vocabulary: embedding, LSTM cells with one kernel for inputs and hidden state and a bias, a softmax
over the words with weights of its own, gradients clipped to norm 5, Adam.

Parameters, billions, here against the thesis's: Word-RNN 0.374 (0.34), Word-RNN-2 1.284 (1.28).
The thesis's 0.34 is what 7 of these layers have (0.340); 8 layers of 2048 units with these two
matrices of words cannot have fewer than 0.37, so the stated number of layers is kept.
"""

from functools import partial

import torch
from torch import nn

WORDS = 25_670


class Cell(nn.Module):
    """One layer of LSTM, one step at a time; input and hidden state share one product."""

    def __init__(self, inputs, hidden):
        super().__init__()
        self.gates = nn.Linear(inputs + hidden, 4 * hidden)

    def forward(self, x, h, c):
        """Return the new hidden and cell state, each [batch, hidden]."""
        i, g, f, o = self.gates(torch.cat((x, h), dim=1)).chunk(4, dim=1)
        c = (f + 1.0).sigmoid() * c + i.sigmoid() * g.tanh()
        return o.sigmoid() * c.tanh(), c


class WordRNN(nn.Module):
    """Embedding, layers of LSTM, softmax weights."""

    def __init__(self, layers, hidden, words=WORDS):
        super().__init__()
        self.hidden = hidden
        self.embedding = nn.Embedding(words, hidden)
        self.cells = nn.ModuleList(Cell(hidden, hidden) for _ in range(layers))
        self.softmax = nn.Linear(hidden, words)

    def forward(self, tokens):
        """Return logits [steps * batch, words] of tokens [steps, batch]."""
        embedded = self.embedding(tokens)
        zeros = embedded.new_zeros(tokens.shape[1], self.hidden)
        states = [(zeros, zeros)] * len(self.cells)
        outputs = []
        for x in embedded.unbind():
            for layer, cell in enumerate(self.cells):
                states[layer] = cell(x, *states[layer])
                x = states[layer][0]
            outputs.append(x)
        return self.softmax(torch.cat(outputs))


def step(model, optimizer, tokens, targets):
    """One training step."""
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(tokens), targets)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    optimizer.step()
    return loss


def network(hidden, layers=8):
    """Return the model at full vocabulary."""
    return WordRNN(layers, hidden)


def training(hidden, length, batch_size=16):
    """Return the step on sequences of `length` words, and its arguments."""
    torch.manual_seed(0)
    model = network(hidden)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    tokens = torch.randint(WORDS, (length, batch_size))
    return step, (model, optimizer, tokens, torch.randint(WORDS, (length * batch_size,)))


def small(batch_size=4):
    """Two layers of 16 units, 4 words of 50."""
    torch.manual_seed(0)
    model = WordRNN(2, 16, words=50)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    tokens = torch.randint(50, (4, batch_size))
    return step, (model, optimizer, tokens, torch.randint(50, (4 * batch_size,)))


word_rnn = partial(training, 2048, 28)
word_rnn_2 = partial(training, 4096, 25)
