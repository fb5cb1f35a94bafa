"""One output of a description, run on symbolic indices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pardnn.shard.interval import Affine, DescriptionError, variable
from pardnn.shard.tdl import At, Node, Range, Reduction, entry, parameters, result


@dataclass(frozen=True, slots=True, eq=False)
class Output:
    """One output, traced.

    Attributes:
        names: Variables that stand for positions, in the order of the lambda.
        extents: Sizes of the variables that say theirs.
        place: Where values stand: one entry per dim.
        value: What is computed there.
        bare: Whether `place` is the variables themselves.
    """

    names: tuple[str, ...]
    extents: Mapping[str, int]
    place: tuple[Affine | Range, ...]
    value: Node
    bare: bool


def _place_of(value: Node) -> At | None:
    """Return the `At` that a value is, below any reductions."""
    while isinstance(value, Reduction):
        value = value.body
    return value if isinstance(value, At) else None


def trace(function: Callable[..., Any], ndim: int) -> Output:
    """Run the lambda of one output on symbolic indices.

    Raises:
        DescriptionError: E220, if it is not affine, or its rank is not `ndim`.
    """
    names, extents = parameters(function, ndim)
    value = result(function, names)
    at = _place_of(value)
    if at is None:
        listed: tuple[Affine | Range, ...] = tuple(variable(name) for name in names)
    else:
        listed = tuple(map(entry, at.place))
    if len(listed) != ndim:
        raise DescriptionError(
            f"an output has {ndim} dims and is described with {len(listed)} indices"
        )
    return Output(names, extents, listed, value, at is None)
