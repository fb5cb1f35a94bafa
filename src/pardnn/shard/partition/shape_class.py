"""Shape-polymorphic calls: calls that differ only in the sizes of their tensors, analysed once.

Problem: equal layers of different widths, and the local calls of a cut call, differ only in sizes.
Idea: a call is a *shape class* (operator, arguments, dtypes, ranks, which dims have size 1) and the
sizes of all its dims side by side. A local call has other sizes in the same class, unless one of
its arguments changes or a size becomes 1: then the class is *specialized*, once.
Complexity: O(size of the arguments) per shape class, O(dims) per call.
Reference: Tofu (EuroSys 2019), section 4.2: "many of which are identical except for their tensor
shapes".
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

from pardnn.errors import PardnnError
from pardnn.shard.aten.lookup import description_of
from pardnn.shard.partition.analysis import Analysis, analysis_of
from pardnn.shard.partition.call import (
    Bound,
    Call,
    DimSlices,
    Skeleton,
    bind_call,
    dim_slices_of,
    replaced,
    skeleton_of,
    walk,
)
from pardnn.shard.tdl.interval import DescriptionError
from pardnn.shard.tdl.language import Shape
from pardnn.shard.tdl.registry import Description

DimSizes = tuple[int, ...]
"""Sizes of all dims of a call, those of its inputs slot by slot and those of its outputs, side by
side. The position of a dim among them is its *column*."""


@final
@dataclass(eq=False, slots=True)
class LoopNest:
    """The loops of a shape class: the analysis, and the sizes that they run over.

    Attributes:
        description: Of the operator.
        analysis: Of the description.
        contents: By slot whether values are read.
        unread: Columns of inputs that are not accessed: no worker needs them.
        sources: Of each variable, stated sizes, and columns whose sizes it runs over.
        has_attributes: Whether workers' calls may have other arguments.
        loop_cuts: Cached cuts, see `loop_cut`.
        attributes: By loop, arguments of the first worker's call and of all others that replace
            those of the whole call, if they follow from the loop alone; otherwise None.
    """

    description: Description
    analysis: Analysis
    contents: Mapping[str, bool]
    unread: tuple[int, ...]
    sources: tuple[tuple[str, frozenset[int], tuple[int, ...]], ...]
    has_attributes: bool
    loop_cuts: dict[Any, Any] = field(default_factory=dict)
    attributes: dict[str, tuple[Any, Any]] = field(default_factory=dict)


@final
@dataclass(eq=False, slots=True)
class ShapeClass:
    """Calls that differ only in the sizes of their tensors.

    Attributes:
        call: One of them, tensors named by slot.
        mentions: For each slot, which mention of a tensor in the arguments it is.
        dim_slices: Where the dims of each tensor are among `DimSizes`.
        num_input_dims: Number of dims of all inputs together.
        ones: Which dims of inputs have size 1.
        first: Sizes of `call`.
        bound: The call, not analysed yet; None if its description does not fit.
        numbers: Of the interned calls, by sizes.
        loop_nests: By sizes if the description looks at sizes, else by None.
        specializations: Shape classes of local calls, by what sets them apart, with the dims that
            remain.
    """

    call: Call
    mentions: tuple[int, ...]
    dim_slices: DimSlices
    num_input_dims: int
    ones: tuple[bool, ...]
    first: DimSizes
    bound: Bound | None
    numbers: dict[DimSizes, int] = field(default_factory=dict)
    loop_nests: dict[DimSizes | None, LoopNest | None] = field(default_factory=dict)
    specializations: dict[Any, tuple[ShapeClass, tuple[int, ...] | None]] = field(
        default_factory=dict
    )


def shape_class_key(call: Call, skeleton: Skeleton) -> Any:
    """Return a key that is equal for calls of one shape class."""
    return (
        skeleton.structure,
        tuple([call.dtypes.get(name) for name in skeleton.names]),
        tuple([tuple([n == 1 for n in call.shapes[name]]) for name in skeleton.names]),
        tuple([None if shape is None else len(shape) for shape in call.outputs]),
    )


def new_shape_class(call: Call) -> ShapeClass:
    """Return a class for a call; without a fitting description slots are "0", "1", and so on."""
    named = _numbered(call)
    description = description_of(call.kind)
    mentions, bound = tuple(range(len(named.shapes))), None
    if description is not None:
        try:
            bound = bind_call(description, named)
        except PardnnError:
            pass
        else:
            mentions = tuple([int(name) for name in bound.names.values()])
            shapes = {slot: named.shapes[name] for slot, name in bound.names.items()}
            dtypes = {slot: named.dtypes[name] for slot, name in bound.names.items()}
            named = replace(bound.call, shapes=shapes, dtypes=dtypes)
    dim_slices = dim_slices_of(named.shapes, named.outputs)
    sizes = [n for shape in named.shapes.values() for n in shape]
    made = [n for shape in named.outputs for n in shape or ()]
    ones = tuple([n == 1 for n in sizes])
    return ShapeClass(named, mentions, dim_slices, len(ones), ones, (*sizes, *made), bound)


def _numbered(call: Call) -> Call:
    """Return a call whose tensors are named by the order in which it mentions them."""
    count = itertools.count()
    shapes: dict[str, Shape] = {}
    dtypes: dict[str, str | None] = {}

    def visit(name: str, _: str) -> dict[str, str]:
        new = str(next(count))
        shapes[new], dtypes[new] = call.shapes[name], call.dtypes.get(name)
        return {"tensor": new}

    args = tuple(walk(value, "", visit) for value in call.args)
    kwargs = {key: walk(value, "", visit) for key, value in call.kwargs.items()}
    return Call(call.kind, args, kwargs, shapes, call.outputs, dtypes)


def dim_sizes_of(
    shape_class: ShapeClass, shapes: Sequence[Shape], outputs: Sequence[Shape | None]
) -> DimSizes:
    """Return the sizes of a call.

    Args:
        shape_class: Of the call.
        shapes: Of each tensor that its arguments mention, in that order.
        outputs: Of each result, None for what is not computed.
    """
    dim_sizes = [n for mention in shape_class.mentions for n in shapes[mention]]
    for shape in outputs:
        dim_sizes += shape or ()
    return tuple(dim_sizes)


def shapes_in(
    shape_class: ShapeClass, dim_sizes: DimSizes
) -> tuple[dict[str, Shape], tuple[Shape | None, ...]]:
    """Return the shape of each input, by slot, and of each output."""
    inputs = {slot: dim_sizes[dims] for slot, dims in shape_class.dim_slices.inputs.items()}
    return inputs, tuple(
        [None if dims is None else dim_sizes[dims] for dims in shape_class.dim_slices.outputs]
    )


def call_in(shape_class: ShapeClass, dim_sizes: DimSizes) -> Call:
    """Return the call of a shape class with some sizes, tensors named by slot."""
    inputs, outputs = shapes_in(shape_class, dim_sizes)
    like = shape_class.call
    return Call(like.kind, like.args, like.kwargs, inputs, outputs, like.dtypes)


def loop_nest_of(shape_class: ShapeClass, dim_sizes: DimSizes) -> LoopNest | None:
    """Return the loop nest of a call; None without a description that fits."""
    known = shape_class.loop_nests
    if None in known:
        return known[None]
    if dim_sizes not in known:
        call, bound = call_in(shape_class, dim_sizes), shape_class.bound
        description = description_of(call.kind)
        try:
            if description is not None and (bound is None or dim_sizes != shape_class.first):
                bound = bind_call(description, call)
            found = (
                description
                and bound
                and _loop_nest(shape_class, description, analysis_of(description, bound))
            )
        except PardnnError:
            found = None
        is_of_sizes = found is None or found.analysis.reads_sizes
        known[dim_sizes if is_of_sizes else None] = found
        return found
    return known[dim_sizes]


def _loop_nest(shape_class: ShapeClass, description: Description, analysis: Analysis) -> LoopNest:
    slots, outputs = shape_class.dim_slices.inputs, shape_class.dim_slices.outputs
    sources: list[tuple[str, frozenset[int], tuple[int, ...]]] = []
    for name, extents in analysis.extents.items():
        columns: dict[int, None] = {}
        for extent in extents:
            if not isinstance(extent, int):
                place, at, dim = extent
                dims = slots[str(at)] if place == "input" else outputs[int(at)]
                if dims is not None:
                    columns[range(dims.start, dims.stop)[dim]] = None
        sources.append((name, frozenset(e for e in extents if isinstance(e, int)), tuple(columns)))
    read = {access.slot for access in analysis.reads}
    contents = {slot: slot in read and slot in analysis.contents for slot in slots}
    unread = [n for slot, at in slots.items() if slot not in read for n in range(at.start, at.stop)]
    has_attributes = bool(analysis.attributes) or any(w and w.without for w in analysis.writes)
    return LoopNest(description, analysis, contents, tuple(unread), tuple(sources), has_attributes)


def extents_in(nest: LoopNest, dim_sizes: DimSizes) -> dict[str, int]:
    """Return the extent of each variable of a call.

    Raises:
        DescriptionError: E220, if a loop that can be cut runs over different sizes.
    """
    found: dict[str, int] = {}
    for name, fixed, columns in nest.sources:
        if len(columns) == 1 and not fixed:
            found[name] = dim_sizes[columns[0]]
            continue
        sizes = fixed.union([dim_sizes[column] for column in columns])
        if len(sizes) == 1:
            (found[name],) = sizes
        elif name in nest.analysis.loops:
            raise DescriptionError(f"variable {name!r} runs over dims of sizes {sorted(sizes)}")
    return found


def specialize(
    shape_class: ShapeClass,
    attributes: Mapping[str, Any],
    dim_sizes: DimSizes,
    known: dict[Any, ShapeClass],
) -> tuple[ShapeClass, DimSizes]:
    """Return the shape class of a worker's call, and its sizes there.

    Args:
        shape_class: Of the call that is cut.
        attributes: Arguments of the worker's call that replace those of that call.
        dim_sizes: The worker's sizes, in the shape class of the call that is cut.
        known: All shape classes by key; a new one is added.
    """
    ones = tuple([n == 1 for n in dim_sizes[: shape_class.num_input_dims]])
    key = (repr(attributes), ones) if attributes else ones
    found = shape_class.specializations.get(key)
    if found is None:
        found = shape_class.specializations[key] = _specialize(
            shape_class, attributes, dim_sizes, known
        )
    other, columns = found
    return other, dim_sizes if columns is None else tuple([dim_sizes[column] for column in columns])


def _specialize(
    shape_class: ShapeClass,
    attributes: Mapping[str, Any],
    dim_sizes: DimSizes,
    known: dict[Any, ShapeClass],
) -> tuple[ShapeClass, tuple[int, ...] | None]:
    call = call_in(shape_class, dim_sizes)
    description = description_of(call.kind)
    if attributes and description is not None:
        call = replaced(description, call, attributes)
    name = shape_class_key(call, skeleton_of(call.kind, call.args, call.kwargs))
    other = known.get(name)
    if other is None:
        other = known[name] = new_shape_class(call)
    if other.dim_slices is shape_class.dim_slices:
        return other, None
    places = [shape_class.dim_slices.inputs[slot] for slot in other.dim_slices.inputs]
    columns = [n for at in places for n in range(at.start, at.stop)]
    return other, (*columns, *range(shape_class.num_input_dims, shape_class.dim_slices.num_dims))


def is_exact(shape_class: ShapeClass, dim_sizes: DimSizes) -> bool:
    """Whether a call produces as many elements as it needs of each input."""
    inputs, outputs = shapes_in(shape_class, dim_sizes)
    made = math.prod(next(shape for shape in outputs if shape is not None))
    return all(math.prod(shape) == made for shape in inputs.values())
