"""A mesh of devices and what each of them owns of a tensor, in DTensor's words.

A tensor's layout names, for each mesh axis in order, the tensor dim that is cut there, or None if
the devices along that axis all hold the same. Each axis cuts the block that the axes before it
left, so one dim may be cut several times and blocks stay contiguous. Of a sum of pieces that is not
added up over the devices yet, each device along an axis holds a term (`PARTIAL`).
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from pardnn.cluster import STRICT
from pardnn.graph.ir import Tensor

Box = tuple[tuple[int, int], ...]
"""First and last index per tensor dim, the last exclusive."""

Layout = tuple[int | None, ...]
"""Per mesh axis the tensor dim that is cut, None for whole, `PARTIAL` for a term of a sum."""

PARTIAL = -2
"""In a layout: each device along this mesh axis holds a term, and their sum is the tensor."""

FREE = -1
"""In a layout that is demanded: whatever this mesh axis does."""

Parts = int | tuple[int, ...]
"""How a range is divided: a number of equal parts, or the shares of unlike ones."""


#: Products of shares and sizes still fit 64 bits.
MAX_SHARE = 1 << 20

_WORD = re.compile(r"Replicate\(\)|Partial\(\)|Shard\(([0-9]+)\)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """Devices as a grid; the last axis runs fastest, device numbers are those of the cluster.

    Attributes:
        shape: Devices along each axis.
        names: Of the axes.
        shares: Of the devices along each axis, as whole numbers: 3 and 1 for three quarters and
            one. Empty where devices get equal parts.
    """

    __pydantic_config__ = STRICT

    shape: tuple[int, ...]
    names: tuple[str, ...]
    shares: tuple[tuple[int, ...], ...] = ()

    @property
    def parts(self) -> tuple[Parts, ...]:
        """How each axis divides what it cuts."""
        return self.shares or self.shape

    def fractions(self) -> tuple[float, ...]:
        """Each device's part of what every axis cuts; their sum is 1."""
        rows = self.shares or tuple((1,) * size for size in self.shape)
        total = math.prod(map(sum, rows))
        return tuple(math.prod(each) / total for each in itertools.product(*rows))

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


def make_mesh(shape: Sequence[int], shares: Sequence[tuple[int, ...]] = ()) -> Mesh:
    """Return a mesh with axes named "m0", "m1" and so on."""
    names = tuple(f"m{axis}" for axis in range(len(shape)))
    return Mesh(shape=tuple(shape), names=names, shares=tuple(shares))


def mesh_problem(mesh: Mesh) -> str | None:
    """Return what is wrong with a mesh, as a sentence; None if nothing is."""
    if min(mesh.shape, default=0) < 1 or len(mesh.names) != len(mesh.shape):
        return f"a mesh {list(mesh.shape)} with axes {list(mesh.names)!r:.80}"
    if mesh.shares and tuple(map(len, mesh.shares)) != mesh.shape:
        return f"shares {mesh.shares!r:.80} on a mesh {list(mesh.shape)}"
    if any(not 1 <= share <= MAX_SHARE for row in mesh.shares for share in row):
        return f"shares {mesh.shares!r:.80}; each is 1 to {MAX_SHARE}"
    return None


def num_parts(parts: Parts) -> int:
    """Return how many parts there are."""
    return parts if isinstance(parts, int) else len(parts)


def cut_points(extent: int, parts: Parts, multiple: int = 1) -> tuple[int, ...] | None:
    """Return where each part of a range begins, and the end; None if one would be empty.

    Args:
        extent: Length of the range.
        parts: How many, which differ by at most `multiple`; or the share of each, which it is
            within `multiple` of where no part would be empty.
        multiple: Of which lengths are multiples; the last part takes what is less than that.
    """
    units, count = -(-extent // multiple), num_parts(parts)
    if units < count:
        return None
    if isinstance(parts, int):
        ends = [units * part // count for part in range(count + 1)]
    else:
        total = sum(parts)
        ends = [units * end // total for end in itertools.accumulate(parts, initial=0)]
        for part in range(1, count):  # of at least one unit, and as many for those that follow
            ends[part] = min(max(ends[part], ends[part - 1] + 1), units - count + part)
    return tuple([min(end * multiple, extent) for end in ends])


def owned_boxes(shape: Sequence[int], layout: Layout, mesh: Mesh) -> tuple[Box, ...] | None:
    """Return each device's box of a tensor; None if some device would have an empty one.

    Args:
        shape: Of the tensor.
        layout: The tensor dim that each mesh axis shards.
        mesh: The devices.

    Deviations from DTensor: parts of a dim that the axis does not divide differ by at most one,
    where DTensor's last parts may be empty; and they may be as unlike as the devices are.
    """
    return _boxes(tuple(shape), tuple(layout), mesh.parts)


@functools.lru_cache(maxsize=4096)  # most tensors of a step are alike
def _boxes(
    shape: tuple[int, ...], layout: Layout, axes: tuple[Parts, ...]
) -> tuple[Box, ...] | None:
    boxes: list[Box] = [tuple((0, size) for size in shape)]
    for dim, parts in zip(layout, axes, strict=True):
        cut: list[Box] = []
        for box in boxes:
            if dim in (None, PARTIAL):
                cut += [box] * num_parts(parts)
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
    words = {None: "Replicate()", PARTIAL: "Partial()", FREE: "any"}
    return tuple(words.get(dim, f"Shard({dim})") for dim in layout)


def meets(layout: Layout, demanded: Layout) -> bool:
    """Return whether a layout is what is demanded, where that is not free."""
    return all(d in (FREE, own) for own, d in zip(layout, demanded, strict=True))


def layout_of(words: tuple[str, ...]) -> Layout | None:
    """Return the layout that DTensor's words say; None if they say none. Undoes `placements`."""
    found: list[int | None] = []
    for word in words:
        match = _WORD.fullmatch(word)
        if match is None:
            return None
        dim = PARTIAL if word == "Partial()" else None
        found.append(dim if match[1] is None else int(match[1]))
    return tuple(found)


def boxes_of(tensor: Tensor, words: tuple[str, ...], mesh: Mesh) -> tuple[Box, ...] | None:
    """Return what each device owns of a tensor; None if it cannot be laid out so.

    Args:
        tensor: Of the graph.
        words: Its placements, in DTensor's words, one per mesh axis.
        mesh: The devices.
    """
    layout, shape = layout_of(words), tensor.shape or ()
    if layout is None or len(layout) != len(mesh.shape):
        return None
    if any(dim is not None and dim >= len(shape) for dim in layout):
        return None
    return owned_boxes(shape, layout, mesh)
