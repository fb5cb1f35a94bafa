"""The batch of one call: its values by name, and what a graph takes for granted of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from pardnn.backends.torch.user_step.object_graph import Entry
from pardnn.errors import UnsupportedError, shown
from pardnn.graph.ir import LOSS_KIND, Graph, Op


class TensorKind(NamedTuple):
    """What a graph takes for granted of a tensor of the batch."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    requires_grad: bool

    def __repr__(self) -> str:
        """Return `float32 [4, 16]`."""
        grad = ", requires grad" * self.requires_grad
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}{grad}"


class Batch(NamedTuple):
    """The arguments of one call that are neither model nor optimizer.

    Attributes:
        values: As they were given.
        tensors: All tensors in them, by the name of their source.
        numbers: All plain values in them, by name.
    """

    values: tuple[Any, ...]
    tensors: dict[str, Any]
    numbers: dict[str, Any]


def kind_of(tensor: torch.Tensor) -> TensorKind:
    """Return what a graph takes for granted of a tensor."""
    return TensorKind(tensor.dtype, tuple(tensor.shape), tensor.requires_grad)


def is_number(op: Op) -> bool:
    """Whether an input is a number, not a tensor."""
    return (op.outputs[0].dtype or "").startswith("host.")


def same_again(name: str) -> UnsupportedError:
    """Return the error E807 of a tensor that a step replaced and that is passed again."""
    return UnsupportedError(
        f"the step puts another tensor in the place of the input {shown(name)}, and was given the "
        "same one again.\nThe caller's containers stay as they are: write into the tensor instead, "
        "tensor.copy_(new), which every rank's caller sees, or pass another tensor at each call.",
        code="E807",
        details={"tensor": name},
    )


def granted_settings(graph: Graph, found: Mapping[str, Entry]) -> Iterator[tuple[str, Entry, Any]]:
    """Yield name, place and captured value of each setting that the graph takes for granted."""
    loss = next((op for op in graph.ops if op.kind == LOSS_KIND), None)
    expected = ((loss.arguments or {}) if loss else {}).get("settings", {})
    for name, value in expected.items():
        if name in found:
            yield name, found[name], value


def without_data(value: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same shape, of one element: NaN, or 0 for integers."""
    fill = float("nan") if value.dtype.is_floating_point else 0
    return torch.full((), fill, dtype=value.dtype, device=value.device).expand(value.shape)
