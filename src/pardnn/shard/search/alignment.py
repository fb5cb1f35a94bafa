"""Calls that work position by position: which dims of their tensors are cut together.

An element-wise op, a transpose or a dropout has, for every dim of its result, a loop whose cut cuts
the arguments at the same indices. If all its tensors are one class, it moves no bytes under any
layout, and the search can ignore it.
Reference: Tofu (EuroSys 2019), section 5.1, "Coalescing operators": "We analyze the TDL description
to determine if an operator is element-wise".
Deviations: transposes and other permutations of dims count too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pardnn.shard.cache import cached
from pardnn.shard.partition.call import Call
from pardnn.shard.partition.interning import (
    classified,
    cuttable_loops,
    interned_call,
    strategies_of,
)
from pardnn.shard.partition.shape_class import loop_nest_of
from pardnn.shard.partition.strategy import Cut, Strategy, Unread

Place = str | int
"""A slot of an input or the number of an output."""


@dataclass(frozen=True, slots=True)
class Alignment:
    """Which dims of its tensors a call cuts together.

    Attributes:
        loops: By loop, the dim that it cuts of each tensor, if it cuts all at the same indices.
        pairs: Places whose tensors have all dims in common, each with the first output, and for
            each dim of that output the dim there.
        is_total: Whether the pairs include every tensor of the call that has dims.
    """

    loops: Mapping[str, Mapping[Place, int]]
    pairs: Mapping[Place, tuple[int | None, ...]]
    is_total: bool


_NOTHING = Alignment({}, {}, False)
#: By number of a call.
_ALIGNMENTS: dict[int, Alignment] = cached({})


def alignment_of(number: int) -> Alignment:
    """Return which dims of its tensors a call cuts together, by the number of the call."""
    if number not in _ALIGNMENTS:
        _ALIGNMENTS[number] = _alignment(interned_call(number), number)
    return _ALIGNMENTS[number]


def _alignment(call: Call, number: int) -> Alignment:
    nest = loop_nest_of(*classified(number))
    if nest is None or not call.outputs or call.outputs[0] is None:
        return _NOTHING
    analysis, found = nest.analysis, strategies_of(number)
    shapes: dict[Place, tuple[int, ...]] = {**call.shapes}
    shapes |= {i: shape for i, shape in enumerate(call.outputs) if shape is not None}
    loops: dict[str, dict[Place, int]] = {}
    for loop in cuttable_loops(number):
        if math.lcm(*analysis.multiples[loop]) == 1:
            loops[loop] = dict(_cuts(found[loop], shapes))
    pairs: dict[Place, tuple[int | None, ...]] = {}
    for place, shape in shapes.items():
        dims = _pairing(loops, call.outputs[0], shape, place)
        if place != 0 and dims is not None:
            pairs[place] = dims
    large = [place for place, shape in shapes.items() if shape]
    return Alignment(loops, pairs, all(place == 0 or place in pairs for place in large))


def _cuts(
    strategy: Strategy, shapes: Mapping[Place, tuple[int, ...]]
) -> Iterator[tuple[Place, int]]:
    out = strategy.outputs[0]
    for place, shape in shapes.items():
        layout = strategy.outputs[place] if isinstance(place, int) else strategy.inputs[place]
        if isinstance(layout, Unread) and isinstance(out, Cut) and shape == shapes[0]:
            layout = out
        if not isinstance(layout, Cut) or layout.before or layout.after:
            continue
        if layout.scale == 1 and shape[layout.dim] == strategy.extent:
            yield place, layout.dim


def _pairing(
    loops: Mapping[str, Mapping[Place, int]],
    output: tuple[int, ...],
    shape: tuple[int, ...],
    place: Place,
) -> tuple[int | None, ...] | None:
    """Return the dim at a place for each dim of the output, None if some are not in common."""
    dims: list[int | None] = [None] * len(output)
    for cuts in loops.values():
        if 0 in cuts and place in cuts:
            dims[cuts[0]] = cuts[place]
    is_whole = all(d is not None or n == 1 for d, n in zip(dims, output, strict=True))
    others = {d for d, n in enumerate(shape) if n > 1}
    return tuple(dims) if is_whole and others <= set(dims) and others else None


def free_loop(number: int, dim: int) -> str | None:
    """Return the loop that cuts the first output of a wholly aligned call along a dim."""
    for loop, cuts in alignment_of(number).loops.items():
        if cuts.get(0) == dim:
            return loop
    return None
