"""Errors about dtypes that are not those of the graph: another default dtype, numbers of NumPy.

A graph runs under the default dtype of the caller: tensors made without one, and quotients of
integers, would otherwise get another.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from pardnn.backends.torch.capture.refusals.unsupported import at, error_at
from pardnn.errors import UnsupportedError


def other_dtypes_refused(
    where: Callable[[], str | None],
) -> contextlib.AbstractContextManager[Any]:
    """Refuse to set another default dtype while the context is open.

    Args:
        where: Returns the user's line that runs.

    Raises:
        UnsupportedError: E801.
    """
    real = torch.set_default_dtype

    def set_default_dtype(dtype: torch.dtype, /) -> None:
        if dtype is not torch.get_default_dtype():
            raise sets_default_dtype(where())
        real(dtype)

    return mock.patch.object(torch, "set_default_dtype", set_default_dtype)


def sets_default_dtype(where: str | None) -> UnsupportedError:
    """Return E801: a step that sets another default dtype.

    Args:
        where: "file.py:line" of the user's code; None if unknown.
    """
    return error_at(
        where,
        f"the step sets torch's default dtype{at(where)}: its graph runs\n"
        "under that of the caller.\n"
        "Give the dtype where a tensor is made: torch.ones(3, dtype=torch.float64).",
    )


def numpy_dtype(where: str | None) -> UnsupportedError:
    """Return E802: `torch.tensor` of a number that NumPy makes, whose dtype is the tensor's."""
    return error_at(
        where,
        f"torch.tensor takes its dtype from a number that NumPy makes{at(where)}: float64.\n"
        "While a step is captured, another number stands for it. Name the dtype:\n"
        "torch.tensor(number, dtype=torch.float64).",
        "E802",
    )
