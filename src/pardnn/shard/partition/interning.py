"""Calls as numbers, with cached analyses: equal calls of a graph are analysed once.

Problem: a training step of 10,000 ops makes some hundred distinct calls, each with many strategies.
Idea: a call's key is its skeleton and the shapes, so a repeated layer costs one look-up per op. A
local call mostly has the same shape class with other sizes, and is built as a `Call` only on
request. All tables are those of `cache`: a number is valid until `forget`.
Complexity: O(size of the arguments) to find a number.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pardnn.errors import PardnnError
from pardnn.shard.cache import cached
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
from pardnn.shard.partition.strategy import Reduce, Strategy, can_combine, strategy_of

#: Number of a call by `Skeleton.key`, and shape class and sizes by number.
_NUMBERS: dict[Any, int] = cached({})
_CLASSIFIED: list[tuple[ShapeClass, DimSizes]] = cached([])
#: Shape class by `shape_class_key`.
_SHAPE_CLASSES: dict[Any, ShapeClass] = cached({})
#: By number: see `interned_call`, `cuttable_loops` and `strategies_of`.
_CALLS: dict[int, Call] = cached({})
_LOOPS: dict[int, tuple[str, ...]] = cached({})
_STRATEGIES: dict[int, dict[str, Strategy]] = cached({})


def intern_call(call: Call) -> int:
    """Return the number of a call: equal calls have equal numbers, names of tensors aside."""
    skeleton = skeleton_of(call.kind, call.args, call.kwargs)
    key = skeleton.key(call.shapes, call.dtypes, call.outputs)
    number = find_call(key)
    return add_call(key, call, skeleton) if number is None else number


def find_call(key: Any) -> int | None:
    """Return the number of the call with a key of `Skeleton.key`, None if it has none."""
    return _NUMBERS.get(key)


def add_call(key: Any, call: Call, skeleton: Skeleton) -> int:
    """Return the number of a call whose key is new; it may be a local call that has a number.

    Args:
        key: From `Skeleton.key`.
        call: The call.
        skeleton: Of the call.
    """
    name = shape_class_key(call, skeleton)
    shape_class = _SHAPE_CLASSES.get(name)
    if shape_class is None:
        shape_class = _SHAPE_CLASSES[name] = new_shape_class(call)
    shapes = [call.shapes[name] for name in skeleton.names]
    number = _NUMBERS[key] = _number(shape_class, dim_sizes_of(shape_class, shapes, call.outputs))
    return number


def _number(shape_class: ShapeClass, dim_sizes: DimSizes) -> int:
    number = shape_class.numbers.get(dim_sizes)
    if number is None:
        number = shape_class.numbers[dim_sizes] = len(_CLASSIFIED)
        _CLASSIFIED.append((shape_class, dim_sizes))
    return number


def intern_local_call(
    shape_class: ShapeClass, attributes: Mapping[str, Any], dim_sizes: DimSizes
) -> int:
    """Return the number of the call that a worker makes of a cut call.

    Args:
        shape_class: Of the call that is cut.
        attributes: Arguments of the worker's call that replace those of that call.
        dim_sizes: The worker's sizes, in the shape class of that call.
    """
    ones = tuple([n == 1 for n in dim_sizes[: shape_class.num_input_dims]])
    if attributes or ones != shape_class.ones:
        return _number(*specialize(shape_class, attributes, dim_sizes, _SHAPE_CLASSES))
    return _number(shape_class, dim_sizes)


def classified(number: int) -> tuple[ShapeClass, DimSizes]:
    """Return the shape class of a call, and its sizes there."""
    return _CLASSIFIED[number]


def interned_call(number: int) -> Call:
    """Return the call of a number, its tensors named by slot."""
    if number not in _CALLS:
        _CALLS[number] = call_in(*_CLASSIFIED[number])
    return _CALLS[number]


def read_slots(number: int) -> dict[str, bool]:
    """Return for each slot of a call whether values are read, not just a size or nothing.

    Without a description that fits, all are.
    """
    shape_class, dim_sizes = _CLASSIFIED[number]
    nest = loop_nest_of(shape_class, dim_sizes)
    return (
        dict.fromkeys(shape_class.dim_slices.inputs, True) if nest is None else dict(nest.contents)
    )


def unread_inputs(call: Call) -> set[str]:
    """Return the tensors of which a call reads no values, such as x of `zeros_like(x)`.

    Args:
        call: Its tensors by any names.
    """
    number = intern_call(call)
    names = skeleton_of(call.kind, call.args, call.kwargs).names
    slots, mentions = read_slots(number), classified(number)[0].mentions
    read = {names[at] for at, is_read in zip(mentions, slots.values(), strict=True) if is_read}
    return set(names) - read


def cuttable_loops(number: int) -> tuple[str, ...]:
    """Return the loops of a call that can be cut and whose results can be exchanged.

    If the description does not fit the call, there is none: the op runs whole.
    """
    found = _LOOPS.get(number)
    if found is None:
        ranks = _CLASSIFIED[number][0].dim_slices.output_ranks
        found = _LOOPS[number] = tuple(
            loop
            for loop, strategy in strategies_of(number).items()
            if all(
                not isinstance(layout, Reduce) or can_combine(layout.reducer, rank)
                for layout, rank in zip(strategy.outputs, ranks, strict=True)
            )
        )
    return found


def strategies_of(number: int) -> dict[str, Strategy]:
    """Return the basic strategies of a call by loop; a wrong description counts as none."""
    found = _STRATEGIES.get(number)
    if found is None:
        shape_class, dim_sizes = _CLASSIFIED[number]
        nest = loop_nest_of(shape_class, dim_sizes)
        try:
            found = {} if nest is None else _strategies(shape_class, nest, dim_sizes)
        except PardnnError:
            found = {}
        _STRATEGIES[number] = found
    return found


def _strategies(
    shape_class: ShapeClass, nest: LoopNest, dim_sizes: DimSizes
) -> dict[str, Strategy]:
    extents = extents_in(nest, dim_sizes)
    found: dict[str, Strategy] = {}
    for loop in nest.analysis.loops:
        cut = loop_cut_of(shape_class, nest, dim_sizes, extents, loop, 2)
        if cut is not None and are_exact(shape_class, nest, dim_sizes, cut):
            key = ("strategy", id(cut))
            if key not in nest.loop_cuts:  # cuts are kept there, so that an id is always of one
                begin = cut.ranges[1][0]
                nest.loop_cuts[key] = strategy_of(
                    nest.analysis, shape_class.dim_slices, loop, extents, begin, cut.reducers
                )
            found[loop] = nest.loop_cuts[key]
    return found


def local_dim_sizes(nest: LoopNest, dim_sizes: DimSizes, cut: LoopCut) -> list[DimSizes]:
    """Return the sizes of each worker's call: 0 for inputs of which nothing is read.

    Args:
        nest: Of the call.
        dim_sizes: Of the call.
        cut: How one of its loops is cut.
    """
    known: dict[tuple[int, ...], DimSizes] = {}
    for sizes in cut.sizes:
        if sizes not in known:
            local = list(dim_sizes)
            for column, size in zip(cut.columns, sizes, strict=True):
                local[column] = size
            for column in nest.unread:
                local[column] = 0
            known[sizes] = tuple(local)
    return [known[sizes] for sizes in cut.sizes]


def are_exact(shape_class: ShapeClass, nest: LoopNest, dim_sizes: DimSizes, cut: LoopCut) -> bool:
    """Whether workers read exactly what they compute, if the description requires it.

    Args:
        shape_class: Of the call.
        nest: Of the call.
        dim_sizes: Of the call.
        cut: How one of its loops is cut.
    """
    return not nest.description.is_exact or all(
        is_exact(shape_class, local)
        for local in dict.fromkeys(local_dim_sizes(nest, dim_sizes, cut))
    )
