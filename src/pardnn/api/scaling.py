"""The graphs of one step at every batch size, from two that were captured.

A step whose graph has the same ops at two batch sizes has them at all, as far as its code does not
branch on the size. Each dim of each tensor is taken as affine in the batch size, which it is
wherever a batch is stacked, flattened or split; bytes follow from the dims, so that a matrix of
batch x batch grows as its square. What this predicts guides a search; a capture confirms its end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64
from numpy import ndarray

from pardnn.cost.costs import Costs
from pardnn.graph.ir import Graph, Op, Tensor, alias_of, writes

#: Bytes of a tensor beyond which nothing fits; larger ones are not counted exactly.
_MAX_BYTES = float(2**55)


class _Lines(NamedTuple):
    """Integers that are affine in the batch size, known at two sizes."""

    low: Int64[ndarray, "..."]
    high: Int64[ndarray, "..."]

    def at(self, share: float) -> ndarray:
        """Return the values where `share` of the way from low to high is gone, rounded up."""
        value = self.low + (self.high - self.low) * share
        return np.maximum(np.ceil(value - 1e-6), 0.0)


@dataclass(frozen=True, eq=False)
class Family:
    """Graphs of the same ops at different batch sizes.

    Attributes:
        graph: The one that was captured at the smaller size.
        sizes: The batch sizes of the two that were captured.
        dims: Sizes of the dims of each tensor, (tensors, dims), ones behind the last.
        itemsize: Bytes of an element of each tensor; 0 where its bytes do not follow from dims.
        bytes: Of each tensor, for those.
        workspace: Bytes of each op's.
    """

    graph: Graph
    sizes: tuple[int, int]
    dims: _Lines
    itemsize: Int64[ndarray, " t"]
    bytes: _Lines
    workspace: _Lines


def family_of(low: Graph, low_size: int, high: Graph, high_size: int) -> Family | None:
    """Return the family of two graphs; None if they do not have the same ops.

    Args:
        low: Captured at the smaller batch size.
        low_size: That size.
        high: Captured at the larger one.
        high_size: That size.
    """
    if len(low.ops) != len(high.ops):
        return None
    if not all(map(_alike, low.ops, high.ops)):
        return None
    pairs = [
        pair
        for a, b in zip(low.ops, high.ops, strict=True)
        for pair in zip(a.outputs, b.outputs, strict=True)
    ]
    low_dims, high_dims = (_dims([pair[i] for pair in pairs]) for i in (0, 1))
    return Family(
        graph=low,
        sizes=(low_size, high_size),
        dims=_Lines(low_dims, high_dims),
        itemsize=np.array([_itemsize(*pair) for pair in pairs], dtype=np.int64),
        bytes=_Lines(low.arrays.tensor_bytes, high.arrays.tensor_bytes),
        workspace=_Lines(low.arrays.workspace, high.arrays.workspace),
    )


def graph_at(family: Family, batch_size: int) -> Graph:
    """Return the graph at a batch size as far as memory goes: its arrays, not its ops' arguments.

    O(tensors + ops), without a capture.
    """
    share = _share(family, batch_size)
    elements = family.dims.at(share).prod(axis=1, dtype=np.float64)
    follows = family.itemsize > 0
    tensor_bytes = np.where(follows, elements * family.itemsize, family.bytes.at(share))
    arrays = family.graph.arrays._replace(
        tensor_bytes=_whole(tensor_bytes), workspace=_whole(family.workspace.at(share))
    )
    return Graph(name=family.graph.name, ops=family.graph.ops, arrays=arrays)


def costs_at(family: Family, low: Costs, high: Costs, batch_size: int) -> Costs:
    """Return how long the ops take at a batch size, affine between those of the two captures."""
    share = _share(family, batch_size)

    def seconds(kind: str) -> ndarray:
        one, other = low.seconds[kind], high.seconds[kind]
        known = np.isfinite(one) & np.isfinite(other)
        slope = np.where(known, other, 0.0) - np.where(known, one, 0.0)
        found = np.maximum(one + slope * share, 0.0)
        found.setflags(write=False)
        return found

    return Costs({kind: seconds(kind) for kind in low.seconds}, low.source)


def _share(family: Family, batch_size: int) -> float:
    low, high = family.sizes
    return (batch_size - low) / (high - low)


def _whole(values: ndarray) -> Int64[ndarray, " n"]:
    whole = np.ascontiguousarray(np.minimum(values, _MAX_BYTES).astype(np.int64))
    whole.setflags(write=False)
    return whole


def _alike(one: Op, other: Op) -> bool:
    """Whether two ops differ in nothing but sizes and numbers."""
    return (
        one.name == other.name
        and one.kind == other.kind
        and one.inputs == other.inputs
        and one.after == other.after
        and one.memory == other.memory
        and one.group == other.group
        and writes(one) == writes(other)
        and len(one.outputs) == len(other.outputs)
        and all(
            a.name == b.name
            and a.dtype == b.dtype
            and alias_of(one, a) == alias_of(other, b)
            and (a.shape is None) == (b.shape is None)
            and len(a.shape or ()) == len(b.shape or ())
            for a, b in zip(one.outputs, other.outputs, strict=True)
        )
    )


def _dims(tensors: list[Tensor]) -> Int64[ndarray, "t dims"]:
    rank = max((len(tensor.shape or ()) for tensor in tensors), default=0)
    dims = np.ones((len(tensors), max(rank, 1)), dtype=np.int64)
    for row, tensor in zip(dims, tensors, strict=True):
        if tensor.shape:
            row[: len(tensor.shape)] = tensor.shape
    return dims


def _itemsize(low: Tensor, high: Tensor) -> int:
    """Bytes of an element, if both tensors take their number of elements times that; else 0."""
    if low.shape is None or high.shape is None:
        return 0
    num_low, num_high = int(np.prod(low.shape)), int(np.prod(high.shape))
    if num_low == 0 or num_high == 0 or low.bytes % num_low:
        return 0
    itemsize = low.bytes // num_low
    return itemsize if itemsize * num_high == high.bytes else 0
