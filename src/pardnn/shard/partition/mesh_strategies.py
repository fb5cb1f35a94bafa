"""Sharding strategies of one call over a whole mesh, as arrays.

Problem: the search tries thousands of strategies; `per_device.local_ops` builds each as objects.
Idea: a call is a number (`interning`), and cutting its loops gives numbers of other calls, with the
boxes that they read and write, for all loops and workers in one array. Devices with equal local
calls share this work, as do equal layers; a cut along a further mesh axis only adds the origins of
boxes. An input that is needed whole stays whole inside each worker group: these are the extra
inputs of step 2 of the recursion.
Complexity: O(distinct local calls x loops) loop cuts, the rest is array arithmetic.
Reference: Tofu (EuroSys 2019), section 5.2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int64
from numpy import ndarray

from pardnn.plan.mesh import Mesh
from pardnn.shard.cache import cached
from pardnn.shard.partition.axis_strategies import AxisStrategies, axis_strategies_of
from pardnn.shard.partition.call import Call, DimSlices
from pardnn.shard.partition.interning import classified, intern_call, read_slots
from pardnn.shard.sharding import AxisLoops

Flags = tuple[bool, ...]
"""Per mesh axis whether results along it are partial."""
Contents = Mapping[str, bool]
"""By slot whether values are read."""


@dataclass(frozen=True, eq=False)
class MeshStrategies:
    """Strategies by which n devices compute one call.

    Attributes:
        axes: By strategy, the loop that is cut at each mesh axis.
        dim_slices: Which dims of boxes belong to which tensor.
        sizes: Of all dims of all tensors, side by side.
        unclipped: By strategy and device, the boxes that it needs of the inputs, which may be out
            of bounds, and the boxes of its results in the whole ones.
        out_of_bounds: Whether some box is.
        contents: By strategy, by slot whether values are read.
        reduced: By strategy, by output, for each mesh axis, whether results along it are partial.
        origins: By strategy, the cut that gives its local calls.
    """

    axes: Sequence[AxisLoops]
    dim_slices: DimSlices
    sizes: Int64[ndarray, " dims"]
    unclipped: Int64[ndarray, "s n dims 2"]
    out_of_bounds: bool
    contents: Sequence[Contents]
    reduced: Sequence[tuple[Flags, ...]]
    origins: Sequence[_Origin]

    def __len__(self) -> int:
        """Return their number."""
        return len(self.axes)

    @cached_property
    def calls(self) -> list[tuple[int, ...]]:
        """By strategy, the number of each device's local call."""
        return [_calls(*origin) for origin in self.origins]

    @cached_property
    def boxes(self) -> Int64[ndarray, "s n dims 2"]:
        """The boxes that devices need and make, clipped to the tensors."""
        if not self.out_of_bounds:
            return self.unclipped
        return np.minimum(np.maximum(self.unclipped, 0), self.sizes[:, None])

    def region(self, slot: str) -> Int64[ndarray, "s n rank 2"]:
        """Return the boxes that devices need of an input."""
        return self.boxes[:, :, self.dim_slices.inputs[slot]]

    def result(self, output: int) -> Int64[ndarray, "s n rank 2"] | None:
        """Return the boxes of the devices' results in the whole; None: not computed."""
        dims = self.dim_slices.outputs[output]
        return None if dims is None else self.boxes[:, :, dims]

    def read(self, slot: str) -> list[bool]:
        """Return for each strategy whether values of an input are read."""
        return [contents.get(slot, False) for contents in self.contents]

    def subset(self, chosen: Sequence[int]) -> MeshStrategies:
        """Return some of the strategies, by position."""
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


#: By number of a call; by numbers of devices' calls, slices and workers; by arguments.
_UNCUT: dict[int, MeshStrategies] = cached({})
_EXTENSIONS: dict[Any, _Extension] = cached({})
_OWNED: dict[Any, Int64[ndarray, "n rank 2"] | None] = cached({})


