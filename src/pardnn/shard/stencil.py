"""Where the boxes of a call lie when one loop is cut, once for all calls that agree in it.

Idea: the cut of a loop moves a few dims of a few tensors, and all others stay whole. Where they
move to depends on the sizes of those dims and on how far the loops run that they are made of: a
*stencil*. A call that agrees in them, however large its other dims, needs no analysis of its own.
Complexity: O(tensors) per call, O(accesses x dims) per stencil and worker.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int64
from numpy import ndarray

from pardnn.plan.mesh import Box
from pardnn.shard.analysis import Analysis
from pardnn.shard.boxes import lengths
from pardnn.shard.call import Bound
from pardnn.shard.interned import EXCHANGED, KEPT
from pardnn.shard.portions import boxes_of, touched_by
from pardnn.shard.tdl import Shape

Column = tuple[str | int, int]
"""A dim of an input's slot, or of an output."""


class Stencil(NamedTuple):
    """The dims that the cut of a loop moves.

    Attributes:
        columns: Which they are.
        boxes: First and last index on each worker, the last exclusive.
        sizes: Of these dims on each worker.
        ends: First and last value of the loop on each worker, inclusive.
        flags: By output, whether the workers' results are partial.
    """

    columns: tuple[Column, ...]
    boxes: Int64[ndarray, "n columns 2"]
    sizes: tuple[tuple[int, ...], ...]
    ends: tuple[tuple[int, int], ...]
    flags: tuple[bool, ...]


class _Plan(NamedTuple):
    """What the stencils of a loop of an analysis depend on.

    Attributes:
        columns: Dims that move.
        names: Loops that they are made of.
    """

    columns: tuple[Column, ...]
    names: tuple[str, ...]


@lru_cache(maxsize=1 << 14)
def _plan(analysis: Analysis, axis: str) -> _Plan:
    """Return what decides on a cut."""
    touched = touched_by(analysis, axis)
    columns: dict[Column, None] = {}
    names = {axis}
    for slot, accesses in touched.reads:
        for _, moving in accesses:
            columns |= dict.fromkeys((slot, dim) for dim, _ in moving)
            names |= {name for _, span in moving for name in span.names}
    for output, moving in enumerate(touched.writes):
        columns |= dict.fromkeys((output, dim) for dim, _ in moving or ())
        names |= {name for _, span in moving or () for name in span.names}
    return _Plan(tuple(columns), tuple(sorted(names)))


def stencil_of(
    analysis: Analysis, bound: Bound, extents: Mapping[str, int], axis: str, workers: int
) -> Stencil | None:
    """Return the stencil of a loop, None if it cannot be cut so.

    Args:
        analysis: Of the call.
        bound: The call.
        extents: How far its loops run.
        axis: A loop.
        workers: Number of parts.

    Raises:
        DescriptionError: E220, if the description does not fit the call.
    """
    plan = _plan(analysis, axis)
    shapes, outputs = bound.tensors, bound.call.outputs
    key = (
        "stencil",
        analysis,
        axis,
        workers,
        tuple([extents.get(name) for name in plan.names]),
        tuple([_size(column, shapes, outputs) for column in plan.columns]),
    )
    if key not in KEPT.others:
        KEPT.others[key] = _found(analysis, bound, extents, axis, workers, plan.columns)
    return KEPT.others[key]


def _size(column: Column, tensors: Mapping[str, Any], outputs: Sequence[Shape | None]) -> int:
    place, dim = column
    shape = tensors[place].sizes.shape if isinstance(place, str) else outputs[place]
    return shape[dim] if shape is not None else 0


def _found(
    analysis: Analysis,
    bound: Bound,
    extents: Mapping[str, int],
    axis: str,
    workers: int,
    columns: tuple[Column, ...],
) -> Stencil | None:
    found = boxes_of(analysis, bound, extents, axis, workers)
    if found is None:
        return None
    reducers = [shares[0] and shares[0].reducer for shares in found.shares]
    if any(r is not None and r.name not in EXCHANGED for r in reducers):
        return None
    rows: list[list[tuple[int, int]]] = []
    for worker, regions in enumerate(found.regions):
        shares = [each[worker] for each in found.shares]
        boxes: dict[str | int, Box] = {slot: region.box for slot, region in regions.items()}
        boxes |= {i: share.box for i, share in enumerate(shares) if share is not None}
        rows.append([boxes[place][dim] for place, dim in columns])
    return Stencil(
        columns,
        np.array(rows, dtype=np.int64).reshape(workers, len(columns), 2),
        tuple(lengths(tuple(row)) for row in rows),
        tuple(each[axis] for each in found.ranges),
        tuple(reducer is not None for reducer in reducers),
    )
