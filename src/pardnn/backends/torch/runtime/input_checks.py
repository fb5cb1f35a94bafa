"""Input checks: residents and batch have the shapes and types that the step was captured with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from pardnn.backends.torch.user_step.object_graph import Entry
from pardnn.errors import MismatchError, shown
from pardnn.graph.ir import Graph, Op


def shape_and_dtype(op: Op) -> tuple[tuple[int, ...] | None, torch.dtype | None]:
    """Return shape and dtype of a source's value; None for what the graph does not say."""
    (output,) = op.outputs
    dtype = getattr(torch, output.dtype or "", None)
    return output.shape, dtype if isinstance(dtype, torch.dtype) else None


def check_resident(op: Op, value: Any) -> None:
    """Check that a resident value is there, has data, and has the shape and type of its op.

    Raises:
        MismatchError: E514, naming the op.
    """
    shape, dtype = shape_and_dtype(op)
    if isinstance(value, torch.Tensor):
        is_real = not value.is_meta and value.untyped_storage().nbytes() >= op.outputs[0].bytes
        if dtype is None or (is_real and value.shape == shape and value.dtype == dtype):
            return
        found = (
            f"{_name(value.dtype)} {list(value.shape)}" if is_real else "uninitialised (no data)"
        )
    elif value is not None and dtype is None:
        return
    else:
        found = "missing" if value is None else f"a {type(value).__name__}"
    raise MismatchError(
        f"{op.kind} {shown(op.name)} is {found}; the graph needs {op.outputs[0].dtype} "
        f"{list(shape or ())}.\nInitialise the model before it runs, or capture it again as it is.",
        code="E514",
        details={"source": op.name},
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def other_batch(op: Op, value: torch.Tensor, rank: int) -> MismatchError:
    """Return the error E512 of an input of another shape or type than was captured.

    Args:
        op: The input op.
        value: What was given.
        rank: This rank.
    """
    shape, _ = shape_and_dtype(op)
    return MismatchError(
        f"input {shown(op.name)} is {_name(value.dtype)} "
        f"{list(value.shape)} on rank {rank}; captured was {op.outputs[0].dtype} "
        f"{list(shape or ())}.\nEvery rank is given the whole (global) batch, in the captured "
        "size: pad or drop a short last batch, or plan for its size too.",
        code="E512",
        details={"input": op.name, "given": list(value.shape), "captured": list(shape or ())},
    )


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


def granted_settings(graph: Graph, found: Mapping[str, Entry]) -> Iterator[tuple[str, Entry, Any]]:
    """Yield name, place and captured value of each setting that the graph takes for granted."""
    for name, value in graph.step_notes.get("settings", {}).items():
        if name in found:
            yield name, found[name], value


def without_data(value: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same shape, of one element: NaN, or 0 for integers."""
    fill = float("nan") if value.dtype.is_floating_point else 0
    return torch.full((), fill, dtype=value.dtype, device=value.device).expand(value.shape)
