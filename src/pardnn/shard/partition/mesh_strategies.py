"""What every device of a mesh does of one call, as arrays: `leaves` for those who try thousands.

Idea: a call is a number (`interned`), and cutting its loops gives numbers of other calls with the
boxes of what they read and write, those of all loops and workers in one array. Devices whose local
calls are equal share that work, as do equal layers; a cut along a further mesh axis only adds
boxes up.
Complexity: O(distinct local calls x loops) stencils, the rest is array arithmetic.
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
from pardnn.shard.partition.axis_strategies import Split, splits_of
from pardnn.shard.partition.call import Call, Form
from pardnn.shard.partition.interning import KEPT, intern_call
from pardnn.shard.partition.per_device import Axes

Flags = tuple[bool, ...]
Contents = Mapping[str, bool]


@dataclass(frozen=True, eq=False)
class Ways:
    """Ways in which n devices compute one call.

    Attributes:
        axes: Of each way, the loop that is cut at each mesh axis.
        form: Which dims of boxes are whose.
        sizes: Of all dims of all tensors, side by side.
        raw: What each device needs of the inputs, which may stick out of them, and what its
            results are of the whole ones.
        sticks: Whether something sticks out.
        contents: Of each way, by slot whether values are read.
        reduced: Of each way, by output, for each mesh axis, whether results along it are partial.
        origins: Of each way, what its calls follow from.
    """

    axes: Sequence[Axes]
    form: Form
    sizes: Int64[ndarray, " dims"]
    raw: Int64[ndarray, "a n dims 2"]
    sticks: bool
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
        if not self.sticks:
            return self.raw
        return np.minimum(np.maximum(self.raw, 0), self.sizes[:, None])

    def region(self, slot: str) -> Int64[ndarray, "a n rank 2"]:
        """Return what devices need of an input."""
        return self.boxes[:, :, self.form.slots[slot]]

    def share(self, output: int) -> Int64[ndarray, "a n rank 2"] | None:
        """Return what the devices' results are of the whole; None: not computed."""
        dims = self.form.outputs[output]
        return None if dims is None else self.boxes[:, :, dims]

    def read(self, slot: str) -> list[bool]:
        """Return for each way whether values of an input are read."""
        return [contents.get(slot, False) for contents in self.contents]

    def only(self, chosen: Sequence[int]) -> Ways:
        """Return some of the ways."""
        return Ways(
            [self.axes[i] for i in chosen],
            self.form,
            self.sizes,
            self.raw[list(chosen)],
            self.sticks,
            [self.contents[i] for i in chosen],
            [self.reduced[i] for i in chosen],
            [self.origins[i] for i in chosen],
        )


class _Next(NamedTuple):
    """What devices do if one of their loops is cut, for each loop that all of them can cut.

    Attributes:
        splits: By number of a call.
        calls: Number of each device.
        loops: Place of each loop among `boxes`; that of None, all workers alike, is the last.
        boxes: Of pieces, in indices of each device's call; one device if all are alike.
        contents: By loop, by slot whether any device reads values.
        flags: By loop and output, whether results are partial.
        sticks: Whether something sticks out.
    """

    splits: Mapping[int, Split]
    calls: tuple[int, ...]
    loops: Mapping[str | None, int]
    boxes: Int64[ndarray, "l n parts dims 2"]
    contents: Mapping[str | None, Contents]
    flags: Mapping[str | None, Flags]
    sticks: bool


class _Origin(NamedTuple):
    """A cut of calls."""

    next: _Next | None
    calls: tuple[int, ...]
    loop: str | None


def _calls(following: _Next | None, calls: tuple[int, ...], loop: str | None) -> tuple[int, ...]:
    """Return the number of each device's call after a cut."""
    if following is None:
        return calls
    found = {number: split.calls(loop) for number, split in following.splits.items()}
    return tuple([piece for number in calls for piece in found[number]])


def whole(number: int) -> Ways:
    """Return what the only device of an empty mesh does: all of it, tensors named by slot."""
    key = ("whole", number)
    if key not in KEPT.others:
        family, row = KEPT.calls[number]
        form = family.form
        raw = np.zeros((1, 1, form.width, 2), dtype=np.int64)
        raw[0, 0, :, 1] = row
        contents = dict.fromkeys(form.slots, True)
        reduced: tuple[Flags, ...] = ((),) * len(form.outputs)
        origin = _Origin(None, (number,), None)
        sizes = raw[0, 0, :, 1]
        KEPT.others[key] = Ways([()], form, sizes, raw, False, [contents], [reduced], [origin])
    return KEPT.others[key]


