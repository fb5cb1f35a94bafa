"""Sharding strategies of one call along one mesh axis, as one array: one for each loop.

Idea: the cut of each loop (`loop_cut`) says which dims are cut where; all others are whole.
Complexity: O(loops x workers x dims) per distinct call.
Reference: Tofu (EuroSys 2019), section 4.2, for any number of workers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np
from jaxtyping import Int64
from numpy import ndarray

from pardnn.errors import PardnnError
from pardnn.shard.cache import cached
from pardnn.shard.partition.call import DimSlices
from pardnn.shard.partition.interning import (
    are_exact,
    classified,
    intern_local_call,
    local_dim_sizes,
)
from pardnn.shard.partition.loop_cut import LoopCut, loop_cut_of
from pardnn.shard.partition.shape_class import (
    DimSizes,
    LoopNest,
    ShapeClass,
    extents_in,
    loop_nest_of,
    shapes_in,
)
from pardnn.shard.partition.strategy import can_combine
from pardnn.shard.partition.worker_ops import ObservedShapes, WorkerShapes, local_attributes
from pardnn.time_limit import check_time

Attributes = Mapping[str, Any]

#: By number of a call and of workers.
_FOUND: dict[tuple[int, int], AxisStrategies] = cached({})


@final
@dataclass(eq=False, slots=True)
class AxisStrategies:
    """The strategies of one call along one mesh axis: one for each loop that can be cut.

    Attributes:
        number: Of the call.
        dim_slices: Which dims of boxes belong to which tensor.
        places: Position of each loop among `boxes`; that of None (all workers do the same) is the
            last.
        boxes: By loop and worker, the boxes that it needs of the inputs, which may be out of
            bounds, and the boxes of its results in the whole ones.
        out_of_bounds: Whether some box is out of bounds.
        contents: By loop, by slot whether values are read.
        flags: By loop and output, whether the workers' results are partial.
        strategies: By loop, how it is cut.
        local_calls: By loop, numbers of the local calls requested so far.
    """

    number: int
    dim_slices: DimSlices
    places: Mapping[str | None, int]
    boxes: Int64[ndarray, "l workers dims 2"]
    out_of_bounds: bool
    contents: Mapping[str | None, Mapping[str, bool]]
    flags: Mapping[str | None, tuple[bool, ...]]
    strategies: Mapping[str, _Strategy]
    local_calls: dict[str | None, tuple[int, ...]] = field(default_factory=dict)

    def calls(self, loop: str | None) -> tuple[int, ...]:
        """Return the number of each worker's call."""
        if loop not in self.local_calls:
            if loop is None:
                found = (self.number,) * self.boxes.shape[1]
            else:
                shape_class, _ = classified(self.number)
                strategy = self.strategies[loop]
                pairs = zip(strategy.attributes, strategy.local_sizes, strict=True)
                found = tuple(
                    [intern_local_call(shape_class, own, dim_sizes) for own, dim_sizes in pairs]
                )
            self.local_calls[loop] = found
        return self.local_calls[loop]


@final
@dataclass(eq=False, slots=True)
class _Strategy:
    """How one loop is cut.

    Attributes:
        cut: The dims that it cuts.
        local_sizes: By worker, sizes of its call in the shape class of the whole one.
        attributes: By worker, arguments in place of those of the whole call.
        dropped: By worker, inputs that its call does not take.
    """

    cut: LoopCut
    local_sizes: Sequence[DimSizes]
    attributes: Sequence[Attributes]
    dropped: Sequence[tuple[str, ...]]


def axis_strategies_of(number: int, num_workers: int) -> AxisStrategies:
    """Return the strategies of an interned call along one mesh axis of some workers."""
    key = (number, num_workers)
    if key not in _FOUND:
        check_time()
        _FOUND[key] = _axis_strategies(number, num_workers)
    return _FOUND[key]


