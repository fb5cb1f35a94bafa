"""Packed sequences with lengths known at capture, for steps that are traced.

Problem: `pack_padded_sequence` makes a tensor whose size is the sum of the lengths, and torch reads
them from memory, which a fake tensor does not have.

Idea: if the lengths depend only on constants, they are read at capture. Packing and padding become
copies of slices, forward and backward, as in torch's own kernels; the number of remaining sequences
at each time is a real tensor, which the recurrent layers read.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from pardnn.backends.torch.capture.constant_folding import folded_list
from pardnn.backends.torch.capture.refusals import unsupported
from pardnn.backends.torch.capture.tracer import Tracer
from pardnn.errors import UserCodeError


def pack(
    tracer: Tracer,
    _real: Callable[..., Any],
    x: torch.Tensor,
    lengths: torch.Tensor,
    batch_first: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pack as `torch._VF._pack_padded_sequence` does.

    Args:
        tracer: The tracer of the step.
        _real: The function itself.
        x: Padded sequences, (time, batch, ...).
        lengths: The lengths of the sequences, in falling order.
        batch_first: Whether `x` is (batch, time, ...).

    Raises:
        UnsupportedError: E803, if the lengths are data.
        UserCodeError: E110, if torch would raise.
    """
    known = _numbers(tracer, lengths)
    wrong = _wrong_lengths(known, x, batch_first)
    if wrong is not None:
        raise UserCodeError(
            f"while running your step for capture ({tracer.locator.line()}): "
            f"pack_padded_sequence would raise a RuntimeError: {wrong}"
        )
    sizes = [sum(length > time for length in known) for time in range(known[0])]
    return _Packed.apply(x, sizes, batch_first), _real_tensor(sizes)


def _wrong_lengths(lengths: Sequence[int], x: torch.Tensor, batch_first: bool) -> str | None:
    """Return what torch would say about lengths that do not fit; None if they do."""
    time, batch = (x.shape[1], x.shape[0]) if batch_first else (x.shape[0], x.shape[1])
    if len(lengths) != batch:
        return f"{len(lengths)} lengths for a batch of {batch} sequences"
    if min(lengths) <= 0 or max(lengths) > time:
        return f"lengths {list(lengths)} of sequences of 1 to {time} steps"
    if any(a < b for a, b in itertools.pairwise(lengths)):
        return f"lengths {list(lengths)} are not in falling order, and enforce_sorted is True"
    return None


def pad(
    tracer: Tracer,
    _real: Callable[..., Any],
    data: torch.Tensor,
    batch_sizes: torch.Tensor,
    batch_first: bool,
    padding: float,
    total_length: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad as `torch._VF._pad_packed_sequence` does.

    Args:
        tracer: The tracer of the step.
        _real: The function itself.
        data: Packed sequences.
        batch_sizes: How many sequences are left at each time.
        batch_first: Whether to return (batch, time, ...).
        padding: Fills what no sequence reaches.
        total_length: The number of time steps of the result; 0 or less for the longest sequence's.

    Raises:
        UnsupportedError: E803, if the sizes are data.
    """
    sizes = _numbers(tracer, batch_sizes)
    shape = (max(total_length, len(sizes)), sizes[0], *data.shape[1:])
    padded = data.new_full(shape, padding)
    for begin, end, size, part in _runs(data, sizes):
        padded[begin:end, :size].copy_(part)
    lengths = [sum(size > i for size in sizes) for i in range(sizes[0])]
    return padded.transpose(0, 1) if batch_first else padded, _real_tensor(lengths)


class _Packed(torch.autograd.Function):
    """The packing of padded sequences; the gradient is zero where nothing was packed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, sizes: list[int], batch_first: bool) -> torch.Tensor:
        ctx.sizes, ctx.batch_first, ctx.shape = sizes, batch_first, x.shape
        x = x.transpose(0, 1) if batch_first else x
        rest = x.shape[2:]
        steps = [
            x[begin:end, :size].contiguous().view((end - begin) * size, *rest)
            for begin, end, size in _spans(sizes)
        ]
        return torch.cat(steps)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (grad,) = grads
        time, batch = ctx.shape[:2]
        time, batch = (batch, time) if ctx.batch_first else (time, batch)
        result = grad.new_zeros(time, batch, *ctx.shape[2:])
        for begin, end, size, part in _runs(grad, ctx.sizes):
            result[begin:end, :size].copy_(part)
        return result.transpose(0, 1) if ctx.batch_first else result, None, None


def _spans(sizes: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield first and last time, exclusive, of each run of equal sizes, and the size."""
    begin = 0
    for end in range(1, len(sizes) + 1):
        if end == len(sizes) or sizes[end] != sizes[begin]:
            yield begin, end, sizes[begin]
            begin = end


def _runs(data: torch.Tensor, sizes: Sequence[int]) -> Iterator[tuple[int, int, int, torch.Tensor]]:
    """Yield the spans of packed data with their part of it, (time, batch, ...)."""
    at = 0
    for begin, end, size in _spans(sizes):
        count = (end - begin) * size
        yield begin, end, size, data[at : at + count].view(end - begin, size, *data.shape[1:])
        at += count


def _numbers(tracer: Tracer, tensor: torch.Tensor) -> list[int]:
    if not isinstance(tensor, FakeTensor):
        with _disable_current_modes():
            return tensor.tolist()
    known = folded_list(tracer.aliases.fresh_value(tensor), tracer.calls)
    if known is None:
        raise unsupported.packed_lengths(tracer.locator.line())
    return known


def _real_tensor(numbers: Sequence[int]) -> torch.Tensor:
    with _disable_current_modes():
        return torch.tensor(numbers)
