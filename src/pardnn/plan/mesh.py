"""A mesh of devices and what each of them owns of a tensor, in DTensor's words.

A tensor's layout names, for each mesh axis in order, the tensor dim that is cut there, or None if
the devices along that axis all hold the same. Each axis cuts the block that the axes before it
left, so one dim may be cut several times and blocks stay contiguous.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from pardnn.cluster import STRICT

Box = tuple[tuple[int, int], ...]
"""First and last index per tensor dim, the last exclusive."""

Layout = tuple[int | None, ...]
"""Per mesh axis the tensor dim that is cut, None for whole."""


_WORD = re.compile(r"Replicate\(\)|Shard\(([0-9]+)\)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """Devices as a grid; the last axis runs fastest, device numbers are those of the cluster.

    Attributes:
        shape: Devices along each axis.
        names: Of the axes.
    """

    __pydantic_config__ = STRICT

    shape: tuple[int, ...]
    names: tuple[str, ...]

    @property
    def size(self) -> int:
        """Number of devices."""
        return math.prod(self.shape)

    def coordinates(self, device: int) -> tuple[int, ...]:
        """Position of a device along each axis."""
        found: list[int] = []
        for extent in reversed(self.shape):
            device, at = divmod(device, extent)
            found.append(at)
        return tuple(reversed(found))


def make_mesh(shape: Sequence[int]) -> Mesh:
    """Return a mesh with axes named "m0", "m1" and so on."""
    return Mesh(shape=tuple(shape), names=tuple(f"m{axis}" for axis in range(len(shape))))


def cut_points(extent: int, parts: int, multiple: int = 1) -> tuple[int, ...] | None:
    """Return where each part of a range begins, and the end; None if one would be empty.

    Args:
        extent: Length of the range.
        parts: How many; they differ by at most `multiple`.
        multiple: Of which lengths are multiples; the last part takes what is less than that.
    """
    units = -(-extent // multiple)
    if units < parts:
        return None
    return tuple(min(units * part // parts * multiple, extent) for part in range(parts + 1))


def owned_boxes(shape: Sequence[int], layout: Layout, mesh: Mesh) -> tuple[Box, ...] | None:
    """Return each device's box of a tensor; None if some device would have an empty one.

    Args:
        shape: Of the tensor.
        layout: The tensor dim that each mesh axis shards.
        mesh: The devices.

    Deviation from DTensor: parts of a dim that the axis does not divide differ by at most one,
    where DTensor's last parts may be empty.
    """
    boxes: list[Box] = [tuple((0, size) for size in shape)]
    for dim, parts in zip(layout, mesh.shape, strict=True):
        cut: list[Box] = []
        for box in boxes:
            if dim is None:
                cut += [box] * parts
                continue
            begin, end = box[dim]
            points = cut_points(end - begin, parts)
            if points is None:
                return None
            cut += [
                (*box[:dim], (begin + a, begin + b), *box[dim + 1 :])
                for a, b in itertools.pairwise(points)
            ]
        boxes = cut
    return tuple(boxes)


def placements(layout: Layout) -> tuple[str, ...]:
    """Return a layout in DTensor's words, one per mesh axis."""
    return tuple("Replicate()" if dim is None else f"Shard({dim})" for dim in layout)


def layout_of(words: tuple[str, ...]) -> Layout | None:
    """Return the layout that DTensor's words say; None if they say none. Undoes `placements`."""
    found: list[int | None] = []
    for word in words:
        match = _WORD.fullmatch(word)
        if match is None:
            return None
        found.append(None if match[1] is None else int(match[1]))
    return tuple(found)
