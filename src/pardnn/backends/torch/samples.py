"""Calls as data, from real arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from pardnn.backends.torch.ops import encode, find_call, op_kind


def full_kind(op: str | Callable[..., Any]) -> str:
    """Return "mylib::op.default" for "mylib::op", or the kind of an overload."""
    if not isinstance(op, str):
        overload = getattr(op, "default", op)
        return op_kind(overload)
    return op if op.replace("::", ".").count(".") == 2 else f"{op}.default"


def call_with_values(
    op: str | Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[str, list[Any], dict[str, Any], dict[str, Any]]:
    """Return kind, arguments and keyword arguments as data, and the tensors by name.

    Raises:
        UnsupportedError: E801, if the op is not registered or an argument cannot be data.
    """
    kind = full_kind(op)
    find_call(kind)
    values: dict[str, Any] = {}

    def name_of(value: Any) -> str:
        if not isinstance(value, torch.Tensor):
            raise KeyError
        name = f"t{len(values)}"
        values[name] = value.detach()
        return name

    encoded = [encode(value, name_of) for value in args]
    return kind, encoded, {k: encode(v, name_of) for k, v in kwargs.items()}, values
