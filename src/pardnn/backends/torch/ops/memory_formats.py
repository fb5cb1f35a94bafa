"""Memory formats of the inputs of kernels that ask for them.

Problem: group norm takes channels first or last, by the strides of its input, and expects it packed
in that format. The stride of a dim of one element has no meaning, and torch's own kernels leave any
number there; yet it decides which format torch takes a tensor for. Of a batch cut to one sample,
`[1, 32, 8, 8]` with strides `[32, 1, 256, 32]`, the forward pass raises, and the backward pass
reads channels that are last as if they were first.

Idea: such an input is seen through a view, which has the strides of the format that it is in. A
gradient in another format than the input, as the kernels of a cut batch may leave it, is copied.
"""

from __future__ import annotations

import torch

from pardnn.graph.ir import contiguous_strides

FORWARD, BACKWARD = "aten.native_group_norm.default", "aten.native_group_norm_backward.default"


def in_format(value: torch.Tensor) -> torch.Tensor:
    """Return a view that has the strides of the memory format in which a tensor is packed.

    Args:
        value: A tensor; one that is in no format is returned as it is.
    """
    shape, strides = tuple(value.shape), value.stride()
    if 1 not in shape or len(shape) not in (4, 5):
        return value
    order = (0, *range(2, len(shape)), 1)
    packed = contiguous_strides(tuple(shape[dim] for dim in order))
    channels_last = tuple(packed[order.index(dim)] for dim in range(len(shape)))
    for found in (contiguous_strides(shape), channels_last):
        if all(n == 1 or a == b for n, a, b in zip(shape, strides, found, strict=True)):
            return value.as_strided(shape, found)
    return value


def in_format_of(value: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return a tensor as `in_format` has it; a copy if another one is in another format.

    Args:
        value: A tensor.
        other: One of the same shape.
    """
    value, other = in_format(value), in_format(other)
    if value.stride() == other.stride():
        return value
    return torch.empty_strided(
        other.shape, other.stride(), dtype=value.dtype, device=value.device
    ).copy_(value)
