"""Check a description of an operator against the operator itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pardnn import backends
from pardnn.planner.check_descriptions import Verification, verify_call

__all__ = ["Verification", "verify"]


def verify(
    op: str | Callable[..., Any],
    *args: Any,
    workers: Sequence[int] = (2, 3, 4, 5),
    double: bool = True,
    **kwargs: Any,
) -> Verification:
    """Check a description: cut a call in every described way and compare with the whole call.

    Args:
        op: A name such as "mylib::op" or "aten.mm.default", or the overload itself.
        args: Sample arguments: small tensors, but with dims of at least 5.
        workers: Numbers of workers to cut the call among.
        double: Compute in float64, so that differences are not due to rounding.
        kwargs: Keyword arguments of the call.

    Raises:
        UsageError: E201, if the operator has no description.
        DescriptionError: E220, if its description cannot be analysed.
    """
    kind, encoded, keywords, values = backends.call_with_values(op, args, kwargs)
    if double and not kind.startswith("aten._fused_"):  # these count steps in float32 alone
        values = backends.in_double(values)
    return verify_call(kind, encoded, keywords, values, workers)