def extended(ways: Ways, choices: Sequence[str | None], parts: int) -> Ways:
    """Return ways over one more mesh axis, along which one loop is cut, or none.

    Args:
        ways: Over the axes before.
        choices: Loops; None: all devices along the new axis do the same.
        parts: Devices along the new axis.

    Returns:
        Each way with each loop that can be cut so on every device.
    """
    following = [_next(calls, ways.form, parts) for calls in ways.calls]
    taken = [[loop for loop in choices if loop in each.loops] for each in following]
    count, devices = sum(map(len, taken)), ways.raw.shape[1]
    raw = np.empty((count, devices, parts, ways.form.width, 2), dtype=np.int64)
    begin = 0
    for each, loops, outer in zip(following, taken, ways.raw, strict=True):
        places = [each.loops[loop] for loop in loops]
        is_row = places == list(range(len(places)))
        boxes = each.boxes[: len(places)] if is_row else each.boxes[places]
        np.add(boxes, outer[:, None, :, :1], out=raw[begin : begin + len(places)])
        begin += len(places)
    rows = [
        (n, each, loop)
        for n, (each, loops) in enumerate(zip(following, taken, strict=True))
        for loop in loops
    ]
    return Ways(
        [(*ways.axes[n], loop) for n, _, loop in rows],
        ways.form,
        ways.sizes,
        raw.reshape(count, devices * parts, ways.form.width, 2),
        ways.sticks or any(each.sticks for each in following),
        [_read(ways.contents[n], each.contents[loop]) for n, each, loop in rows],
        [_longer(ways.reduced[n], each.flags[loop]) for n, each, loop in rows],
        [_Origin(each, each.calls, loop) for _, each, loop in rows],
    )


def _read(outer: Contents, inner: Contents) -> Contents:
    """Return which values are read after a cut."""
    if not inner or inner == outer:
        return outer
    return {slot: is_read and inner.get(slot, False) for slot, is_read in outer.items()}


def _longer(reduced: tuple[Flags, ...], flags: Flags) -> tuple[Flags, ...]:
    return tuple([(*outer, flag) for outer, flag in zip(reduced, flags, strict=True)])


def _next(calls: tuple[int, ...], form: Form, parts: int) -> _Next:
    key = ("next", calls, form, parts)
    if key not in KEPT.others:
        KEPT.others[key] = _find_next(calls, form, parts)
    return KEPT.others[key]


def _find_next(calls: tuple[int, ...], form: Form, parts: int) -> _Next:
    splits = {number: splits_of(number, parts) for number in dict.fromkeys(calls)}
    first = next(iter(splits.values()))
    sticks = any(split.sticks for split in splits.values())
    if len(splits) == 1:
        boxes = _aligned(first, form)[:, None]
        return _Next(splits, calls, first.loops, boxes, first.contents, first.flags, sticks)
    names = [loop for loop in first.loops if all(loop in s.loops for s in splits.values())]
    rows = {
        number: _aligned(split, form)[[split.loops[loop] for loop in names]]
        for number, split in splits.items()
    }
    boxes = np.stack([rows[number] for number in calls], axis=1)
    contents = {loop: _any_of([s.contents[loop] for s in splits.values()]) for loop in names}
    places = {loop: place for place, loop in enumerate(names)}
    return _Next(splits, calls, places, boxes, contents, first.flags, sticks)


def _any_of(contents: Sequence[Contents]) -> Contents:
    """Return which values some of several devices read."""
    first = contents[0]
    if all(other == first for other in contents):
        return first
    return {slot: any(c.get(slot, False) for c in contents) for c in contents for slot in c}


def _aligned(split: Split, form: Form) -> ndarray:
    """Return boxes in another form, whose inputs that the pieces do not have are left empty."""
    if split.form is form:
        return split.boxes
    boxes = np.zeros((*split.boxes.shape[:2], form.width, 2), dtype=np.int64)
    for slot, dims in split.form.slots.items():
        if slot in form.slots:
            boxes[:, :, form.slots[slot]] = split.boxes[:, :, dims]
    for dims, there in zip(split.form.outputs, form.outputs, strict=True):
        if dims is not None and there is not None:
            boxes[:, :, there] = split.boxes[:, :, dims]
    return boxes


def cutting_of(call: Call, axes: Axes, mesh: Mesh) -> Ways | None:
    """Return what the devices of a mesh do when the loops `axes` are cut; None if they cannot be.

    It is the only one of its ways. The same as `leaves`, for costs.
    """
    found = whole(intern_call(call))
    for axis, parts in zip(axes, mesh.shape, strict=True):
        found = extended(found, (axis,), parts)
    return found if len(found) else None


def owned_array(
    shape: tuple[int, ...], layout: tuple[int | None, ...], parts: tuple[int, ...]
) -> Int64[ndarray, "n rank 2"] | None:
    """Return each device's box of a tensor; None if one would be empty. See `owned_boxes`."""
    key = ("owned", shape, layout, parts)
    if key not in KEPT.others:
        if layout:
            outer = owned_array(shape, layout[:-1], parts[:-1])
            found = None if outer is None else _cut(outer, layout[-1], parts[-1])
        else:
            found = np.zeros((1, len(shape), 2), dtype=np.int64)
            found[0, :, 1] = shape
        KEPT.others[key] = found
    return KEPT.others[key]


def _cut(outer: ndarray, dim: int | None, parts: int) -> ndarray | None:
    boxes = np.repeat(outer, parts, axis=0)
    if dim is None:
        return boxes
    begin = outer[:, dim, :1]
    extent = outer[:, dim, 1:] - begin
    if int(extent.min()) < parts:
        return None
    points = begin + extent * np.arange(parts + 1) // parts
    boxes[:, dim, 0] = points[:, :-1].reshape(-1)
    boxes[:, dim, 1] = points[:, 1:].reshape(-1)
    return boxes
