"""Algebra of boxes: the elements that a device needs or owns.

A box has a first and a last index per dim, the last exclusive. A shard is a box of a tensor.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

from pardnn.graph.ir import Tensor, contiguous_strides
from pardnn.plan.mesh import Box, Mesh

Slice = tuple[int, Box]
"""A device, and a box that is taken from its shard."""


def lengths(box: Box) -> tuple[int, ...]:
    """Return the shape of a box."""
    return tuple([end - begin for begin, end in box])


def whole(shape: Sequence[int]) -> Box:
    """Return the box that is all of a tensor."""
    return tuple([(0, size) for size in shape])


def volume(box: Box) -> int:
    """Number of elements of a box; 0 if it is empty."""
    return math.prod(max(0, end - begin) for begin, end in box)


def overlap(one: Box, other: Box) -> Box:
    """Return the intersection of two boxes, which may be empty."""
    return tuple([(max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True)])


def offset(outer: Box, inner: Box) -> Box:
    """Return a box in indices of the whole, given in indices of another box."""
    return tuple((low + a, low + b) for (low, _), (a, b) in zip(outer, inner, strict=True))


def clipped(box: Box, shape: Sequence[int]) -> Box:
    """Return a box clipped to the bounds of a tensor."""
    return overlap(box, whole(shape))


def inside(box: Box, other: Box) -> bool:
    """Whether a box lies in another one."""
    return all(c <= a and b <= d for (a, b), (c, d) in zip(box, other, strict=True))


def relative(box: Box, origin: Box) -> Box:
    """Return a box in indices of another box that contains it."""
    return tuple([(a - c, b - c) for (a, b), (c, _) in zip(box, origin, strict=True)])


def minus(box: Box, hole: Box) -> list[Box]:
    """Return disjoint boxes that make up `box` without `hole`, which it contains."""
    rest: list[Box] = []
    for dim, ((a, b), (c, d)) in enumerate(zip(box, hole, strict=True)):
        before, after = hole[:dim], box[dim + 1 :]
        rest += [(*before, ends, *after) for ends in ((a, c), (d, b)) if ends[0] < ends[1]]
    return rest


@functools.lru_cache(maxsize=1 << 15)
def cover(
    box: Box, owned: tuple[Box | None, ...], order: tuple[int, ...]
) -> tuple[tuple[Slice, ...], bool]:
    """Cover a box with disjoint slices of what devices own.

    Args:
        box: What is needed.
        owned: What each device has.
        order: Devices by preference. O(devices x slices).

    Returns:
        The slices, and whether they cover the whole box.
    """
    missing = [box] if volume(box) else []
    slices: list[Slice] = []
    for device in order:
        own = owned[device]
        if own is None or not missing:
            continue
        left: list[Box] = []
        for each in missing:
            common = overlap(each, own)
            if not volume(common):
                left.append(each)
                continue
            slices.append((device, common))
            left += minus(each, common)
        missing = left
    return tuple(slices), not missing


@functools.lru_cache(maxsize=256)
def nearest(mesh_shape: tuple[int, ...], device: int) -> tuple[int, ...]:
    """Return all devices of a mesh, first those that differ only along the last axes.

    The first axes have the slowest links. Devices fetch from different replicas.
    """
    mesh = Mesh(shape=mesh_shape, names=tuple(map(str, range(len(mesh_shape)))))
    at = mesh.coordinates(device)

    def distance(other: int) -> tuple[int, ...]:
        places = zip(mesh.coordinates(other), at, mesh_shape, strict=True)
        return tuple((there - here) % size for there, here, size in places)

    return tuple(
        sorted(range(mesh.size), key=lambda d: (tuple(x > 0 for x in distance(d)), distance(d)))
    )


def local_strides(tensor: Tensor, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return strides of a shard of a tensor: dense, in the tensor's order; None if contiguous.

    Dims that the tensor repeats without storing them (stride 0) stay so.
    """
    strides = tensor.strides
    if strides is None or shape == tensor.shape:
        return strides
    found = [0] * len(shape)
    step = 1
    for dim in sorted(range(len(shape)), key=lambda d: (-strides[d], d), reverse=True):
        if strides[dim]:
            found[dim] = step
            step *= max(shape[dim], 1)
    return tuple(found)


def new_strides(tensor: Tensor, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return strides of a new, dense tensor in the order of a tensor's; None if contiguous.

    Dims that the tensor repeats without storing them are outermost: kernels read along the inner
    ones, and some assume that the last has stride 1.
    """
    strides = tensor.strides
    if strides is None:
        return None
    found = [0] * len(shape)
    step = 1
    for dim in sorted(
        range(len(shape)), key=lambda d: (strides[d] != 0, -strides[d], d), reverse=True
    ):
        found[dim] = step
        step *= max(shape[dim], 1)
    return tuple(found)


def is_dense(tensor: Tensor, owned: Box, box: Box, *, is_new: bool = False) -> bool:
    """Whether a box of a local tensor is one run of memory, in any order of dims.

    Args:
        tensor: The whole tensor.
        owned: What the local one is of it.
        box: The box, which lies in it.
        is_new: Whether the local one is a new buffer, which stores repeated elements.
    """
    return _is_dense(tensor.shape, tensor.strides, lengths(owned), lengths(box), is_new)


@functools.lru_cache(maxsize=1 << 14)
def _is_dense(
    whole: tuple[int, ...] | None,
    strides: tuple[int, ...] | None,
    shape: tuple[int, ...],
    sizes: tuple[int, ...],
    is_new: bool,
) -> bool:
    tensor = Tensor(name="", bytes=0, shape=whole, strides=strides)
    strides = (new_strides if is_new else local_strides)(tensor, shape)
    return is_one_run(sizes, contiguous_strides(shape) if strides is None else strides)


def is_one_run(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether a view is one run of memory, in any order of dims.

    Args:
        shape: Of the view.
        strides: Of the view, in elements.
    """
    step = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size == 1:
            continue
        if stride != step:
            return False
        step *= size
    return True


def bytes_of(tensor: Tensor, shape: Sequence[int]) -> int:
    """Return the bytes of a shard of a tensor."""
    number = volume(whole(tensor.shape or ()))
    return tensor.bytes * volume(whole(shape)) // number if number else 0
