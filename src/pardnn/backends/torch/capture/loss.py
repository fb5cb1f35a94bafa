"""The loss: which tensor of the step's result it is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from pardnn.backends.torch.capture import unsupported


def loss_of(result: Any) -> torch.Tensor:
    """Return the first scalar floating-point tensor in what a step returned, `loss` first.

    Raises:
        UnsupportedError: E805, if there is none.
    """
    found = next(_scalars(result, 0), None)
    if found is None:
        raise unsupported.no_loss(_described(result))
    return found


def _scalars(result: Any, depth: int) -> Iterator[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        if result.numel() == 1 and result.dtype.is_floating_point:
            yield result
        return
    if depth > 4 or isinstance(result, str | bytes | int | float | type(None)):
        return
    named = result.get("loss") if isinstance(result, dict) else getattr(result, "loss", None)
    if named is not None:
        yield from _scalars(named, depth + 1)
    for item in _items(result):
        yield from _scalars(item, depth + 1)


def _items(result: Any) -> list[Any]:
    if isinstance(result, dict):
        return list(result.values())
    if isinstance(result, list | tuple):
        return list(result)
    if is_dataclass(result):
        return [getattr(result, field.name) for field in fields(result)]
    return list(getattr(result, "__dict__", {}).values())


def _described(result: Any) -> str:
    if isinstance(result, torch.Tensor):
        return f"a {str(result.dtype).removeprefix('torch.')} tensor of shape {list(result.shape)}"
    if isinstance(result, list | tuple):
        return f"a {type(result).__name__} of " + (
            ", ".join(_described(item) for item in result[:4]) or "nothing"
        )
    if isinstance(result, torch.SymInt | torch.SymFloat):
        return "a number, as .item() makes it"
    return "nothing" if result is None else f"a {type(result).__name__}"
