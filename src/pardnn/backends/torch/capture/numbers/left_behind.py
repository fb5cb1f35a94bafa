"""Numbers and gradients that data-dependent code leaves, see `choices`."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from pardnn.backends.torch.capture.restore import Changed, changes, is_arithmetic, is_flag
from pardnn.backends.torch.capture.trace_ir import Call, Storage, Value
from pardnn.backends.torch.ops.host_scalars import node_of
from pardnn.backends.torch.user_step.object_graph import PLAIN, ObjectGraph


class Chosen(NamedTuple):
    """A choice whose code has ended.

    Attributes:
        calls: The calls of the code.
        made: The calls that select.
        undone: The storages that it writes.
        told: Its effects.
        line: "file.py:line" of the condition.
    """

    calls: set[Call]
    made: set[Call]
    undone: set[Storage | None]
    told: list[dict[str, Any]]
    line: str | None


def changed_numbers(contents: Sequence[tuple[str, Any, Any]]) -> list[Changed]:
    """Return the changes of numbers that stay numbers, and of bools."""
    return [x for x in changes(contents).values() if is_arithmetic(x) or is_flag(x)]


def first_set(objects: ObjectGraph) -> str | None:
    """Return the name of a changed plain value that is neither a number nor an optimizer's."""
    is_bound = of_optimizers(objects)
    for name, change in changes(objects.contents).items():
        is_plain = isinstance(change.now, (*PLAIN, enum.Enum)) and change.slot is not None
        is_number = is_arithmetic(change) or is_flag(change)
        if is_plain and not is_number and not is_bound(name):
            return name
    return None


def of_optimizers(objects: ObjectGraph) -> Callable[[str], bool]:
    """Return whether a name belongs to an optimizer, schedule or gradient scaler."""
    bound = [e.name for e in objects.stateful if not isinstance(e.value, torch.nn.Module)]
    prefixes = tuple(f"{name}." for name in bound)
    return lambda name: name.startswith(prefixes)


def values_in(data: Any) -> set[Value]:
    """Return the values of the trace in the effects of a step."""
    if isinstance(data, dict):
        data = [*data.values()]
    if isinstance(data, list):
        return {value for item in data for value in values_in(item)}
    return {data} if isinstance(data, Value) else set()


def gradients(objects: ObjectGraph) -> list[torch.Tensor | None]:
    """Return the gradient of each parameter; None if it has none."""
    leaves = (entry.value for entry in objects.tensors if entry.value.requires_grad)
    return [tensor.grad if tensor.is_leaf else None for tensor in leaves]


def is_number(value: Any) -> bool:
    """Whether a value is a number, or stands for one of the trace."""
    return type(value) in (int, float) or node_of(value) is not None
