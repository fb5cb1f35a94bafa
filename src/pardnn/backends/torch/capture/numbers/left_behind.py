"""What code leaves behind that runs by data, see `choices`: numbers, gradients, local variables."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from pardnn.backends.torch.capture.refusals import unsupported
from pardnn.backends.torch.capture.restore import Changed, changes, is_arithmetic
from pardnn.backends.torch.capture.trace_ir import ITEM, Call, Storage, Value
from pardnn.backends.torch.ops.host_scalars import HostNode, node_of
from pardnn.backends.torch.user_step.object_graph import PLAIN, ObjectGraph


class Chosen(NamedTuple):
    """Code that was chosen, and has ended.

    Attributes:
        calls: Of the code.
        made: Those that select.
        undone: The storages that it writes.
        told: What it tells.
        line: "file.py:line" of the condition.
    """

    calls: set[Call]
    made: set[Call]
    undone: set[Storage | None]
    told: list[dict[str, Any]]
    line: str | None


def changed_numbers(contents: Sequence[tuple[str, Any, Any]]) -> list[Changed]:
    """Return the changes of numbers that stay numbers."""
    return [each for each in changes(contents).values() if is_arithmetic(each)]


def first_set(objects: ObjectGraph) -> str | None:
    """Return the name of a plain value that is no number and has changed; of no optimizer's."""
    is_bound = of_optimizers(objects)
    for name, change in changes(objects.contents).items():
        is_plain = isinstance(change.now, (*PLAIN, enum.Enum)) and change.slot is not None
        if is_plain and not is_arithmetic(change) and not is_bound(name):
            return name
    return None


def of_optimizers(objects: ObjectGraph) -> Callable[[str], bool]:
    """Return whether a name is one of an optimizer's, schedule's or gradient scaler's own."""
    bound = [e.name for e in objects.stateful if not isinstance(e.value, torch.nn.Module)]
    prefixes = tuple(f"{name}." for name in bound)
    return lambda name: name.startswith(prefixes)


def values_in(data: Any) -> set[Value]:
    """Return the values of the trace in what a step tells."""
    if isinstance(data, dict):
        data = [*data.values()]
    if isinstance(data, list):
        return {value for item in data for value in values_in(item)}
    return {data} if isinstance(data, Value) else set()


def gradients(objects: ObjectGraph) -> list[torch.Tensor | None]:
    """Return the gradient of each parameter; None where there is none."""
    leaves = (entry.value for entry in objects.tensors if entry.value.requires_grad)
    return [tensor.grad if tensor.is_leaf else None for tensor in leaves]


def reads(node: HostNode) -> set[Call]:
    """Return the calls of `.item()` behind a number."""
    found: set[Call] = set()
    stack = [node]
    while stack:
        at = stack.pop()
        stack += at.parents
        if isinstance(at.value, Value) and at.value.call.kind == ITEM:
            found.add(at.value.call)
    return found


def chosen_locals(
    then: Mapping[str, Any],
    now: Mapping[str, Any],
    either: Callable[[Any, Any], Any],
    line: str | None,
) -> dict[str, Any]:
    """Return the local variables that code leaves, where a condition says whether it has run.

    Args:
        then: Before it, or after the other way; a name may be unbound there, and no code that
            reads it then runs.
        now: After it.
        either: Chooses between a value before and one after; None, if these cannot be chosen.
        line: "file.py:line" of the condition.

    Raises:
        UnsupportedError: E802, if one is neither the same nor can be chosen.
    """
    found: dict[str, Any] = {}
    for name in {**then, **now}:
        old, new = then.get(name, now.get(name)), now.get(name, then.get(name))
        found[name] = new if _is_one(old, new) else either(old, new)
        if found[name] is None and new is not None:
            raise unsupported.choice(
                line,
                f"gives {name!r} a value that is neither a number nor a tensor like the one before "
                "without a gradient (torch.where(p, a, b) selects)",
            )
    return found


def _is_one(old: Any, new: Any) -> bool:
    """Whether two values cannot be told apart."""
    if old is new:
        return True
    return type(old) is type(new) and isinstance(new, PLAIN) and repr(old) == repr(new)


def is_number(value: Any) -> bool:
    """Whether a value is a number, or stands for one of the trace."""
    return type(value) in (int, float) or node_of(value) is not None
