"""Texts of numbers and tensors, as Python and torch format them."""

from __future__ import annotations

import json
from typing import Any

import torch

#: Prefix of formats of `%`, as in "by %.3f".
PERCENT = "by "
#: A tensor's text says what it is to autograd: prefixes of its format.
_TENSOR, _LEAF, _PARAMETER, _MADE = "str", "str leaf", "str parameter", "str grad_fn="


def text_format(tensor: torch.Tensor) -> str:
    """Return the format of a tensor's text, which `format_number` needs beside its numbers."""
    if isinstance(tensor, torch.nn.Parameter):
        return _PARAMETER if tensor.requires_grad else f"{_PARAMETER}, frozen"
    if tensor.grad_fn is None:
        return _LEAF if tensor.requires_grad else _TENSOR
    name = type(tensor.grad_fn).__name__
    return _MADE + (tensor.grad_fn.name().rpartition("::")[2] if name == "CppFunction" else name)


def format_number(number: Any, spec: str) -> str:
    """Return the text of a number or tensor.

    Args:
        number: The number or tensor.
        spec: A format of Python's; `PERCENT` and one of `%`; "json" for the text that `json` makes;
            or one of `text_format`.
    """
    if spec == "json":
        return json.dumps(number)
    if spec.startswith(PERCENT):
        return spec.removeprefix(PERCENT) % number
    if not spec.startswith(_TENSOR):
        return format(number, spec)
    return _text_of_tensor(number, spec) if isinstance(number, torch.Tensor) else str(number)


def _text_of_tensor(tensor: torch.Tensor, spec: str) -> str:
    tensor = tensor.detach()
    if spec.startswith(_PARAMETER):
        return str(torch.nn.Parameter(tensor, requires_grad=spec == _PARAMETER))
    if spec == _LEAF:
        return str(tensor.requires_grad_())
    if not spec.startswith(_MADE):
        return str(tensor)
    with torch.enable_grad():
        made: Any = _Same.apply(tensor.requires_grad_())
    type(made.grad_fn).__name__ = spec.removeprefix(_MADE)
    return str(made)


class _Same(torch.autograd.Function):
    """The identity, under the name of any other function."""

    @staticmethod
    def forward(_ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor with the same numbers."""
        return tensor.clone()
