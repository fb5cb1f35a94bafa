"""Sharding strategies of one call over a whole mesh, as arrays.

Problem: the search tries thousands of strategies; `per_device.local_ops` builds each as objects.
Idea: a call is a number (`interning`), and cutting its loops gives numbers of other calls with the
boxes of what they read and write, those of all loops and workers in one array. Devices whose local
calls are equal share that work, as do equal layers; a cut along a further mesh axis only adds the
origins of boxes. An input that is needed whole stays whole inside each worker group, which is how
the extra inputs of step 2 of the recursion are carried along.
Complexity: O(distinct local calls x loops) loop cuts, the rest is array arithmetic.
Reference: Tofu (EuroSys 2019), section 5.2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64
from numpy import ndarray

from pardnn.plan.mesh import Mesh
from pardnn.shard.partition.axis_strategies import AxisStrategies, axis_strategies_of
from pardnn.shard.partition.call import Call, DimSlices
from pardnn.shard.partition.interning import KEPT, intern_call
from pardnn.shard.partition.per_device import AxisLoops

Flags = tuple[bool, ...]
Contents = Mapping[str, bool]


@dataclass(frozen=True, eq=False)
class MeshStrategies:
    """Ways in which n devices compute one call.

    Attributes:
        axes: Of each way, the loop that is cut at each mesh axis.
        dim_slices: Which dims of boxes are whose.
        sizes: Of all dims of all tensors, side by side.
        unclipped: What each device needs of the inputs, which may stick out of them, and what its
            results are of the whole ones.
        out_of_bounds: Whether something sticks out.
        contents: Of each way, by slot whether values are read.
        reduced: Of each way, by output, for each mesh axis, whether results along it are partial.
        origins: Of each way, what its calls follow from.
    """

    axes: Sequence[AxisLoops]
    dim_slices: DimSlices
    sizes: Int64[ndarray, " dims"]
    unclipped: Int64[ndarray, "a n dims 2"]
    out_of_bounds: bool
    contents: Sequence[Contents]
    reduced: Sequence[tuple[Flags, ...]]
    origins: Sequence[_Origin]

    def __len__(self) -> int:
        """Return their number."""
        return len(self.axes)

    @cached_property
    def calls(self) -> list[tuple[int, ...]]:
        """Number of each device's local call, of each way."""
        return [_calls(*origin) for origin in self.origins]

    @cached_property
    def boxes(self) -> Int64[ndarray, "a n dims 2"]:
        """What devices need and make, without what sticks out of the tensors."""
        if not self.out_of_bounds:
            return self.unclipped
        return np.minimum(np.maximum(self.unclipped, 0), self.sizes[:, None])

    def region(self, slot: str) -> Int64[ndarray, "a n rank 2"]:
        """Return what devices need of an input."""
        return self.boxes[:, :, self.dim_slices.slots[slot]]

    def result(self, output: int) -> Int64[ndarray, "a n rank 2"] | None:
        """Return what the devices' results are of the whole; None: not computed."""
        dims = self.dim_slices.outputs[output]
        return None if dims is None else self.boxes[:, :, dims]

    def read(self, slot: str) -> list[bool]:
        """Return for each way whether values of an input are read."""
        return [contents.get(slot, False) for contents in self.contents]

    def subset(self, chosen: Sequence[int]) -> MeshStrategies:
        """Return some of the ways."""
        return MeshStrategies(
            [self.axes[i] for i in chosen],
            self.dim_slices,
            self.sizes,
            self.unclipped[list(chosen)],
            self.out_of_bounds,
            [self.contents[i] for i in chosen],
            [self.reduced[i] for i in chosen],
            [self.origins[i] for i in chosen],
        )


class _Extension(NamedTuple):
    """What devices do if one of their loops is cut, for each loop that all of them can cut.

    Attributes:
        by_call: By number of a call.
        calls: Number of each device.
        places: Position of each loop among `boxes`; that of None, all workers alike, is the last.
        boxes: Of pieces, in indices of each device's call; one device if all are alike.
        contents: By loop, by slot whether any device reads values.
        flags: By loop and output, whether results are partial.
        out_of_bounds: Whether something sticks out.
    """

    by_call: Mapping[int, AxisStrategies]
    calls: tuple[int, ...]
    places: Mapping[str | None, int]
    boxes: Int64[ndarray, "l n workers dims 2"]
    contents: Mapping[str | None, Contents]
    flags: Mapping[str | None, Flags]
    out_of_bounds: bool


