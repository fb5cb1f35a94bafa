"""The checker of a piece's call: it is that of the whole op, on the piece's tensors.

Numbers are those of the whole call, but for sizes, of which a piece may have its share or say what
-1 stood for (its result's shape is checked beside), and for means that become sums: a gradient of
a mean is then given a share of its gradient, and a mean of rows is divided by their number after.
Of calls whose numbers say where elements are (`LOCATED`), and of ops of other libraries, only the
tensors are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

from pardnn.graph.ir import Op
from pardnn.plan.pieces import piece_of

#: How losses say that they are a mean, or a sum.
MEAN, SUM = 1, 2
#: Losses of which a mean is made of sums of pieces.
COUNTING = ("aten.nll_loss_forward", "aten.nll_loss2d_forward")

#: Calls whose numbers may say where in the batch a piece is, or how long it is.
LOCATED = (
    "aten.arange", "aten.slice", "aten.tril", "aten.triu", "aten.diagonal", "aten.as_strided",
    "aten.constant_pad_nd", "aten.native_group_norm",
)  # fmt: skip


class Share(NamedTuple):
    """Samples of a piece, of those of the batch."""

    piece: int
    batch: int


def call_problem(
    op: Op, args: list[Any], whole: Op, piece: int, share: Share, reads: Callable[[str, str], bool]
) -> str | None:
    """Return what is wrong with the arguments of a piece.

    Args:
        op: The piece.
        args: Its arguments, without an accumulator.
        whole: The op of the graph.
        piece: Number of the piece.
        share: Its samples.
        reads: Whether a tensor stands for another one, of the graph, in a piece.
    """
    found, expected = dict(op.arguments or {}), dict(whole.arguments or {})
    if found.pop("returns", None) != _returns(op, whole, piece):
        return "it gives its results other names"
    changes, changed = found.pop("mutates", []), expected.pop("mutates", [])
    if len(changes) != len(changed) or not all(map(reads, changes, changed)):
        return "it changes other tensors in place"
    found["args"] = args
    expected.pop("returns", None)
    if whole.kind.startswith(LOCATED) or not whole.kind.startswith("aten."):
        names, others = list(_tensors(found)), list(_tensors(expected))
        is_same = len(names) == len(others) and all(map(reads, names, others))
        return None if is_same else "it reads other tensors"
    first = 3 if whole.kind.startswith(COUNTING) else 2
    if _is_sum(op, whole) and MEAN in expected["args"][first:]:
        at = expected["args"].index(MEAN, first)
        expected["args"] = [*expected["args"][:at], SUM, *expected["args"][at + 1 :]]
    return None if _is_same(found, expected, share, reads, False) else "its arguments differ"


def _is_sum(op: Op, whole: Op) -> bool:
    """Whether a mean is made of the pieces' sums."""
    if any(name == f"{whole.name}:share" for name in op.inputs):
        return True
    return whole.kind.startswith(COUNTING)


def _tensors(value: Any) -> Iterator[str]:
    """Yield the names of tensors in arguments."""
    if isinstance(value, dict):
        named = cast("dict[str, Any]", value)
        if set(named) == {"tensor"}:
            yield named["tensor"]
            return
        value = [named[key] for key in sorted(named)]
    if isinstance(value, list | tuple):
        for each in cast("Sequence[Any]", value):
            yield from _tensors(each)


def _returns(op: Op, whole: Op, piece: int) -> list[str | None] | None:
    """Return which results the arguments must name; None for none."""
    stated = (whole.arguments or {}).get("returns")
    if stated is None and len(op.outputs) == len(whole.outputs):
        return None
    names = stated or [tensor.name for tensor in whole.outputs]
    made = {tensor.name for tensor in op.outputs}
    pieces = [None if name is None else piece_of(name, piece) for name in names]
    return [name if name in made else None for name in pieces]


def _is_same(
    found: Any, expected: Any, share: Share, reads: Callable[[str, str], bool], is_size: bool
) -> bool:
    """Whether arguments are those of the whole call, as far as a piece's may be."""
    if isinstance(expected, dict):
        wanted, given = cast("dict[str, Any]", expected), cast("dict[str, Any]", found)
        if not isinstance(found, dict) or set(given) != set(wanted):
            return False
        if set(wanted) == {"tensor"}:
            return reads(given["tensor"], wanted["tensor"])
        return all(_is_same(given[key], wanted[key], share, reads, False) for key in wanted)
    if isinstance(expected, list | tuple):
        own = cast("Sequence[Any]", found)
        listed = cast("Sequence[Any]", expected)
        is_sizes = not any(isinstance(each, list | dict | tuple) for each in listed)
        is_listed = isinstance(found, list | tuple) and len(own) == len(listed)
        return is_listed and all(
            _is_same(a, b, share, reads, is_sizes) for a, b in zip(own, listed, strict=True)
        )
    if type(found) is not type(expected):
        return False
    if found == expected:
        return True
    is_number = is_size and type(expected) is int
    return is_number and (
        (expected == -1 and found >= 0) or found * share.batch == expected * share.piece
    )
