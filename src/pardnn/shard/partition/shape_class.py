"""Calls that differ in the sizes of their tensors alone: a family, bound and analysed once.

Idea: sizes of all tensors side by side are a *row*; a call is a family and a row. The pieces of a
cut call are rows of the same family, unless an argument of theirs is another one, or a size
becomes 1: then they are of a *relative*, which is looked for once.
Complexity: O(size of the arguments) per family, O(dims) per call.
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
    Form,
    Skeleton,
    bind_call,
    form_of,
    replaced,
    skeleton_of,
    walk,
)
from pardnn.shard.tdl.interval import DescriptionError
from pardnn.shard.tdl.language import Shape
from pardnn.shard.tdl.registry import Description

Row = tuple[int, ...]
"""Sizes of all dims of a call's inputs, slot by slot, and of its outputs, side by side."""


@final
@dataclass(eq=False, slots=True)
class Loops:
    """What cuts of calls follow from: the analysis, and where in a row its sizes are.

    Attributes:
        description: Of the operator.
        analysis: Of the description.
        contents: By slot whether values are read.
        unread: Columns of inputs that are not accessed: no piece has any of them.
        sources: Of each variable, stated sizes, and columns whose sizes it runs over.
        has_attributes: Whether pieces may call with other arguments.
        stencils: What is known of cuts, see `stencil`.
        attributes: By loop, arguments of the first worker's piece and of all others', in place of
            those of the whole call, where they follow from the loop alone; else None.
    """

    description: Description
    analysis: Analysis
    contents: Mapping[str, bool]
    unread: tuple[int, ...]
    sources: tuple[tuple[str, frozenset[int], tuple[int, ...]], ...]
    has_attributes: bool
    stencils: dict[Any, Any] = field(default_factory=dict)
    attributes: dict[str, tuple[Any, Any]] = field(default_factory=dict)


@final
@dataclass(eq=False, slots=True)
class Family:
    """Calls that differ in the sizes of their tensors alone.

    Attributes:
        call: One of them, tensors named by slot.
        mentions: For each slot, which mention of a tensor in the arguments it is.
        form: Where the dims of each tensor are in a row.
        inputs: Number of columns of inputs.
        ones: Which columns of inputs have size 1.
        first: The row of the call.
        bound: The call, not analysed yet; None if its description does not fit.
        numbers: Of the calls that were asked for, by row.
        loops: By row if the description looks at sizes, else by None.
        relatives: Families of pieces, by what sets them apart, with the columns that are left.
    """

    call: Call
    mentions: tuple[int, ...]
    form: Form
    inputs: int
    ones: tuple[bool, ...]
    first: Row
    bound: Bound | None
    numbers: dict[Row, int] = field(default_factory=dict)
    loops: dict[Row | None, Loops | None] = field(default_factory=dict)
    relatives: dict[Any, tuple[Family, tuple[int, ...] | None]] = field(default_factory=dict)


def family_key(call: Call, skeleton: Skeleton) -> Any:
    """Return what is equal for calls of a family."""
    return (
        skeleton.structure,
        tuple([call.dtypes.get(name) for name in skeleton.names]),
        tuple([tuple([n == 1 for n in call.shapes[name]]) for name in skeleton.names]),
        tuple([None if shape is None else len(shape) for shape in call.outputs]),
    )


def new_family(call: Call) -> Family:
    """Return the family of a call. Without a fitting description slots are "0", "1" and so on."""
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
    form = form_of(named.shapes, named.outputs)
    sizes = [n for shape in named.shapes.values() for n in shape]
    made = [n for shape in named.outputs for n in shape or ()]
    ones = tuple([n == 1 for n in sizes])
    return Family(named, mentions, form, len(ones), ones, (*sizes, *made), bound)


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


def row_of(family: Family, shapes: Sequence[Shape], outputs: Sequence[Shape | None]) -> Row:
    """Return the row of a call, given the shape of each tensor that it mentions."""
    row = [n for mention in family.mentions for n in shapes[mention]]
    for shape in outputs:
        row += shape or ()
    return tuple(row)


