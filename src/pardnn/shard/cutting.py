"""What every device of a mesh does of one call, as arrays: `leaves` for those who try thousands.

Idea: a call is interned by its fingerprint, and cutting one loop of it gives numbers of other
interned calls with the boxes of what they read and write, all of one device in a row of one array.
Devices whose local calls are equal share that work, as do equal layers; a cut along a further mesh
axis only adds boxes up.
Complexity: O(distinct local calls x loops) calls of `pieces_of`, the rest is array arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Int64
from numpy import ndarray

from pardnn.errors import PardnnError
from pardnn.plan.mesh import Mesh
from pardnn.shard.analysis import Analysis
from pardnn.shard.call import Bound, Call, Skeleton, replaced, skeleton_of
from pardnn.shard.form import Form, form_of
from pardnn.shard.interned import (
    EXCHANGED,
    KEPT,
    analysed,
    intern_call,
    intern_skeleton,
    interned,
)
from pardnn.shard.leaves import Axes, leaves
from pardnn.shard.partition import Part, Piece, extents_of, own_attributes, pieces_of
from pardnn.shard.registry import Description, description_of
from pardnn.shard.stencil import Column, Stencil, stencil_of
from pardnn.shard.tdl import Shape, Sizes, Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Cutting:
    """What n devices do of one call.

    Attributes:
        calls: Number of each device's local call.
        form: Which dims of `boxes` are whose.
        boxes: What each device needs of the inputs, which may stick out of them, and what its
            results are of the whole ones.
        contents: By slot whether values are read.
        reduced: By output, for each mesh axis, whether results along it are partial.
    """

    calls: tuple[int, ...]
    form: Form
    boxes: Int64[ndarray, "n dims 2"]
    contents: Mapping[str, bool]
    reduced: tuple[tuple[bool, ...], ...]

    def region(self, slot: str) -> Int64[ndarray, "n rank 2"]:
        """Return the box of an input that each device needs."""
        return self.boxes[:, self.form.slots[slot]]

    def share(self, output: int) -> Int64[ndarray, "n rank 2"] | None:
        """Return the box that each device's result is of the whole one; None: not computed."""
        dims = self.form.outputs[output]
        return None if dims is None else self.boxes[:, dims]


@dataclass(frozen=True, slots=True, eq=False)
class _Pieces:
    """As `Cutting`, over one mesh axis; of the form of the call that is cut."""

    calls: tuple[int, ...]
    form: Form
    boxes: ndarray
    contents: Mapping[str, bool]
    reduced: tuple[bool, ...]


def whole(number: int) -> Cutting:
    """Return what the only device of an empty mesh does: all of it, tensors named by slot."""
    key = ("whole", number)
    if key not in KEPT.others:
        KEPT.others[key] = _whole(interned(number))
    return KEPT.others[key]


def _whole(call: Call) -> Cutting:
    try:
        found = leaves(call, (), Mesh(shape=(), names=()))
    except PardnnError:
        found = None
    if found is None or description_of(call.kind) is None:
        local, names = call, skeleton_of(call.kind, call.args, call.kwargs).names
        shapes = {str(slot): call.shapes[name] for slot, name in enumerate(names)}
        contents = dict.fromkeys(shapes, True)
    else:
        (leaf,) = found
        local = leaf.call
        shapes = {slot: local.shapes[slot] for slot in leaf.regions}
        contents = {slot: region.content for slot, region in leaf.regions.items()}
    form = form_of(shapes, local.outputs)
    sizes = [n for shape in (*shapes.values(), *local.outputs) for n in shape or ()]
    boxes = np.zeros((1, form.width, 2), dtype=np.int64)
    boxes[0, :, 1] = sizes
    return Cutting((intern_call(local),), form, boxes, contents, ((),) * len(local.outputs))


def _pieces(number: int, axis: str, parts: int) -> _Pieces | None:
    key = ("pieces", number, axis, parts)
    if key not in KEPT.others:
        KEPT.others[key] = _find_pieces(number, axis, parts)
    return KEPT.others[key]


def _find_pieces(number: int, axis: str, parts: int) -> _Pieces | None:
    known = analysed(number)
    if known is None or axis not in known[1].axes:
        return None
    try:
        if parts == 2 and number in KEPT.halves:
            found = KEPT.halves[number].get(axis, (None, None))[1]
        elif not known[0].is_exact:
            return _stamped(number, known, axis, parts)
        else:
            found = pieces_of(*known, axis, parts)
    except PardnnError:
        return None
    return None if found is None else _stacked(number, *known, found)


