"""Memory that kernels allocate beyond what their results show.

Some kernels shrink a large tensor to their result, or keep the elements before a view's offset: the
storage would remain large as long as the result is live. Such results are copied, so that a rank
holds what the graph says, and the memory that the kernel allocated counts as the op's workspace.
Memory that kernels allocate and release themselves is not counted; `tests/backends/torch/ops` lists
these kernels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from pardnn.backends.torch.devices import elements_of

Geometry = tuple[torch.Size, tuple[int, ...], int, torch.dtype]

_LOSSES = frozenset(
    f"aten.{name}.default"
    for name in ("mse_loss", "smooth_l1_loss", "binary_cross_entropy", "soft_margin_loss")
)
_BAGS = frozenset({"aten._embedding_bag.default", "aten._embedding_bag_forward_only.default"})
_COL2IM = "aten.col2im.default"
_CLONES = frozenset(
    f"aten.{name}.default"
    for name in ("copy", "diagonal_scatter", "select_scatter", "slice_scatter")
)
#: Calls whose results may have a larger storage than they show.
LARGER = _LOSSES | _BAGS | _CLONES | {_COL2IM}


def compact(result: Any) -> Any:
    """Return the results of a call, each in a storage no larger than the result."""
    if isinstance(result, list | tuple):
        return [compact(item) for item in result]
    if not isinstance(result, torch.Tensor):
        return result
    elements = elements_of(result)
    if elements.nbytes == result.untyped_storage().nbytes():
        return result
    return elements.clone().as_strided(result.shape, result.stride())


def workspace(kind: str, inputs: Sequence[Geometry], outputs: Sequence[Geometry]) -> int:
    """Return the bytes that a call holds while it runs, besides its outputs.

    Args:
        kind: The kind of the call.
        inputs: Shape, strides, storage offset (elements) and dtype of each input tensor.
        outputs: The same for each output.
    """
    if kind not in LARGER or not outputs:
        return 0
    if kind in _LOSSES:
        unreduced = torch.broadcast_shapes(*(shape for shape, *_ in inputs[:2]))
        return 0 if outputs[0][0] else math.prod(unreduced) * outputs[0][3].itemsize
    if kind == _COL2IM:  # the result is allocated as large as the input
        columns = _bytes(inputs[0])
        return columns if columns > _bytes(outputs[0]) else 0
    if kind in _BAGS:  # there is one more offset
        return sum(_bytes(each) + each[3].itemsize for each in outputs[1:])
    _, _, offset, dtype = inputs[0]
    return offset * dtype.itemsize + _bytes(outputs[0]) if offset else 0


def _bytes(geometry: Geometry) -> int:
    shape, _, _, dtype = geometry
    return math.prod(shape) * dtype.itemsize