class _Origin(NamedTuple):
    """A cut of calls."""

    next: _Extension | None
    calls: tuple[int, ...]
    loop: str | None


def _calls(
    following: _Extension | None, calls: tuple[int, ...], loop: str | None
) -> tuple[int, ...]:
    """Return the number of each device's call after a cut."""
    if following is None:
        return calls
    found = {
        number: axis_strategies.calls(loop) for number, axis_strategies in following.by_call.items()
    }
    return tuple([local for number in calls for local in found[number]])


def whole(number: int) -> MeshStrategies:
    """Return what the only device of an empty mesh does: all of it, tensors named by slot."""
    key = ("whole", number)
    if key not in KEPT.others:
        shape_class, row = KEPT.calls[number]
        dim_slices = shape_class.dim_slices
        unclipped = np.zeros((1, 1, dim_slices.width, 2), dtype=np.int64)
        unclipped[0, 0, :, 1] = row
        contents = dict.fromkeys(dim_slices.slots, True)
        reduced: tuple[Flags, ...] = ((),) * len(dim_slices.outputs)
        origin = _Origin(None, (number,), None)
        sizes = unclipped[0, 0, :, 1]
        KEPT.others[key] = MeshStrategies(
            [()], dim_slices, sizes, unclipped, False, [contents], [reduced], [origin]
        )
    return KEPT.others[key]


def extend(
    strategies: MeshStrategies, choices: Sequence[str | None], axis_sizes: int
) -> MeshStrategies:
    """Return ways over one more mesh axis, along which one loop is cut, or none.

    Args:
        strategies: Over the axes before.
        choices: Loops; None: all devices along the new axis do the same.
        axis_sizes: Devices along the new axis.

    Returns:
        Each way with each loop that can be cut so on every device.
    """
    following = [_extension(calls, strategies.dim_slices, axis_sizes) for calls in strategies.calls]
    taken = [[loop for loop in choices if loop in each.places] for each in following]
    count, devices = sum(map(len, taken)), strategies.unclipped.shape[1]
    unclipped = np.empty(
        (count, devices, axis_sizes, strategies.dim_slices.width, 2), dtype=np.int64
    )
    begin = 0
    for each, loops, outer in zip(following, taken, strategies.unclipped, strict=True):
        places = [each.places[loop] for loop in loops]
        is_row = places == list(range(len(places)))
        boxes = each.boxes[: len(places)] if is_row else each.boxes[places]
        np.add(boxes, outer[:, None, :, :1], out=unclipped[begin : begin + len(places)])
        begin += len(places)
    rows = [
        (n, each, loop)
        for n, (each, loops) in enumerate(zip(following, taken, strict=True))
        for loop in loops
    ]
    return MeshStrategies(
        [(*strategies.axes[n], loop) for n, _, loop in rows],
        strategies.dim_slices,
        strategies.sizes,
        unclipped.reshape(count, devices * axis_sizes, strategies.dim_slices.width, 2),
        strategies.out_of_bounds or any(each.out_of_bounds for each in following),
        [_read(strategies.contents[n], each.contents[loop]) for n, each, loop in rows],
        [_lengthened(strategies.reduced[n], each.flags[loop]) for n, each, loop in rows],
        [_Origin(each, each.calls, loop) for _, each, loop in rows],
    )


def _read(outer: Contents, inner: Contents) -> Contents:
    """Return which values are read after a cut."""
    if not inner or inner == outer:
        return outer
    return {slot: is_read and inner.get(slot, False) for slot, is_read in outer.items()}


def _lengthened(reduced: tuple[Flags, ...], flags: Flags) -> tuple[Flags, ...]:
    return tuple([(*outer, flag) for outer, flag in zip(reduced, flags, strict=True)])


def _extension(calls: tuple[int, ...], dim_slices: DimSlices, axis_sizes: int) -> _Extension:
    key = ("next", calls, dim_slices, axis_sizes)
    if key not in KEPT.others:
        KEPT.others[key] = _find_extension(calls, dim_slices, axis_sizes)
    return KEPT.others[key]