class _Extension(NamedTuple):
    """What devices do if one of their loops is cut, for each loop that all of them can cut.

    Attributes:
        by_call: Strategies along the new axis, by number of a local call.
        calls: Number of each device's local call.
        places: Position of each loop among `boxes`; that of None, all workers alike, is the last.
        boxes: In indices of each device's local call; one device if all are alike.
        contents: By loop, by slot whether any device reads values.
        flags: By loop and output, whether results are partial.
        out_of_bounds: Whether some box is.
    """

    by_call: Mapping[int, AxisStrategies]
    calls: tuple[int, ...]
    places: Mapping[str | None, int]
    boxes: Int64[ndarray, "l n workers dims 2"]
    contents: Mapping[str | None, Contents]
    flags: Mapping[str | None, Flags]
    out_of_bounds: bool


class _Origin(NamedTuple):
    """The last cut of a strategy: what was cut, the calls before it, and the loop."""

    extension: _Extension | None
    calls: tuple[int, ...]
    loop: str | None


def _calls(
    extension: _Extension | None, calls: tuple[int, ...], loop: str | None
) -> tuple[int, ...]:
    """Return the number of each device's local call after a cut."""
    if extension is None:
        return calls
    found = {number: each.calls(loop) for number, each in extension.by_call.items()}
    return tuple([local for number in calls for local in found[number]])


def uncut(number: int) -> MeshStrategies:
    """Return the strategy of an empty mesh: its only device runs the whole call."""
    if number not in _UNCUT:
        shape_class, dim_sizes = classified(number)
        dim_slices = shape_class.dim_slices
        unclipped = np.zeros((1, 1, dim_slices.num_dims, 2), dtype=np.int64)
        unclipped[0, 0, :, 1] = dim_sizes
        contents = read_slots(number)
        reduced: tuple[Flags, ...] = ((),) * len(dim_slices.outputs)
        origin = _Origin(None, (number,), None)
        sizes = unclipped[0, 0, :, 1]
        _UNCUT[number] = MeshStrategies(
            [()], dim_slices, sizes, unclipped, False, [contents], [reduced], [origin]
        )
    return _UNCUT[number]


