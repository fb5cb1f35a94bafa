"""The graphs of one step at every batch size, from two that were captured.

A step whose graph has the same ops at two batch sizes has them at all, as far as its code does not
branch on the size. Each dim of each tensor, each stride and each integer among the arguments is
taken as affine in the batch size, which it is wherever a batch is stacked, flattened or split;
bytes follow from the dims, so that a matrix of batch x batch grows as its square. What this
predicts guides a search; a capture confirms its end.

A family holds one graph and how its sizes grow: a few hundred bytes more than the graph alone.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy import ndarray

from pardnn.cost.costs import Costs
from pardnn.graph.ir import Graph, Op, Tensor, alias_of, span_bytes, writes

#: Bytes of a tensor beyond which nothing fits; larger ones are not counted exactly.
_MAX_BYTES = 1 << 55

#: What two captures differ by: an int, or a tree of tuples and dicts of them; None is nothing.
Growth = Any


@dataclass(frozen=True, eq=False)
class Family:
    """Graphs of the same ops at different batch sizes.

    Attributes:
        graph: The one that was captured at the smaller size.
        size: That batch size.
        more: How many samples the other capture had more.
        sizes: What that added to each op, in the order of `graph.ops`: to its workspace, then for
            each output to (bytes,), shape and strides.
        literals: What it added to the integers among each op's arguments.
    """

    graph: Graph
    size: int
    more: int
    sizes: tuple[Growth, ...]
    literals: tuple[Growth, ...]

    def grown(self, value: int, growth: int, batch_size: int) -> int:
        """Return an integer at a batch size: on the line, rounded up, not below 0.

        Args:
            value: At the batch size of `graph`.
            growth: What `more` samples add.
            batch_size: Any.
        """
        return max(0, value - (-growth * (batch_size - self.size) // self.more))


def family_of(low: Graph, low_size: int, high: Graph, high_size: int) -> Family | None:
    """Return the family of two graphs; None if they do not have the same ops. O(ops + arguments).

    Args:
        low: Captured at the smaller batch size.
        low_size: That size.
        high: Captured at the larger one.
        high_size: That size.
    """
    if len(low.ops) != len(high.ops):
        return None
    pairs = list(zip(low.ops, high.ops, strict=True))
    if not all(_alike(one, other) for one, other in pairs):
        return None
    return Family(
        graph=low,
        size=low_size,
        more=high_size - low_size,
        sizes=tuple(_difference(_numbers(one), _numbers(other)) for one, other in pairs),
        literals=tuple(_difference(one.arguments, other.arguments) for one, other in pairs),
    )


def graph_at(family: Family, batch_size: int) -> Graph:
    """Return the graph at a batch size. O(ops that grow), without a capture."""
    ops = list(family.graph.ops)
    tensors: dict[Any, dict[str, Any]] = {}
    for i, (growth, literals) in enumerate(zip(family.sizes, family.literals, strict=True)):
        if growth is not None:
            ops[i] = _grown_op(family, ops[i], growth, batch_size, tensors)
        if literals is not None:
            arguments = _grown_literals(family, ops[i].arguments, literals, batch_size)
            ops[i] = dataclasses.replace(ops[i], arguments=arguments)
    return resized(family.graph, ops)


def resized(graph: Graph, ops: Sequence[Op]) -> Graph:
    """Return the graph with ops that differ in sizes and numbers only, so its edges are kept."""
    sizes = np.array(
        [min(span_bytes(t), _MAX_BYTES) for op in ops for t in op.outputs], dtype=np.int64
    )
    workspace = np.array([op.workspace for op in ops], dtype=np.int64)
    for array in (sizes, workspace):
        array.setflags(write=False)
    arrays = graph.arrays._replace(tensor_bytes=sizes, workspace=workspace)
    return Graph(graph.name, tuple(ops), arrays)


def costs_at(family: Family, low: Costs, high: Costs, batch_size: int) -> Costs:
    """Return how long the ops take at a batch size, affine between those of the two captures.

    Args:
        family: Of the two captures.
        low: Costs of the capture at the smaller batch size.
        high: Costs of the other.
        batch_size: Any.
    """
    share = (batch_size - family.size) / family.more

    def seconds(kind: str) -> ndarray:
        one, other = low.seconds[kind], high.seconds[kind]
        known = np.isfinite(one) & np.isfinite(other)
        slope = np.where(known, other, 0.0) - np.where(known, one, 0.0)
        found = np.maximum(one + slope * share, 0.0)
        found.setflags(write=False)
        return found

    return Costs({kind: seconds(kind) for kind in low.seconds}, low.source)


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
            and len(a.shape or ()) == len(b.shape or ())
            and (a.shape is None) == (b.shape is None)
            for a, b in zip(one.outputs, other.outputs, strict=True)
        )
    )


def _numbers(op: Op) -> tuple[Any, ...]:
    return (op.workspace, *(((t.bytes,), t.shape or (), t.strides or ()) for t in op.outputs))


def _difference(low: Any, high: Any) -> Growth:
    """Return what two structures of one form differ by in integers; None if nothing."""
    if isinstance(low, int) and isinstance(high, int) and not isinstance(low, bool):
        return high - low or None
    if isinstance(low, dict) and isinstance(high, dict):
        found = {key: _difference(low[key], high[key]) for key in low if key in high}
        found = {key: growth for key, growth in found.items() if growth is not None}
        return found or None
    if isinstance(low, list | tuple) and isinstance(high, list | tuple) and len(low) == len(high):
        rows = tuple(map(_difference, low, high))
        return rows if any(row is not None for row in rows) else None
    return None


def _grown_op(
    family: Family,
    op: Op,
    growth: Growth,
    batch_size: int,
    tensors: dict[Any, dict[str, Any]],
) -> Op:
    workspace, *rows = growth
    outputs = list(op.outputs)
    for i, row in enumerate(rows):
        tensor = outputs[i]
        if row is None:
            continue
        key = tensor.bytes, tensor.shape, tensor.strides, row
        if key not in tensors:
            tensors[key] = _grown_tensor(family, tensor, row, batch_size)
        outputs[i] = dataclasses.replace(tensor, **tensors[key])
    used = family.grown(op.workspace, workspace or 0, batch_size)
    return dataclasses.replace(op, outputs=tuple(outputs), workspace=min(used, _MAX_BYTES))


def _grown_tensor(
    family: Family, tensor: Tensor, growth: Growth, batch_size: int
) -> dict[str, Any]:
    """Return bytes, shape and strides of a tensor at a batch size."""
    (more_bytes,), more_dims, more_strides = (
        part if part is not None else (0,) * length
        for part, length in zip(growth, (1, *_lengths(tensor)), strict=True)
    )
    dims = tensor.shape or ()
    more_dims = [each or 0 for each in more_dims]
    high_dims = tuple(map(sum, zip(dims, more_dims, strict=True)))
    shape = tuple(map(family.grown, dims, more_dims, [batch_size] * len(dims)))
    strides = tensor.strides
    if strides is not None:
        more = [each or 0 for each in more_strides]
        strides = tuple(map(family.grown, strides, more, [batch_size] * len(strides)))
        if sum(map(bool, more_dims)) > 1 and tensor.strides is not None:
            # Of the larger capture: at one sample, strides of 1 and 1 tell no order of dims.
            larger = tuple(map(sum, zip(tensor.strides, more, strict=True)))
            strides = _dense_strides(high_dims, larger, shape) or strides
    low, high = math.prod(dims), math.prod(high_dims)
    itemsize = tensor.bytes // low if low else 0
    is_whole = tensor.bytes == itemsize * low and tensor.bytes + more_bytes == itemsize * high
    if itemsize and tensor.shape is not None and is_whole:
        size = itemsize * math.prod(shape)
    else:
        size = family.grown(tensor.bytes, more_bytes, batch_size)
    return {
        "bytes": min(size, _MAX_BYTES),
        "shape": None if tensor.shape is None else shape,
        "strides": strides,
    }


def _lengths(tensor: Tensor) -> tuple[int, int]:
    return len(tensor.shape or ()), len(tensor.strides or ())


def _dense_strides(
    dims: tuple[int, ...], strides: tuple[int, ...], shape: tuple[int, ...]
) -> tuple[int, ...] | None:
    """Return the strides of a new shape in the same order of dims; None if there are gaps."""
    found, old, new = list(strides), 1, 1
    for i in sorted(range(len(dims)), key=lambda i: (strides[i], -i)):
        if strides[i] != old:
            return None
        found[i] = new
        old, new = old * dims[i], new * shape[i]
    return tuple(found)


def _grown_literals(family: Family, value: Any, growth: Growth, batch_size: int) -> Any:
    if growth is None:
        return value
    if isinstance(value, dict):
        return {
            key: _grown_literals(family, each, growth.get(key), batch_size)
            for key, each in value.items()
        }
    if isinstance(value, list | tuple):
        pairs = zip(value, growth, strict=True)
        return type(value)(_grown_literals(family, each, part, batch_size) for each, part in pairs)
    return family.grown(value, growth, batch_size)
