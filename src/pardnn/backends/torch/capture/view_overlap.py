"""Overlap of two views of one storage: whether they are disjoint, or one is slices of the other.

Idea: write an address in digits over the strides of both views, largest first. If no sum of lower
digits reaches the next stride, this form is unique, each view is a box of digits, and boxes are
disjoint if the ranges of one digit are. Everything else counts as overlapping: sliding windows,
views of another dtype.
"""

from __future__ import annotations

from collections.abc import Sequence

from pardnn.backends.torch.capture.trace_ir import Geometry, Value


def are_disjoint(one: Geometry, other: Geometry) -> bool:
    """Return whether two views of one storage are known to have no element in common.

    O(dims squared).

    Args:
        one: Shape, strides, storage offset (elements) and dtype.
        other: The same of the other view.
    """
    if 0 in one[0] or 0 in other[0]:
        return True
    (begin, end), (other_begin, other_end) = span(one), span(other)
    if end <= other_begin or other_end <= begin:
        return True
    if one[3].itemsize != other[3].itemsize:
        return False
    strides = sorted({1, *_strides(one), *_strides(other)}, reverse=True)
    boxes = _box(one, strides), _box(other, strides)
    extent = 0
    for stride, *digits in reversed(list(zip(strides, *boxes, strict=True))):
        if extent >= stride:
            return False
        extent += stride * (max(end for _, end in digits) - 1)
    return any(a[1] <= b[0] or b[1] <= a[0] for a, b in zip(*boxes, strict=True))


def slices(base: Geometry, view: Geometry) -> list[tuple[int, int, int]] | None:
    """Return dim, begin and end of each slice that makes `view` of `base`; None if none do.

    Args:
        base: Shape, strides, storage offset (elements) and dtype of the larger view.
        view: The same of the view to be sliced out of it.
    """
    if base[1] != view[1] or base[3] != view[3]:
        return None
    rest, found = view[2] - base[2], list[tuple[int, int, int]]()
    for dim in sorted(range(len(base[0])), key=lambda d: -base[1][d]):
        begin, rest = divmod(rest, base[1][dim]) if base[1][dim] else (0, rest)
        if begin < 0 or begin + view[0][dim] > base[0][dim]:
            return None
        if view[0][dim] != base[0][dim]:
            found.append((dim, begin, begin + view[0][dim]))
    return sorted(found) if rest == 0 else None


def last_write(value: Value) -> Value | None:
    """Return the value written last that may overlap `value`; None if `value` is current.

    Amortised O(1): each write is compared once with a value.
    """
    storage, geometry = value.storage, value.geometry
    if storage is None or geometry is None:
        return None
    for number in range(len(storage.written) - 1, value.untouched - 1, -1):
        write = storage.written[number]
        if write.version <= value.version:
            break
        if write.geometry is None or not are_disjoint(geometry, write.geometry):
            return write
    value.untouched = len(storage.written)
    return None


def span(geometry: Geometry) -> tuple[int, int]:
    """Return the first byte of a view in its storage, and the byte after its last.

    Args:
        geometry: Shape, strides, storage offset (elements) and dtype; not empty.
    """
    shape, strides, offset, dtype = geometry
    last = offset + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    return offset * dtype.itemsize, (last + 1) * dtype.itemsize


def _strides(geometry: Geometry) -> list[int]:
    shape, strides, _, _ = geometry
    return [stride for size, stride in zip(shape, strides, strict=True) if size > 1 and stride]


def _box(geometry: Geometry, strides: Sequence[int]) -> list[tuple[int, int]]:
    """Return first and last digit, the last exclusive, of a view's addresses for each stride."""
    shape, own, rest, _ = geometry
    found: list[tuple[int, int]] = []
    for stride in strides:
        digit, rest = divmod(rest, stride)
        more = sum(n - 1 for n, each in zip(shape, own, strict=True) if each == stride)
        found.append((digit, digit + more + 1))
    return found
