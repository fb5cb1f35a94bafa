"""Boxes of all tensors of a call side by side, as rows of one array."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from pardnn.shard.tdl import Shape


@dataclass(frozen=True, slots=True, eq=False)
class Form:
    """Where the boxes of a call's tensors are among all dims, side by side.

    Attributes:
        slots: Dims of each input.
        outputs: Dims of each output, None for what is not computed.
        width: Number of all dims.
    """

    slots: Mapping[str, slice]
    outputs: tuple[slice | None, ...]
    width: int


@lru_cache(maxsize=4096)
def _form(slots: tuple[tuple[str, int], ...], outputs: tuple[int | None, ...]) -> Form:
    ends = list(itertools.accumulate((rank or 0 for _, rank in slots), initial=0))
    inputs = {slot: slice(a, a + rank) for (slot, rank), a in zip(slots, ends, strict=False)}
    at, found = ends[-1], list[slice | None]()
    for rank in outputs:
        found.append(None if rank is None else slice(at, at + rank))
        at += rank or 0
    return Form(inputs, tuple(found), at)


def form_of(shapes: Mapping[str, Shape], outputs: Sequence[Shape | None]) -> Form:
    """Return the form of calls whose tensors have these ranks: always the same object."""
    return _form(
        tuple((slot, len(shape)) for slot, shape in shapes.items()),
        tuple(None if shape is None else len(shape) for shape in outputs),
    )