def extend(
    strategies: MeshStrategies, choices: Sequence[str | None], num_workers: int
) -> MeshStrategies:
    """Return strategies over one more mesh axis, along which one loop is cut, or none.

    Args:
        strategies: Over the axes before.
        choices: Loops; None: all devices along the new axis do the same.
        num_workers: Devices along the new axis.

    Returns:
        Each strategy with each loop that can be cut in this way on every device.
    """
    dim_slices = strategies.dim_slices
    extensions = [_extension(calls, dim_slices, num_workers) for calls in strategies.calls]
    taken = [[loop for loop in choices if loop in each.places] for each in extensions]
    count, devices = sum(map(len, taken)), strategies.unclipped.shape[1]
    unclipped = np.empty((count, devices, num_workers, dim_slices.num_dims, 2), dtype=np.int64)
    begin = 0
    for each, loops, outer in zip(extensions, taken, strategies.unclipped, strict=True):
        places = [each.places[loop] for loop in loops]
        is_row = places == list(range(len(places)))
        boxes = each.boxes[: len(places)] if is_row else each.boxes[places]
        np.add(boxes, outer[:, None, :, :1], out=unclipped[begin : begin + len(places)])
        begin += len(places)
    rows = [
        (n, each, loop)
        for n, (each, loops) in enumerate(zip(extensions, taken, strict=True))
        for loop in loops
    ]
    return MeshStrategies(
        [(*strategies.axes[n], loop) for n, _, loop in rows],
        dim_slices,
        strategies.sizes,
        unclipped.reshape(count, devices * num_workers, dim_slices.num_dims, 2),
        strategies.out_of_bounds or any(each.out_of_bounds for each in extensions),
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


def _extension(calls: tuple[int, ...], dim_slices: DimSlices, num_workers: int) -> _Extension:
    key = (calls, dim_slices, num_workers)
    if key not in _EXTENSIONS:
        _EXTENSIONS[key] = _find_extension(calls, dim_slices, num_workers)
    return _EXTENSIONS[key]


def _find_extension(calls: tuple[int, ...], dim_slices: DimSlices, num_workers: int) -> _Extension:
    by_call = {number: axis_strategies_of(number, num_workers) for number in dict.fromkeys(calls)}
    first = next(iter(by_call.values()))
    out_of_bounds = any(each.out_of_bounds for each in by_call.values())
    if len(by_call) == 1:
        boxes = _aligned(first, dim_slices)[:, None]
        return _Extension(
            by_call, calls, first.places, boxes, first.contents, first.flags, out_of_bounds
        )
    names = [loop for loop in first.places if all(loop in s.places for s in by_call.values())]
    rows = {
        number: _aligned(each, dim_slices)[[each.places[loop] for loop in names]]
        for number, each in by_call.items()
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


def _aligned(
    axis_strategies: AxisStrategies, dim_slices: DimSlices
) -> Int64[ndarray, "l workers dims 2"]:
    """Return boxes by other slices of dims; inputs that the local calls lack are left empty."""
    if axis_strategies.dim_slices is dim_slices:
        return axis_strategies.boxes
    boxes = np.zeros((*axis_strategies.boxes.shape[:2], dim_slices.num_dims, 2), dtype=np.int64)
    for slot, dims in axis_strategies.dim_slices.inputs.items():
        if slot in dim_slices.inputs:
            boxes[:, :, dim_slices.inputs[slot]] = axis_strategies.boxes[:, :, dims]
    for dims, there in zip(axis_strategies.dim_slices.outputs, dim_slices.outputs, strict=True):
        if dims is not None and there is not None:
            boxes[:, :, there] = axis_strategies.boxes[:, :, dims]
    return boxes


def mesh_strategy_of(call: Call, axes: AxisLoops, mesh: Mesh) -> MeshStrategies | None:
    """Return one strategy of a call, as the arrays of boxes from which costs are computed.

    Args:
        call: The call; equal to what `per_device.local_ops` builds for it.
        axes: The loop that is cut at each mesh axis.
        mesh: The devices.

    Returns:
        Strategies with this one alone; None if the loops cannot be cut in this way.
    """
    found = uncut(intern_call(call))
    for loop, num_workers in zip(axes, mesh.shape, strict=True):
        found = extend(found, (loop,), num_workers)
    return found if len(found) else None


def owned_array(
    shape: tuple[int, ...], layout: tuple[int | None, ...], axis_sizes: tuple[int, ...]
) -> Int64[ndarray, "n rank 2"] | None:
    """Return each device's box of a tensor; None if one would be empty.

    Equal to `plan.mesh.owned_boxes`, as an array that grows axis by axis.

    Args:
        shape: Of the tensor.
        layout: The dim that is cut at each mesh axis, None for none.
        axis_sizes: Devices along each mesh axis.
    """
    key = (shape, layout, axis_sizes)
    if key not in _OWNED:
        if layout:
            outer = owned_array(shape, layout[:-1], axis_sizes[:-1])
            found = None if outer is None else _cut(outer, layout[-1], axis_sizes[-1])
        else:
            found = np.zeros((1, len(shape), 2), dtype=np.int64)
            found[0, :, 1] = shape
        _OWNED[key] = found
    return _OWNED[key]


def _cut(
    outer: Int64[ndarray, "n rank 2"], dim: int | None, num_workers: int
) -> Int64[ndarray, "m rank 2"] | None:
    boxes = np.repeat(outer, num_workers, axis=0)
    if dim is None:
        return boxes
    begin = outer[:, dim, :1]
    extent = outer[:, dim, 1:] - begin
    if int(extent.min()) < num_workers:
        return None
    points = begin + extent * np.arange(num_workers + 1) // num_workers
    boxes[:, dim, 0] = points[:, :-1].reshape(-1)
    boxes[:, dim, 1] = points[:, 1:].reshape(-1)
    return boxes
