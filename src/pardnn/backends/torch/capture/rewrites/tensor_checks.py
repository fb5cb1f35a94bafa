"""Ops that only raise if their tensor has invalid values: those of `torch.linalg`, and asserts.

Fake tensors have no values, so such an op does nothing in a trace, and would not be in the graph.
Instead each becomes a check of the step, like `if info.any(): raise`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

_ATEN = torch.ops.aten
_LINALG = _ATEN._linalg_check_errors.default
#: Ops that raise.
CHECKS = frozenset({_LINALG, _ATEN._assert_async.default, _ATEN._assert_async.msg})


class TensorCheck(NamedTuple):
    """What an op checks in its tensor.

    Attributes:
        op: Whether the tensor has invalid values, or valid ones.
        args: Its arguments.
        outcome: The outcome of the condition if nothing is raised.
        error: What is raised otherwise.
    """

    op: torch._ops.OpOverload
    args: tuple[Any, ...]
    outcome: bool
    error: Exception


def tensor_check(func: torch._ops.OpOverload, args: Sequence[Any]) -> TensorCheck:
    """Return what a call of one of `CHECKS` checks.

    Args:
        func: The op.
        args: Its positional arguments.
    """
    tensor, *texts = args
    if func is _LINALG:
        why = "positive-definite" if "cholesky" in texts[0] else "invertible"
        error = torch._C._LinAlgError(f"{texts[0]}: the input is not {why}, or has a NaN.")
        return TensorCheck(_ATEN.any.default, (tensor,), outcome=False, error=error)
    text = [*texts, "Expected Tensor with single nonzero value, but got zero"][0]
    return TensorCheck(_ATEN.ne.Scalar, (tensor, 0), outcome=True, error=RuntimeError(text))
