"""Transformer blocks in plain PyTorch, with one product for q, k and v, or three.

For looking at shardings: GPT-2's kind (layer norm, GELU, biases) and Llama's (RMS norm, SwiGLU, no
biases). `step` makes a training step of any width and depth.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

HEADS, LENGTH = 16, 256


class Attention(nn.Module):
    """Causal self-attention; `fused`: one linear layer for q, k and v."""

    def __init__(self, width: int, fused: bool, bias: bool) -> None:
        super().__init__()
        if fused:
            self.qkv = nn.Linear(width, 3 * width, bias=bias)
        else:
            self.q, self.k, self.v = (nn.Linear(width, width, bias=bias) for _ in range(3))
        self.fused = fused
        self.out = nn.Linear(width, width, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend."""
        batch, length, width = x.shape
        parts = self.qkv(x).split(width, dim=2) if self.fused else (self.q(x), self.k(x), self.v(x))
        q, k, v = (p.view(batch, length, HEADS, -1).transpose(1, 2) for p in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """Attention and a feed-forward network, each with a norm before and a sum after it."""

    def __init__(self, width: int, inner: int, fused: bool, llama: bool) -> None:
        super().__init__()
        norm = nn.RMSNorm if llama else nn.LayerNorm
        self.norm_1, self.norm_2 = norm(width), norm(width)
        self.attention = Attention(width, fused, not llama)
        self.up = nn.Linear(width, inner, bias=not llama)
        self.gate = nn.Linear(width, inner, bias=False) if llama else None
        self.down = nn.Linear(inner, width, bias=not llama)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Both, one after the other."""
        x = x + self.attention(self.norm_1(x))
        y = self.norm_2(x)
        inner = F.gelu(self.up(y)) if self.gate is None else F.silu(self.gate(y)) * self.up(y)
        return x + self.down(inner)


def step(
    batch: int,
    *,
    width: int = 1024,
    inner: Sequence[int] = (4096, 4096),
    fused: bool = False,
    llama: bool = False,
) -> tuple[Any, tuple[Any, ...]]:
    """Return a training step of blocks with SGD and momentum, and its arguments.

    Args:
        batch: Sequences of `LENGTH` positions.
        width: Of the residual stream; a multiple of `HEADS`.
        inner: Width of the feed-forward network of each block.
        fused: Whether q, k and v come of one product.
        llama: Llama's kind of block, else GPT-2's.
    """
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(width, each, fused, llama) for each in inner))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def train(
        model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor
    ) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    shape = (batch, LENGTH, width)
    return train, (model, optimizer, torch.randn(shape), torch.randn(shape))


def small(batch_size: int = 2) -> tuple[Any, tuple[Any, ...]]:
    """One block of width 32."""
    return step(batch_size, width=32, inner=(64,))