def shapes_in(family: Family, row: Row) -> tuple[dict[str, Shape], tuple[Shape | None, ...]]:
    """Return the shape of each input, by slot, and of each output."""
    inputs = {slot: row[dims] for slot, dims in family.form.slots.items()}
    return inputs, tuple([None if dims is None else row[dims] for dims in family.form.outputs])


def call_in(family: Family, row: Row) -> Call:
    """Return the call of a row, tensors named by slot."""
    inputs, outputs = shapes_in(family, row)
    like = family.call
    return Call(like.kind, like.args, like.kwargs, inputs, outputs, like.dtypes)


def loops_in(family: Family, row: Row) -> Loops | None:
    """Return what cuts of a call follow from; None without a description that fits."""
    known = family.loops
    if None in known:
        return known[None]
    if row not in known:
        call, bound = call_in(family, row), family.bound
        description = description_of(call.kind)
        try:
            if description is not None and (bound is None or row != family.first):
                bound = bind_call(description, call)
            found = (
                description
                and bound
                and _loops(family, description, analysis_of(description, bound))
            )
        except PardnnError:
            found = None
        is_of_row = found is None or found.analysis.reads_sizes
        known[row if is_of_row else None] = found
        return found
    return known[row]


def _loops(family: Family, description: Description, analysis: Analysis) -> Loops:
    slots, outputs = family.form.slots, family.form.outputs
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
    return Loops(description, analysis, contents, tuple(unread), tuple(sources), has_attributes)


def extents_in(loops: Loops, row: Row) -> dict[str, int]:
    """Return how far each variable of a call runs.

    Raises:
        DescriptionError: E220, if a loop that can be cut runs over different sizes.
    """
    found: dict[str, int] = {}
    for name, fixed, columns in loops.sources:
        if len(columns) == 1 and not fixed:
            found[name] = row[columns[0]]
            continue
        sizes = fixed.union([row[column] for column in columns])
        if len(sizes) == 1:
            (found[name],) = sizes
        elif sizes and name in loops.analysis.axes:
            raise DescriptionError(f"variable {name!r} runs over dims of sizes {sorted(sizes)}")
    return found


def relative(
    family: Family, attributes: Mapping[str, Any], row: Row, known: dict[Any, Family]
) -> tuple[Family, Row]:
    """Return the family of a piece, and its row there.

    Args:
        family: Of the call that it is a piece of.
        attributes: Arguments that the piece calls with in place of those of the whole call.
        row: Of the piece, in the family of the whole call.
        known: All families by key; a new one is added.
    """
    ones = tuple([n == 1 for n in row[: family.inputs]])
    key = (repr(attributes), ones) if attributes else ones
    found = family.relatives.get(key)
    if found is None:
        found = family.relatives[key] = _relative(family, attributes, row, known)
    other, columns = found
    return other, row if columns is None else tuple([row[column] for column in columns])


def _relative(
    family: Family, attributes: Mapping[str, Any], row: Row, known: dict[Any, Family]
) -> tuple[Family, tuple[int, ...] | None]:
    call = call_in(family, row)
    description = description_of(call.kind)
    if attributes and description is not None:
        call = replaced(description, call, attributes)
    name = family_key(call, skeleton_of(call.kind, call.args, call.kwargs))
    other = known.get(name)
    if other is None:
        other = known[name] = new_family(call)
    if other.form is family.form:
        return other, None
    places = [family.form.slots[slot] for slot in other.form.slots]
    columns = [n for at in places for n in range(at.start, at.stop)]
    return other, (*columns, *range(family.inputs, family.form.width))


def is_exact(family: Family, row: Row) -> bool:
    """Return whether a call makes as many elements as it needs of each input."""
    inputs, outputs = shapes_in(family, row)
    made = math.prod(next(shape for shape in outputs if shape is not None))
    return all(math.prod(shape) == made for shape in inputs.values())
