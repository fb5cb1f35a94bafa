"""Descriptions by operator: how they are registered and found."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from pardnn.shard.interval import DescriptionError


@dataclass(frozen=True, slots=True)
class Description:
    """What is known about one operator.

    Attributes:
        name: Such as "aten.mm", without the overload, or with it where overloads differ.
        function: The description.
        is_random: Pieces have the law of the whole, not its values: those come from the plan.
        is_exact: Each piece of the input must hold just the elements that its output needs (views).
        takes_strided: The kernels read strides. Others get a contiguous copy of an input that is
            strided on its device though contiguous in the graph: some take a contiguous one for
            granted, as the backward pass of layer norm does, and are wrong without a word.
        source: "file.py:line" of the description.
    """

    name: str
    function: Callable[..., Any]
    is_random: bool = False
    is_exact: bool = False
    takes_strided: bool = False
    source: str = field(default="", compare=False)


_REGISTRY: dict[str, Description] = {}
_FOUND: dict[str, Description | None] = {}


def canonical_name(name: str) -> str:
    """Return "ns.op" or "ns.op.overload" for "ns::op", "aten.op.default" and the like."""
    parts = name.replace("::", ".").split(".")
    if len(parts) < 2 or not all(parts):
        raise DescriptionError(f"{name!r:.80} names no operator; examples: 'aten.mm', 'mylib::op'")
    return ".".join(parts[:2] if parts[2:] == ["default"] else parts)


def describe(
    *names: str, is_random: bool = False, is_exact: bool = False, takes_strided: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a description of operators, replacing an earlier one.

    Args:
        names: Such as "mylib::op"; "aten.add" stands for all overloads and in-place forms.
        is_random: See `Description`.
        is_exact: See `Description`.
        takes_strided: See `Description`.

    Returns:
        A decorator that leaves the function as it is.

    Raises:
        DescriptionError: E220, if a name has not the form of an operator's.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        code = function.__code__
        source = f"{code.co_filename.rsplit('/', 1)[-1]}:{code.co_firstlineno}"
        if not function.__module__.startswith("pardnn.shard.describe."):
            load_descriptions()  # first, or they would replace this one
        for name in map(canonical_name, names):
            _REGISTRY[name] = Description(
                name, function, is_random, is_exact, takes_strided, source=source
            )
        _FOUND.clear()
        return function

    return register


#: `describe`, for operators whose kernels read strides.
describe_strided = functools.partial(describe, takes_strided=True)


def _spellings(kind: str) -> Iterator[str]:
    name = canonical_name(kind)
    namespace, op, *overload = name.split(".")
    yield name
    if overload:
        yield f"{namespace}.{op}"
    if op.endswith("_") and not op.endswith("__"):
        for suffix in ([f".{overload[0]}"] if overload else []), []:
            yield f"{namespace}.{op[:-1]}" + "".join(suffix)


def description_of(kind: str) -> Description | None:
    """Return the description of an op's kind, None if there is none.

    The overload's own comes first, then the operator's, then that of the out-of-place form.
    """
    if kind not in _FOUND:
        load_descriptions()
        names = (name for name in _spellings(kind) if name in _REGISTRY)
        _FOUND[kind] = next((_REGISTRY[name] for name in names), None)
    return _FOUND[kind]


def load_descriptions() -> None:
    """Register the descriptions of ATen that come with the package, once."""
    import pardnn.shard.describe  # noqa: F401  (its import registers them)


def described() -> dict[str, Description]:
    """Return all descriptions by name."""
    load_descriptions()
    return dict(_REGISTRY)