def _find_extension(calls: tuple[int, ...], dim_slices: DimSlices, axis_sizes: int) -> _Extension:
    by_call = {number: axis_strategies_of(number, axis_sizes) for number in dict.fromkeys(calls)}
    first = next(iter(by_call.values()))
    out_of_bounds = any(axis_strategies.out_of_bounds for axis_strategies in by_call.values())
    if len(by_call) == 1:
        boxes = _aligned(first, dim_slices)[:, None]
        return _Extension(
            by_call, calls, first.places, boxes, first.contents, first.flags, out_of_bounds
        )
    names = [loop for loop in first.places if all(loop in s.places for s in by_call.values())]
    rows = {
        number: _aligned(axis_strategies, dim_slices)[
            [axis_strategies.places[loop] for loop in names]
        ]
        for number, axis_strategies in by_call.items()
    }
    boxes = np.stack([rows[number] for number in calls], axis=1)
    contents = {loop: _any_of([s.contents[loop] for s in by_call.values()]) for loop in names}
    places = {loop: place for place, loop in enumerate(names)}
    return _Extension(by_call, calls, places, boxes, contents, first.flags, out_of_bounds)


def _any_of(contents: Sequence[Contents]) -> Contents:
    """Return which values some of several devices read."""
    first = contents[0]
    if all(other == first for other in contents):
        return first
    return {slot: any(c.get(slot, False) for c in contents) for c in contents for slot in c}


def _aligned(axis_strategies: AxisStrategies, dim_slices: DimSlices) -> ndarray:
    """Return boxes in another form, whose inputs that the pieces do not have are left empty."""
    if axis_strategies.dim_slices is dim_slices:
        return axis_strategies.boxes
    boxes = np.zeros((*axis_strategies.boxes.shape[:2], dim_slices.width, 2), dtype=np.int64)
    for slot, dims in axis_strategies.dim_slices.slots.items():
        if slot in dim_slices.slots:
            boxes[:, :, dim_slices.slots[slot]] = axis_strategies.boxes[:, :, dims]
    for dims, there in zip(axis_strategies.dim_slices.outputs, dim_slices.outputs, strict=True):
        if dims is not None and there is not None:
            boxes[:, :, there] = axis_strategies.boxes[:, :, dims]
    return boxes


def mesh_strategy_of(call: Call, axes: AxisLoops, mesh: Mesh) -> MeshStrategies | None:
    """Return what the devices of a mesh do when the loops `axes` are cut; None if they cannot be.

    It is the only one of its ways. The same as `local_ops`, for costs.
    """
    found = whole(intern_call(call))
    for axis, axis_sizes in zip(axes, mesh.shape, strict=True):
        found = extend(found, (axis,), axis_sizes)
    return found if len(found) else None


def owned_array(
    shape: tuple[int, ...], layout: tuple[int | None, ...], axis_sizes: tuple[int, ...]
) -> Int64[ndarray, "n rank 2"] | None:
    """Return each device's box of a tensor; None if one would be empty. See `owned_boxes`."""
    key = ("owned", shape, layout, axis_sizes)
    if key not in KEPT.others:
        if layout:
            outer = owned_array(shape, layout[:-1], axis_sizes[:-1])
            found = None if outer is None else _cut(outer, layout[-1], axis_sizes[-1])
        else:
            found = np.zeros((1, len(shape), 2), dtype=np.int64)
            found[0, :, 1] = shape
        KEPT.others[key] = found
    return KEPT.others[key]


def _cut(outer: ndarray, dim: int | None, axis_sizes: int) -> ndarray | None:
    boxes = np.repeat(outer, axis_sizes, axis=0)
    if dim is None:
        return boxes
    begin = outer[:, dim, :1]
    extent = outer[:, dim, 1:] - begin
    if int(extent.min()) < axis_sizes:
        return None
    points = begin + extent * np.arange(axis_sizes + 1) // axis_sizes
    boxes[:, dim, 0] = points[:, :-1].reshape(-1)
    boxes[:, dim, 1] = points[:, 1:].reshape(-1)
    return boxes