def _axis_strategies(number: int, num_workers: int) -> AxisStrategies:
    shape_class, dim_sizes = classified(number)
    nest = loop_nest_of(shape_class, dim_sizes)
    strategies = {} if nest is None else _strategies(shape_class, nest, dim_sizes, num_workers)
    whole = [(0, size) for size in dim_sizes]
    blank = list(whole)
    for column in nest.unread if nest is not None else ():
        blank[column] = (0, 0)
    boxes: list[list[list[tuple[int, int]]]] = []
    out_of_bounds = False
    for strategy in strategies.values():
        columns = strategy.cut.columns
        each: list[list[tuple[int, int]]] = []
        for moved, dropped in zip(strategy.cut.moved, strategy.dropped, strict=True):
            line = list(blank)
            for column, ends in zip(columns, moved, strict=True):
                line[column] = ends
            for slot in dropped:
                dims = shape_class.dim_slices.inputs[slot]
                line[dims] = [(0, 0)] * (dims.stop - dims.start)
            each.append(line)
        out_of_bounds = out_of_bounds or strategy.cut.out_of_bounds
        boxes.append(each)
    boxes.append([whole] * num_workers)
    none = (False,) * len(shape_class.dim_slices.outputs)
    return AxisStrategies(
        number,
        shape_class.dim_slices,
        {loop: place for place, loop in enumerate((*strategies, None))},
        np.array(boxes, dtype=np.int64).reshape(len(boxes), num_workers, len(dim_sizes), 2),
        out_of_bounds,
        {loop: _contents(nest, strategy) for loop, strategy in strategies.items() if nest}
        | {None: {}},
        {loop: strategy.cut.flags for loop, strategy in strategies.items()} | {None: none},
        strategies,
    )


def _contents(nest: LoopNest, strategy: _Strategy) -> Mapping[str, bool]:
    nowhere = set(strategy.dropped[0]).intersection(*strategy.dropped)
    return nest.contents if not nowhere else {**nest.contents, **dict.fromkeys(nowhere, False)}


def _strategies(
    shape_class: ShapeClass, nest: LoopNest, dim_sizes: DimSizes, num_workers: int
) -> dict[str, _Strategy]:
    """Return how each loop of a call is cut that can be; those that fail are left out."""
    try:
        extents = extents_in(nest, dim_sizes)
    except PardnnError:
        return {}
    found: dict[str, _Strategy] = {}
    ranks = shape_class.dim_slices.output_ranks
    for loop in nest.analysis.loops:
        try:
            cut = loop_cut_of(shape_class, nest, dim_sizes, extents, loop, num_workers)
            if (
                cut is None
                or not all(map(can_combine, cut.reducers, ranks))
                or not are_exact(shape_class, nest, dim_sizes, cut)
            ):
                continue
            found[loop] = _strategy(shape_class, nest, dim_sizes, extents, loop, cut)
        except PardnnError:
            continue
    return found


def _strategy(
    shape_class: ShapeClass,
    nest: LoopNest,
    dim_sizes: DimSizes,
    extents: Mapping[str, int],
    loop: str,
    cut: LoopCut,
) -> _Strategy:
    local_sizes = local_dim_sizes(nest, dim_sizes, cut)
    count = len(local_sizes)
    if not nest.has_attributes:
        return _Strategy(cut, local_sizes, ({},) * count, ((),) * count)
    own = _attributes(shape_class, nest, extents, loop, cut, local_sizes)
    dropped = [
        tuple(
            [
                name
                for name, value in each.items()
                if value is None and name in shape_class.dim_slices.inputs
            ]
        )
        for each in own
    ]
    return _Strategy(cut, local_sizes, own, dropped)


def _attributes(
    shape_class: ShapeClass,
    nest: LoopNest,
    extents: Mapping[str, int],
    loop: str,
    cut: LoopCut,
    local_sizes: Sequence[DimSizes],
) -> Sequence[Attributes]:
    """Return the arguments that each worker calls with in place of those of the whole call.

    Where they follow from the loop alone, those of the first worker and those of all others are
    kept.
    """
    first, others = nest.attributes.get(loop, (None, None))
    if first is not None and others is not None:
        return [first, *[others] * (len(local_sizes) - 1)]
    full = {name: (0, size - 1) for name, size in extents.items()}
    rest = [
        (loop, worker, {**full, loop: ends}, *shapes_in(shape_class, local))
        for worker, (ends, local) in enumerate(zip(cut.ranges, local_sizes, strict=True))
    ]
    if loop in nest.attributes or len(rest) == 1:
        return [local_attributes(nest.analysis, WorkerShapes(*each)) for each in rest]
    shown = [ObservedShapes(*each) for each in rest]
    found = [
        local_attributes(nest.analysis, WorkerShapes(*each), shapes)
        for each, shapes in zip(rest, shown, strict=True)
    ]
    is_known = not any(shapes.was_asked for shapes in shown)
    nest.attributes[loop] = (found[0], found[1]) if is_known else (None, None)
    return found