def _stamped(
    number: int, known: tuple[Description, Analysis, Bound], axis: str, parts: int
) -> _Pieces | None:
    """Return the pieces of a call by the stencil of the loop."""
    _, analysis, bound = known
    extents = extents_of(*known)
    stencil = stencil_of(analysis, bound, extents, axis, parts) if axis in extents else None
    if stencil is None:
        return None
    read = {access.slot for access in analysis.reads}
    shapes: dict[str, Shape] = {}
    for slot, tensor in bound.tensors.items():
        shape = tensor.sizes.shape
        shapes[slot] = shape if slot in read else (0,) * len(shape)
    dtypes = {slot: tensor.dtype for slot, tensor in bound.tensors.items()}
    call = replace(bound.call, shapes=shapes, dtypes=dtypes)
    ranges = {name: (0, size - 1) for name, size in extents.items()}
    numbers = _numbers(known, _by_slot(number, bound), call, stencil, axis, ranges)
    if numbers is None:
        found = pieces_of(*known, axis, parts)
        return None if found is None else _stacked(number, *known, found)
    form = form_of(shapes, call.outputs)
    boxes = np.zeros((parts, form.width, 2), dtype=np.int64)
    boxes[:, :, 1] = [n for shape in (*shapes.values(), *call.outputs) for n in shape or ()]
    starts = [form.slots[p] if isinstance(p, str) else form.outputs[p] for p, _ in stencil.columns]
    moved = [at.start + dim for at, (_, dim) in zip(starts, stencil.columns, strict=True) if at]
    boxes[:, moved] = stencil.boxes
    contents = {slot: slot in read and slot in analysis.contents for slot in shapes}
    return _Pieces(numbers, form, boxes, contents, stencil.flags)


def _numbers(
    known: tuple[Description, Analysis, Bound],
    skeleton: Skeleton,
    whole: Call,
    stencil: Stencil,
    axis: str,
    ranges: Mapping[str, tuple[int, int]],
) -> tuple[int, ...] | None:
    """Return the number of each worker's call, None where an input may be dropped."""
    description, analysis, _ = known
    numbers: list[int] = []
    plain: dict[Sequence[int], tuple[Call, int | None]] = {}
    for worker, (sizes, ends) in enumerate(zip(stencil.sizes, stencil.ends, strict=True)):
        if sizes not in plain:
            plain[sizes] = _resized(whole, stencil.columns, sizes), None
        call, found = plain[sizes]
        part = Part(axis, worker, {**ranges, axis: ends}, call.shapes, call.outputs)
        if attributes := own_attributes(analysis, part):
            if None in attributes.values():
                return None
            numbers.append(intern_call(replaced(description, call, attributes)))
            continue
        if found is None:
            found = intern_skeleton(call, skeleton)
            plain[sizes] = call, found
            _derive(found, known)
        numbers.append(found)
    return tuple(numbers)


def _resized(call: Call, columns: Sequence[Column], sizes: Sequence[int]) -> Call:
    """Return a call whose moved dims have other sizes."""
    inputs, outputs = dict(call.shapes), list(call.outputs)
    for (place, dim), size in zip(columns, sizes, strict=True):
        if isinstance(place, str):
            shape = inputs[place]
            inputs[place] = (*shape[:dim], size, *shape[dim + 1 :])
        elif (made := outputs[place]) is not None:
            outputs[place] = (*made[:dim], size, *made[dim + 1 :])
    return Call(call.kind, call.args, call.kwargs, inputs, tuple(outputs), call.dtypes)


def _stacked(
    number: int,
    description: Description,
    analysis: Analysis,
    bound: Bound,
    pieces: tuple[Piece, ...],
) -> _Pieces | None:
    first = pieces[0]
    reducers = [share and share.reducer for share in first.shares]
    if any(r is not None and r.name not in EXCHANGED for r in reducers):
        return None
    calls: list[int] = []
    for before, piece in zip((None, *pieces), pieces, strict=False):
        call = piece.call
        if before is not None and before.call is call:
            calls.append(calls[-1])
            continue
        if call.args is not bound.call.args or call.kwargs is not bound.call.kwargs:
            calls.append(intern_call(call))
            continue
        calls.append(intern_skeleton(call, _by_slot(number, bound)))
        _derive(calls[-1], (description, analysis, bound))
    shapes = {slot: tensor.sizes.shape for slot, tensor in bound.tensors.items()}
    form = form_of(shapes, bound.call.outputs)
    boxes = np.array([_row(piece, shapes) for piece in pieces], dtype=np.int64)
    contents = {
        slot: any(slot in p.regions and p.regions[slot].content for p in pieces) for slot in shapes
    }
    flags = tuple(reducer is not None for reducer in reducers)
    return _Pieces(tuple(calls), form, boxes.reshape(len(pieces), -1, 2), contents, flags)


def _by_slot(number: int, bound: Bound) -> Skeleton:
    """Return the skeleton of a call whose tensors are named by slot."""
    skeleton = KEPT.skeletons[number]
    if KEPT.calls[number].args is bound.call.args:
        return skeleton
    return skeleton_of(bound.call.kind, bound.call.args, bound.call.kwargs)


