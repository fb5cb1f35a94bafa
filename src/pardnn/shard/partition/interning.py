"""Calls as numbers, and what is known of each: equal calls of a graph are looked at once.

Idea: a call's key is its skeleton and the shapes, so a layer that is repeated costs one look-up per
op; a piece of a call is mostly a row of its family (`family`), and is put together only if somebody
asks for it. What is kept lives as long as the process, up to a bound.
Complexity: O(size of the arguments) to find a number.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pardnn.errors import PardnnError
from pardnn.shard.partition.call import Call, Skeleton, skeleton_of
from pardnn.shard.partition.loop_cut import Stencil, stencil_of
from pardnn.shard.partition.shape_class import (
    Family,
    Loops,
    Row,
    call_in,
    extents_in,
    family_key,
    is_exact,
    loops_in,
    new_family,
    relative,
    row_of,
)
from pardnn.shard.partition.strategy import Reduce, Strategy, strategy_of

#: Reducers whose partial results are exchanged; loops of others are not cut.
EXCHANGED = frozenset({"sum", "mean", "max", "min", "prod"})


class Kept:
    """Interned calls and what is known of them, by number.

    Attributes:
        numbers: By key of `Skeleton.key`.
        families: By `family_key`.
        calls: Family and row of each number.
        made: Calls that were asked for, tensors named by slot.
        loops: See `loops_of`.
        strategies: See `strategies_of`.
        others: What `cutting` knows.
    """

    def __init__(self) -> None:
        """Nothing is known yet."""
        self.numbers: dict[Any, int] = {}
        self.families: dict[Any, Family] = {}
        self.calls: list[tuple[Family, Row]] = []
        self.made: dict[int, Call] = {}
        self.loops: dict[int, tuple[str, ...]] = {}
        self.strategies: dict[int, dict[str, Strategy]] = {}
        self.others: dict[Any, Any] = {}


KEPT = Kept()

#: Entries from which on everything kept is thrown away: a process may plan many graphs.
_MOST = 200_000


def forget() -> None:
    """Throw away all that was kept, as a cold start would find it."""
    vars(KEPT).update(vars(Kept()))


def forget_if_large() -> None:
    """Throw away what was kept if it has grown large. Numbers of calls are not valid after it."""
    if len(KEPT.others) + len(KEPT.calls) > _MOST:
        forget()


def intern_call(call: Call) -> int:
    """Return the number of a call: equal calls have equal numbers, names aside."""
    skeleton = skeleton_of(call.kind, call.args, call.kwargs)
    key = skeleton.key(call.shapes, call.dtypes, call.outputs)
    number = known_number(key)
    return added(key, call, skeleton) if number is None else number


def known_number(key: Any) -> int | None:
    """Return the number of the call with a key of `Skeleton.key`, None if it has none."""
    return KEPT.numbers.get(key)


def added(key: Any, call: Call, skeleton: Skeleton) -> int:
    """Return the number of a call whose key is new. Its pieces may have been there before."""
    name = family_key(call, skeleton)
    family = KEPT.families.get(name)
    if family is None:
        family = KEPT.families[name] = new_family(call)
    row = row_of(family, [call.shapes[name] for name in skeleton.names], call.outputs)
    number = KEPT.numbers[key] = _numbered(family, row)
    return number


def _numbered(family: Family, row: Row) -> int:
    number = family.numbers.get(row)
    if number is None:
        number = family.numbers[row] = len(KEPT.calls)
        KEPT.calls.append((family, row))
    return number


def intern_piece(family: Family, attributes: Mapping[str, Any], row: Row) -> int:
    """Return the number of a piece of a call.

    Args:
        family: Of the call.
        attributes: Arguments that the piece calls with in place of those of the whole call.
        row: Of the piece, in the family of the call.
    """
    if attributes or tuple([n == 1 for n in row[: family.inputs]]) != family.ones:
        return _numbered(*relative(family, attributes, row, KEPT.families))
    return _numbered(family, row)


def interned(number: int) -> Call:
    """Return the call of a number, its tensors named by slot."""
    if number not in KEPT.made:
        KEPT.made[number] = call_in(*KEPT.calls[number])
    return KEPT.made[number]


def loops_of(number: int) -> tuple[str, ...]:
    """Return the loops of a call that can be cut, those of reducers nobody exchanges left out.

    A description that does not fit the call counts as none: the op runs whole.
    """
    found = KEPT.loops.get(number)
    if found is None:
        found = KEPT.loops[number] = tuple(
            axis
            for axis, strategy in strategies_of(number).items()
            if all(
                not isinstance(layout, Reduce) or layout.reducer in EXCHANGED
                for layout in strategy.outputs
            )
        )
    return found


def strategies_of(number: int) -> dict[str, Strategy]:
    """Return the basic strategies of a call by loop; a wrong description counts as none."""
    found = KEPT.strategies.get(number)
    if found is None:
        family, row = KEPT.calls[number]
        loops = loops_in(family, row)
        try:
            found = {} if loops is None else _strategies(family, loops, row)
        except PardnnError:
            found = {}
        KEPT.strategies[number] = found
    return found


def _strategies(family: Family, loops: Loops, row: Row) -> dict[str, Strategy]:
    extents = extents_in(loops, row)
    found: dict[str, Strategy] = {}
    for axis in loops.analysis.axes:
        stencil = stencil_of(family, loops, row, extents, axis, 2)
        if stencil is not None and are_exact(family, loops, row, stencil):
            key = ("strategy", id(stencil))
            if key not in loops.stencils:  # stencils are kept, so that an id is always of one
                cut = stencil.ranges[1][0]
                loops.stencils[key] = strategy_of(
                    loops.analysis, family.form, axis, extents, cut, stencil.reducers
                )
            found[axis] = loops.stencils[key]
    return found


def rows_of(loops: Loops, row: Row, stencil: Stencil) -> list[Row]:
    """Return the row of each worker's piece: nothing of what is not read."""
    known: dict[tuple[int, ...], Row] = {}
    for sizes in stencil.sizes:
        if sizes not in known:
            local = list(row)
            for column, size in zip(stencil.columns, sizes, strict=True):
                local[column] = size
            for column in loops.unread:
                local[column] = 0
            known[sizes] = tuple(local)
    return [known[sizes] for sizes in stencil.sizes]


def are_exact(family: Family, loops: Loops, row: Row, stencil: Stencil) -> bool:
    """Return whether pieces hold just what they need, where the description asks for it."""
    return not loops.description.is_exact or all(
        is_exact(family, local) for local in dict.fromkeys(rows_of(loops, row, stencil))
    )
