"""All ways in which the devices along one mesh axis can split one call, as one array.

Idea: the stencil of each loop says what moves; all else is the call's own row.
Complexity: O(loops x workers x dims) per distinct call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np
from jaxtyping import Int64
from numpy import ndarray

from pardnn.errors import PardnnError
from pardnn.shard.partition.call import Form
from pardnn.shard.partition.interning import EXCHANGED, KEPT, are_exact, intern_piece, rows_of
from pardnn.shard.partition.loop_cut import Stencil, stencil_of
from pardnn.shard.partition.pieces import Part, Watched, own_attributes
from pardnn.shard.partition.shape_class import Family, Loops, Row, extents_in, loops_in, shapes_in

Attributes = Mapping[str, Any]


@final
@dataclass(eq=False, slots=True)
class Split:
    """What the workers among whom one call is split do, for each loop that they can cut.

    Attributes:
        number: Of the call.
        form: Of the call.
        loops: Place of each loop among `boxes`; that of None, all workers alike, is the last.
        boxes: What each worker needs of the inputs, which may stick out of them, and what its
            results are of the whole ones.
        sticks: Whether something sticks out.
        contents: By loop, by slot whether values are read.
        flags: By loop and output, whether the workers' results are partial.
        cuts: By loop, how it is cut.
        known: By loop, numbers of calls that were asked for: after the last mesh axis nobody does.
    """

    number: int
    form: Form
    loops: Mapping[str | None, int]
    boxes: Int64[ndarray, "l parts dims 2"]
    sticks: bool
    contents: Mapping[str | None, Mapping[str, bool]]
    flags: Mapping[str | None, tuple[bool, ...]]
    cuts: Mapping[str, _Cut]
    known: dict[str | None, tuple[int, ...]] = field(default_factory=dict)

    def calls(self, loop: str | None) -> tuple[int, ...]:
        """Return the number of each worker's call."""
        if loop not in self.known:
            if loop is None:
                found = (self.number,) * self.boxes.shape[1]
            else:
                family, _ = KEPT.calls[self.number]
                cut = self.cuts[loop]
                pairs = zip(cut.attributes, cut.rows, strict=True)
                found = tuple([intern_piece(family, own, row) for own, row in pairs])
            self.known[loop] = found
        return self.known[loop]


@final
@dataclass(eq=False, slots=True)
class _Cut:
    """How one loop is cut.

    Attributes:
        stencil: What moves.
        rows: Of the pieces, in the family of the call.
        attributes: Arguments of each piece in place of those of the whole call.
        dropped: By worker, inputs that the pieces do not take.
    """

    stencil: Stencil
    rows: Sequence[Row]
    attributes: Sequence[Attributes]
    dropped: Sequence[tuple[str, ...]]


def splits_of(number: int, parts: int) -> Split:
    """Return what each of some workers does of an interned call, whichever loop is cut."""
    key = ("split", number, parts)
    if key not in KEPT.others:
        KEPT.others[key] = _split(number, parts)
    return KEPT.others[key]


def _split(number: int, parts: int) -> Split:
    family, row = KEPT.calls[number]
    loops = loops_in(family, row)
    cuts = {} if loops is None else _cuts(family, loops, row, parts)
    whole = [(0, size) for size in row]
    blank = list(whole)
    for column in loops.unread if loops is not None else ():
        blank[column] = (0, 0)
    boxes: list[list[list[tuple[int, int]]]] = []
    sticks = False
    for cut in cuts.values():
        columns = cut.stencil.columns
        each: list[list[tuple[int, int]]] = []
        for moved, dropped in zip(cut.stencil.moved, cut.dropped, strict=True):
            line = list(blank)
            for column, ends in zip(columns, moved, strict=True):
                line[column] = ends
            for slot in dropped:
                dims = family.form.slots[slot]
                line[dims] = [(0, 0)] * (dims.stop - dims.start)
            each.append(line)
        sticks = sticks or cut.stencil.sticks
        boxes.append(each)
    boxes.append([whole] * parts)
    none = (False,) * len(family.form.outputs)
    return Split(
        number,
        family.form,
        {loop: place for place, loop in enumerate((*cuts, None))},
        np.array(boxes, dtype=np.int64).reshape(len(boxes), parts, len(row), 2),
        sticks,
        {loop: _contents(loops, cut) for loop, cut in cuts.items() if loops} | {None: {}},
        {loop: cut.stencil.flags for loop, cut in cuts.items()} | {None: none},
        cuts,
    )


def _contents(loops: Loops, cut: _Cut) -> Mapping[str, bool]:
    nowhere = set(cut.dropped[0]).intersection(*cut.dropped)
    return loops.contents if not nowhere else {**loops.contents, **dict.fromkeys(nowhere, False)}


def _cuts(family: Family, loops: Loops, row: Row, parts: int) -> dict[str, _Cut]:
    """Return how each loop of a call is cut that can be; those that fail are left out."""
    try:
        extents = extents_in(loops, row)
    except PardnnError:
        return {}
    found: dict[str, _Cut] = {}
    for axis in loops.analysis.axes:
        try:
            stencil = stencil_of(family, loops, row, extents, axis, parts)
            if (
                stencil is None
                or any(r is not None and r not in EXCHANGED for r in stencil.reducers)
                or not are_exact(family, loops, row, stencil)
            ):
                continue
            found[axis] = _cut(family, loops, row, extents, axis, stencil)
        except PardnnError:
            continue
    return found


def _cut(
    family: Family,
    loops: Loops,
    row: Row,
    extents: Mapping[str, int],
    axis: str,
    stencil: Stencil,
) -> _Cut:
    rows = rows_of(loops, row, stencil)
    count = len(rows)
    if not loops.has_attributes:
        return _Cut(stencil, rows, ({},) * count, ((),) * count)
    own = _attributes(family, loops, extents, axis, stencil, rows)
    dropped = [
        tuple([name for name, value in each.items() if value is None and name in family.form.slots])
        for each in own
    ]
    return _Cut(stencil, rows, own, dropped)


def _attributes(
    family: Family,
    loops: Loops,
    extents: Mapping[str, int],
    axis: str,
    stencil: Stencil,
    rows: Sequence[Row],
) -> Sequence[Attributes]:
    """Return the arguments that each worker calls with in place of those of the whole call.

    Where they follow from the loop alone, those of the first worker and those of all others are
    kept.
    """
    first, others = loops.attributes.get(axis, (None, None))
    if first is not None and others is not None:
        return [first, *[others] * (len(rows) - 1)]
    full = {name: (0, size - 1) for name, size in extents.items()}
    rest = [
        (axis, worker, {**full, axis: ends}, *shapes_in(family, local))
        for worker, (ends, local) in enumerate(zip(stencil.ranges, rows, strict=True))
    ]
    if axis in loops.attributes or len(rest) == 1:
        return [own_attributes(loops.analysis, Part(*each)) for each in rest]
    shown = [Watched(*each) for each in rest]
    found = [
        own_attributes(loops.analysis, Part(*each), part)
        for each, part in zip(rest, shown, strict=True)
    ]
    is_known = not any(part.was_asked for part in shown)
    loops.attributes[axis] = (found[0], found[1]) if is_known else (None, None)
    return found