def _row(piece: Piece, shapes: Mapping[str, Shape]) -> list[tuple[int, int]]:
    """Return the boxes of a piece side by side; of an input that it does not read, nothing."""
    row: list[tuple[int, int]] = []
    for slot, shape in shapes.items():
        region = piece.regions.get(slot)
        row += ((0, 0),) * len(shape) if region is None else region.box
    for share in piece.shares:
        row += () if share is None else share.box
    return row


def _derive(new: int, known: tuple[Description, Analysis, Bound]) -> None:
    """Note the analysis of a piece, if it is that of the call that it is a piece of."""
    description, analysis, bound = known
    if new not in KEPT.analysed and (found := _derived(analysis, bound, interned(new))):
        KEPT.analysed[new] = (description, analysis, found)


def _derived(analysis: Analysis, bound: Bound, call: Call) -> Bound | None:
    """Return the binding of a piece whose arguments are those of the whole call, sizes aside.

    None if its analysis may be another one: see `analyse`.
    """
    if analysis.reads_sizes:
        return None
    tensors: dict[str, Tensor] = {}
    for slot, tensor in bound.tensors.items():
        shape = call.shapes[slot]
        if any((m == 1) != (n == 1) for m, n in zip(shape, tensor.sizes.shape, strict=True)):
            return None
        tensors[slot] = Tensor(slot, Sizes(shape), tensor.dtype)
    return replace(bound, call=call, names={slot: slot for slot in tensors}, tensors=tensors)


def extended(cutting: Cutting, axis: str | None, parts: int) -> Cutting | None:
    """Return a cutting over one more mesh axis, along which one loop is cut.

    Args:
        cutting: Over the axes before.
        axis: The loop; None: all devices along the new axis do the same.
        parts: Devices along the new axis.

    Returns:
        None if the loop cannot be cut so on every device.
    """
    if axis is None:
        return _widened(cutting, parts)
    key = ("next", cutting.calls, cutting.form, axis, parts)
    if key not in KEPT.others:
        KEPT.others[key] = _next(cutting.calls, cutting.form, axis, parts)
    found: _Pieces | None = KEPT.others[key]
    if found is None:
        return None
    boxes = cutting.boxes[:, None, :, :1] + found.boxes
    contents = cutting.contents
    if found.contents != contents:
        contents = {slot: is_read and found.contents[slot] for slot, is_read in contents.items()}
    flags = zip(cutting.reduced, found.reduced, strict=True)
    return Cutting(
        found.calls,
        cutting.form,
        boxes.reshape(len(found.calls), -1, 2),
        contents,
        tuple([(*outer, flag) for outer, flag in flags]),
    )


def _next(calls: tuple[int, ...], form: Form, axis: str, parts: int) -> _Pieces | None:
    """Return the pieces of some devices' calls, boxes by device and worker, in another form."""
    known = {number: _pieces(number, axis, parts) for number in dict.fromkeys(calls)}
    found = [piece for piece in known.values() if piece is not None]
    if len(found) < len(known):
        return None
    rows = {n: (p.calls, _aligned(p, form)) for n, p in zip(known, found, strict=True)}
    inner = [rows[number][1] for number in (calls if len(rows) > 1 else calls[:1])]
    return _Pieces(
        tuple([n for number in calls for n in rows[number][0]]),
        form,
        np.array(inner),
        {slot: any(p.contents.get(slot, False) for p in found) for slot in form.slots},
        found[0].reduced,
    )


def _aligned(pieces: _Pieces, form: Form) -> ndarray:
    """Return boxes in another form, whose inputs that the pieces do not have are left empty."""
    if pieces.form is form:
        return pieces.boxes
    boxes = np.zeros((len(pieces.boxes), form.width, 2), dtype=np.int64)
    for slot, dims in pieces.form.slots.items():
        if slot in form.slots:
            boxes[:, form.slots[slot]] = pieces.boxes[:, dims]
    for dims, there in zip(pieces.form.outputs, form.outputs, strict=True):
        if dims is not None and there is not None:
            boxes[:, there] = pieces.boxes[:, dims]
    return boxes


def _widened(cutting: Cutting, parts: int) -> Cutting:
    """Return a cutting over one more mesh axis along which all devices do the same."""
    calls = tuple(number for number in cutting.calls for _ in range(parts))
    flags = tuple((*flags, False) for flags in cutting.reduced)
    boxes = np.repeat(cutting.boxes, parts, axis=0)
    return Cutting(calls, cutting.form, boxes, cutting.contents, flags)


def cutting_of(call: Call, axes: Axes, mesh: Mesh) -> Cutting | None:
    """Return what the devices of a mesh do when the loops `axes` are cut; None if they cannot be.

    The same as `leaves`, for costs.
    """
    found: Cutting | None = whole(intern_call(call))
    for axis, parts in zip(axes, mesh.shape, strict=True):
        found = found and extended(found, axis, parts)
    return found


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
