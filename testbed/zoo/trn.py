"""TRN: the Transformer for translation (Vaswani et al., 2017).

The fourth model of ParDNN's Table 5.1: 24 encoder and 24 decoder layers of model dim 2048 with
inner layers of 5120 (TRN), 48 and 48 with 8192 (TRN-2). Its counts of parameters are met exactly
by the form of the widely used TensorFlow implementation for the same data (IWSLT 2016, German to
English): 32,000 word pieces shared by both languages and by the softmax, 8 heads that are put side
by side without an output projection, layer norm after each residual sum, sentences of up to 100
pieces, dropout 0.3, label smoothing 0.1, Adam.

Parameters, billions, here against the thesis's: TRN 1.979 (1.97), TRN-2 5.102 (5.1). With output
projections, as in the paper of 2017, they would have 2.28 and 5.71.
"""

import math
from functools import partial

import torch
from torch import nn

PIECES, LENGTH = 32_000, 100
DROPOUT = 0.3


class Attention(nn.Module):
    """Attention of several heads, then the residual sum and layer norm."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)

    def _split(self, x):
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, x, memory, forbidden):
        """Return [batch, length, width]; `forbidden` marks the keys that are not looked at."""
        query, key = self._split(self.query(x)), self._split(self.key(memory))
        scores = query @ key.transpose(2, 3) / math.sqrt(query.shape[-1])
        weights = scores.masked_fill(forbidden, -1e9).softmax(dim=-1)
        weights = nn.functional.dropout(weights, DROPOUT)
        heads = weights @ self._split(self.value(memory))
        return self.norm(x + heads.transpose(1, 2).flatten(2))


class Inner(nn.Module):
    """Two linear maps with ReLU between, then the residual sum and layer norm."""

    def __init__(self, width, inner):
        super().__init__()
        self.widen = nn.Linear(width, inner)
        self.narrow = nn.Linear(inner, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        """Return [batch, length, width]."""
        return self.norm(x + self.narrow(self.widen(x).relu()))


class Layer(nn.Module):
    """A layer of the encoder, or with `crossed` of the decoder."""

    def __init__(self, width, inner, heads, *, crossed):
        super().__init__()
        self.own = Attention(width, heads)
        self.cross = Attention(width, heads) if crossed else None
        self.inner = Inner(width, inner)

    def forward(self, x, forbidden, memory=None, forbidden_memory=None):
        """Return [batch, length, width]."""
        x = self.own(x, x, forbidden)
        if self.cross is not None:
            x = self.cross(x, memory, forbidden_memory)
        return self.inner(x)


def positions(length, width):
    """Return the sines and cosines that mark positions, [length, width]."""
    rates = torch.exp(torch.arange(0, width, 2) * (-math.log(10_000.0) / width))
    angles = torch.arange(length).unsqueeze(1) * rates
    return torch.stack((angles.sin(), angles.cos()), dim=2).flatten(1)


class Transformer(nn.Module):
    """Encoder and decoder; one embedding for both, and for the softmax.

    Args:
        layers: Of the encoder, and again of the decoder.
        width: Model dim.
        inner: Of the inner layers.
        heads: Of each attention.
        pieces: Of the vocabulary; piece 0 pads.
        length: Of the longest sentence.
    """

    def __init__(self, layers, width, inner, heads=8, pieces=PIECES, length=LENGTH):
        super().__init__()
        self.embedding = nn.Embedding(pieces, width)
        nn.init.normal_(self.embedding.weight, std=width**-0.5)
        self.register_buffer("positions", positions(length, width))
        self.register_buffer("later", torch.ones(length, length, dtype=torch.bool).triu(1))
        self.encoder = nn.ModuleList(
            Layer(width, inner, heads, crossed=False) for _ in range(layers)
        )
        self.decoder = nn.ModuleList(
            Layer(width, inner, heads, crossed=True) for _ in range(layers)
        )

    def embed(self, pieces):
        """Return [batch, length, width]."""
        x = self.embedding(pieces) * math.sqrt(self.embedding.embedding_dim)
        return nn.functional.dropout(x + self.positions[: pieces.shape[1]], DROPOUT)

    def forward(self, source, target):
        """Return logits [batch, target length, pieces] of sentences [batch, length]."""
        length = target.shape[1]
        padding = (source == 0)[:, None, None, :]
        memory, x = self.embed(source), self.embed(target)
        for layer in self.encoder:
            memory = layer(memory, padding)
        forbidden = (target == 0)[:, None, None, :] | self.later[:length, :length]
        for layer in self.decoder:
            x = layer(x, forbidden, memory, padding)
        return nn.functional.linear(x, self.embedding.weight)


def step(model, optimizer, source, target):
    """One training step: each piece of the target is predicted from those before it."""
    optimizer.zero_grad()
    logits = model(source, target[:, :-1]).flatten(0, 1)
    wanted = target[:, 1:].flatten()
    loss = nn.functional.cross_entropy(logits, wanted, ignore_index=0, label_smoothing=0.1)
    loss.backward()
    optimizer.step()
    return loss


def network(layers, inner, width=2048):
    """Return the model for IWSLT 2016."""
    return Transformer(layers, width, inner)


def training(layers, inner, batch_size=1):
    """Return the step on sentences of 100 pieces, and its arguments."""
    torch.manual_seed(0)
    model = network(layers, inner)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
    source, target = torch.randint(1, PIECES, (2, batch_size, LENGTH)).unbind()
    return step, (model, optimizer, source, target)


def small(batch_size=4):
    """One layer each of model dim 16, 8 of 40 pieces."""
    torch.manual_seed(0)
    model = Transformer(1, 16, 32, heads=2, pieces=40, length=8)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    source, target = torch.randint(1, 40, (2, batch_size, 8)).unbind()
    return step, (model, optimizer, source, target)


trn = partial(training, 24, 5120)
trn_2 = partial(training, 48, 8192)
