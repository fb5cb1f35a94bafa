"""The collective that a move of boxes is part of, in the words of people and of libraries."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from pardnn.plan.mesh import Box, Mesh
from pardnn.shard.boxes import clipped, inside

Boxes = tuple[Box | None, ...]


def collective_of(
    mesh: Mesh,
    held: Sequence[Box | None],
    wanted: Sequence[Box | None],
    shape: Sequence[int],
    reduced: Sequence[int] = (),
) -> dict[str, Any]:
    """Return what a move is called, and along which mesh axis and tensor dim, if along one.

    Args:
        mesh: The devices.
        held: What each has, in indices of the whole tensor.
        wanted: What each needs, None for nothing.
        shape: Of the whole tensor.
        reduced: Mesh axes along which partial results are combined.
    """
    inner = tuple(None if box is None else clipped(box, shape) for box in wanted)
    name, axis, dim = _named(mesh, tuple(held), inner, tuple(reduced))
    return {"collective": name, "axis": None if axis is None else mesh.names[axis], "dim": dim}


@functools.lru_cache(maxsize=4096)
def _named(
    mesh: Mesh, held: Boxes, wanted: Boxes, reduced: tuple[int, ...]
) -> tuple[str, int | None, int | None]:
    pairs = [(own, request) for own, request in zip(held, wanted, strict=True) if own and request]
    if reduced:
        axis = reduced[0] if len(reduced) == 1 else None
        if all(request == own for own, request in pairs):
            return "all_reduce", axis, None
        dim = None if axis is None else _dim_along(mesh, wanted, held, axis)
        return "reduce_scatter", axis if dim is not None else None, dim
    if all(inside(request, own) for own, request in pairs):
        return "slice", None, None
    for axis in range(len(mesh.shape)):
        dim = _dim_along(mesh, held, wanted, axis)
        if dim is not None:
            return "all_gather", axis, dim
    if all(inside(own, request) for own, request in pairs):
        dims = {d for own, request in pairs for d, ends in enumerate(own) if ends != request[d]}
        return "halo", None, dims.pop() if len(dims) == 1 else None
    return "all_to_all", None, None


def _dim_along(mesh: Mesh, parts: Boxes, unions: Boxes, axis: int) -> int | None:
    """Return the dim along which the parts of the devices of an axis make up what each wants."""
    found: set[int] = set()
    stride = 1
    for size in mesh.shape[axis + 1 :]:
        stride *= size
    for device, union in enumerate(unions):
        first = device - mesh.coordinates(device)[axis] * stride
        row = [parts[first + n * stride] for n in range(mesh.shape[axis])]
        if union is None or any(box is None for box in row):
            return None
        dims = [
            dim
            for dim, (begin, end) in enumerate(union)
            if _tiles([box for box in row if box is not None], union, dim, begin, end)
        ]
        if len(dims) != 1:
            return None
        found.add(dims[0])
    return found.pop() if len(found) == 1 else None


def _tiles(row: Sequence[Box], union: Box, dim: int, begin: int, end: int) -> bool:
    at = begin
    for box in row:
        rest = box[:dim] + box[dim + 1 :]
        if box[dim][0] != at or rest != union[:dim] + union[dim + 1 :]:
            return False
        at = box[dim][1]
    return at == end
