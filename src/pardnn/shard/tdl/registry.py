"""The registry of descriptions by operator."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pardnn.shard.tdl.interval import DescriptionError


@dataclass(frozen=True, slots=True)
class Description:
    """What is known about one operator.

    Attributes:
        name: Such as "aten.mm", without the overload, or with it where overloads differ.
        function: The description.
        is_random: Workers' results have the distribution of the whole result, but not its values,
            which come from the plan.
        is_exact: A worker must read exactly the elements that its output needs (views).
        takes_strided: The kernels handle strides. All others get a contiguous copy of an input
            that is strided on its device but contiguous in the graph: some, such as the backward
            pass of layer norm, assume a contiguous input and are silently wrong otherwise.
        source: "file.py:line" of the description.
    """

    name: str
    function: Callable[..., Any]
    is_random: bool = False
    is_exact: bool = False
    takes_strided: bool = False
    source: str = field(default="", compare=False)


_Function = TypeVar("_Function", bound=Callable[..., Any])

#: By name: what users describe, and what comes with the package.
USERS: dict[str, Description] = {}
ATEN: dict[str, Description] = {}


def canonical_name(name: str) -> str:
    """Return "ns.op" or "ns.op.overload" for "ns::op", "aten.op.default" and the like.

    Raises:
        DescriptionError: E220, if it names no operator.
    """
    parts = name.replace("::", ".").split(".")
    if len(parts) < 2 or not all(parts):
        raise DescriptionError(f"{name!r:.80} is not an operator; examples: 'aten.mm', 'mylib::op'")
    return ".".join(parts[:2] if parts[2:] == ["default"] else parts)


def _registering(
    registry: dict[str, Description], names: tuple[str, ...], flags: dict[str, bool]
) -> Callable[[_Function], _Function]:
    def register(function: _Function) -> _Function:
        code = function.__code__
        source = f"{code.co_filename.rsplit('/', 1)[-1]}:{code.co_firstlineno}"
        for name in map(canonical_name, names):
            registry[name] = Description(name, function, **flags, source=source)
        find.cache_clear()
        return function

    return register


def describe(
    *names: str, is_random: bool = False, is_exact: bool = False, takes_strided: bool = False
) -> Callable[[_Function], _Function]:
    """Register a description of operators; it overrides pardnn's own and earlier ones.

    Args:
        names: Such as "mylib::op"; "aten.add" covers all overloads and in-place forms.
        is_random: See `Description`.
        is_exact: See `Description`.
        takes_strided: See `Description`.

    Returns:
        A decorator that leaves the function as it is.

    Raises:
        DescriptionError: E220, if a name does not have the form of an operator name.
    """
    flags = {"is_random": is_random, "is_exact": is_exact, "takes_strided": takes_strided}
    return _registering(USERS, names, flags)


def describe_aten(*names: str, **flags: bool) -> Callable[[_Function], _Function]:
    """Register a description that comes with the package; see `describe`."""
    return _registering(ATEN, names, flags)


#: `describe_aten`, for operators whose kernels read strides.
describe_strided = functools.partial(describe_aten, takes_strided=True)


def _spellings(kind: str) -> Iterator[str]:
    name = canonical_name(kind)
    namespace, op, *overload = name.split(".")
    yield name
    if overload:
        yield f"{namespace}.{op}"
    if op.endswith("_") and not op.endswith("__"):
        for suffix in ([f".{overload[0]}"] if overload else []), []:
            yield f"{namespace}.{op[:-1]}" + "".join(suffix)


@functools.lru_cache(maxsize=4096)
def find(kind: str) -> Description | None:
    """Return the registered description of an op's kind, None if there is none.

    The overload's own comes first, then the operator's, then that of the out-of-place form.
    """
    for name in _spellings(kind):
        if (found := USERS.get(name) or ATEN.get(name)) is not None:
            return found
    return None


def is_users(description: Description) -> bool:
    """Whether a user wrote a description."""
    return USERS.get(description.name) is description
