"""Calls as numbers, and what is known of each: equal calls of a graph are looked at once.

Idea: a call's key is its skeleton and the shapes, so a layer that is repeated costs one look-up per
op; a local call is mostly the same shape class with other sizes, and is put together only if
it is asked for. What is kept lives as long as the process, up to a bound.
Complexity: O(size of the arguments) to find a number.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pardnn.errors import PardnnError
from pardnn.shard.partition.call import Call, Skeleton, skeleton_of
from pardnn.shard.partition.loop_cut import LoopCut, loop_cut_of
from pardnn.shard.partition.shape_class import (
    DimSizes,
    LoopNest,
    ShapeClass,
    call_in,
    dim_sizes_of,
    extents_in,
    is_exact,
    loop_nest_of,
    new_shape_class,
    shape_class_key,
    specialize,
)
from pardnn.shard.partition.strategy import Reduce, Strategy, strategy_of

#: Reducers whose partial results are exchanged; loops of others are not cut.
EXCHANGED = frozenset({"sum", "mean", "max", "min", "prod"})


class Kept:
    """Interned calls and what is known of them, by number.

    Attributes:
        numbers: By key of `Skeleton.key`.
        families: By `shape_class_key`.
        calls: Family and row of each number.
        made: Calls that were asked for, tensors named by slot.
        loop_nest: See `cuttable_loops`.
        strategies: See `strategies_of`.
        others: What `strategies` knows.
    """

    def __init__(self) -> None:
        """Nothing is known yet."""
        self.numbers: dict[Any, int] = {}
        self.families: dict[Any, ShapeClass] = {}
        self.calls: list[tuple[ShapeClass, DimSizes]] = []
        self.made: dict[int, Call] = {}
        self.loop_nest: dict[int, tuple[str, ...]] = {}
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
    number = find_call(key)
    return added(key, call, skeleton) if number is None else number


def find_call(key: Any) -> int | None:
    """Return the number of the call with a key of `Skeleton.key`, None if it has none."""
    return KEPT.numbers.get(key)


def added(key: Any, call: Call, skeleton: Skeleton) -> int:
    """Return the number of a call whose key is new. Its pieces may have been there before."""
    name = shape_class_key(call, skeleton)
    shape_class = KEPT.families.get(name)
    if shape_class is None:
        shape_class = KEPT.families[name] = new_shape_class(call)
    dim_sizes = dim_sizes_of(
        shape_class, [call.shapes[name] for name in skeleton.names], call.outputs
    )
    number = KEPT.numbers[key] = _numbered(shape_class, dim_sizes)
    return number


def _numbered(shape_class: ShapeClass, dim_sizes: DimSizes) -> int:
    number = shape_class.numbers.get(dim_sizes)
    if number is None:
        number = shape_class.numbers[dim_sizes] = len(KEPT.calls)
        KEPT.calls.append((shape_class, dim_sizes))
    return number


def intern_local_call(
    shape_class: ShapeClass, attributes: Mapping[str, Any], dim_sizes: DimSizes
) -> int:
    """Return the number of a piece of a call.

    Args:
        shape_class: Of the call.
        attributes: Arguments that the piece calls with in place of those of the whole call.
        dim_sizes: Of the piece, in the family of the call.
    """
    if attributes or tuple([n == 1 for n in dim_sizes[: shape_class.inputs]]) != shape_class.ones:
        return _numbered(*specialize(shape_class, attributes, dim_sizes, KEPT.families))
    return _numbered(shape_class, dim_sizes)


def interned_call(number: int) -> Call:
    """Return the call of a number, its tensors named by slot."""
    if number not in KEPT.made:
        KEPT.made[number] = call_in(*KEPT.calls[number])
    return KEPT.made[number]


def cuttable_loops(number: int) -> tuple[str, ...]:
    """Return the loops of a call that can be cut, those of reducers nobody exchanges left out.

    A description that does not fit the call counts as none: the op runs whole.
    """
    found = KEPT.loop_nest.get(number)
    if found is None:
        found = KEPT.loop_nest[number] = tuple(
            loop
            for loop, strategy in strategies_of(number).items()
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
        shape_class, dim_sizes = KEPT.calls[number]
        loop_nest = loop_nest_of(shape_class, dim_sizes)
        try:
            found = {} if loop_nest is None else _strategies(shape_class, loop_nest, dim_sizes)
        except PardnnError:
            found = {}
        KEPT.strategies[number] = found
    return found


def _strategies(
    shape_class: ShapeClass, loop_nest: LoopNest, dim_sizes: DimSizes
) -> dict[str, Strategy]:
    extents = extents_in(loop_nest, dim_sizes)
    found: dict[str, Strategy] = {}
    for loop in loop_nest.analysis.loops:
        loop_cut = loop_cut_of(shape_class, loop_nest, dim_sizes, extents, loop, 2)
        if loop_cut is not None and are_exact(shape_class, loop_nest, dim_sizes, loop_cut):
            key = ("strategy", id(loop_cut))
            if key not in loop_nest.loop_cuts:  # stencils are kept, so that an id is always of one
                cut = loop_cut.ranges[1][0]
                loop_nest.loop_cuts[key] = strategy_of(
                    loop_nest.analysis,
                    shape_class.dim_slices,
                    loop,
                    extents,
                    cut,
                    loop_cut.reducers,
                )
            found[loop] = loop_nest.loop_cuts[key]
    return found


def local_dim_sizes(loop_nest: LoopNest, dim_sizes: DimSizes, loop_cut: LoopCut) -> list[DimSizes]:
    """Return the row of each worker's piece: nothing of what is not read."""
    known: dict[tuple[int, ...], DimSizes] = {}
    for sizes in loop_cut.sizes:
        if sizes not in known:
            local = list(dim_sizes)
            for column, size in zip(loop_cut.columns, sizes, strict=True):
                local[column] = size
            for column in loop_nest.unread:
                local[column] = 0
            known[sizes] = tuple(local)
    return [known[sizes] for sizes in loop_cut.sizes]


def are_exact(
    shape_class: ShapeClass, loop_nest: LoopNest, dim_sizes: DimSizes, loop_cut: LoopCut
) -> bool:
    """Return whether pieces hold just what they need, where the description asks for it."""
    return not loop_nest.description.is_exact or all(
        is_exact(shape_class, local)
        for local in dict.fromkeys(local_dim_sizes(loop_nest, dim_sizes, loop_cut))
    )
