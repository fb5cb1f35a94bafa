"""The collective that a reshard amounts to: all-gather, reduce-scatter, halo exchange and so on.

Plans send point to point; the names of collectives are for people, and for libraries with them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from pardnn.plan.mesh import Box, Mesh
from pardnn.shard.boxes import clipped, inside

Boxes = tuple[Box | None, ...]


def collective_of(
    mesh: Mesh,
    owned: Sequence[Box | None],
    needed: Sequence[Box | None],
    shape: Sequence[int],
    reduced: Sequence[int] = (),
) -> dict[str, Any]:
    """Name the collective that a reshard or reduction amounts to.

    Args:
        mesh: The devices.
        owned: What each has, in indices of the whole tensor.
        needed: What each needs, None for nothing.
        shape: Of the whole tensor.
        reduced: Mesh axes along which partial results are combined.
    """
    inner = tuple(None if box is None else clipped(box, shape) for box in needed)
    name, axis, dim = _named(mesh, tuple(owned), inner, tuple(reduced))
    return {"collective": name, "axis": None if axis is None else mesh.names[axis], "dim": dim}


@functools.lru_cache(maxsize=4096)
def _named(
    mesh: Mesh, owned: Boxes, needed: Boxes, reduced: tuple[int, ...]
) -> tuple[str, int | None, int | None]:
    pairs = [(own, need) for own, need in zip(owned, needed, strict=True) if own and need]
    if reduced:
        axis = reduced[0] if len(reduced) == 1 else None
        if all(need == own for own, need in pairs):
            return "all_reduce", axis, None
        dim = None if axis is None else _dim_along(mesh, needed, owned, axis)
        return "reduce_scatter", axis if dim is not None else None, dim
    if all(inside(need, own) for own, need in pairs):
        return "slice", None, None
    for axis in range(len(mesh.shape)):
        dim = _dim_along(mesh, owned, needed, axis)
        if dim is not None:
            return "all_gather", axis, dim
    if all(inside(own, need) for own, need in pairs):
        dims = {d for own, need in pairs for d, ends in enumerate(own) if ends != need[d]}
        return "halo", None, dims.pop() if len(dims) == 1 else None
    return "all_to_all", None, None


def _dim_along(mesh: Mesh, shards: Boxes, needed: Boxes, axis: int) -> int | None:
    """Return the dim along which the shards of the devices of an axis tile what each needs."""
    found: set[int] = set()
    stride = 1
    for size in mesh.shape[axis + 1 :]:
        stride *= size
    for device, union in enumerate(needed):
        first = device - mesh.coordinates(device)[axis] * stride
        row = [shards[first + n * stride] for n in range(mesh.shape[axis])]
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
    reached = begin
    for box in row:
        rest = box[:dim] + box[dim + 1 :]
        if box[dim][0] != reached or rest != union[:dim] + union[dim + 1 :]:
            return False
        reached = box[dim][1]
    return reached == end
