"""The output of a failing check: prints before the exception, and the numbers in its message.

Problem: `raise ValueError(f"loss is {loss.item()}")` and the prints before it run in a trial, whose
trace is discarded; the step's own trace takes the other branch.

Idea: both traces are the same up to the check, call by call. After it, the trial has recorded only
numbers and arithmetic on them, so these calls are recorded again in the step's trace, on the values
at the same positions, along with the output. Any other effect is found by comparing the objects of
the step, and refused.
"""

from __future__ import annotations

import contextvars
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

from pardnn.backends.torch.capture.numbers.class_attributes import (
    check_class_attributes,
    class_attributes,
)
from pardnn.backends.torch.capture.numbers.left_behind import gradients, values_in
from pardnn.backends.torch.capture.numbers.unseen_state import (
    check_context,
    check_unseen,
    unseen_states,
)
from pardnn.backends.torch.capture.restore import changes, first_change
from pardnn.backends.torch.capture.trace_ir import ITEM, Call, Value
from pardnn.backends.torch.user_step.object_graph import ObjectGraph
from pardnn.errors import UnsupportedError, shown


@dataclass(frozen=True)
class FailingWay:
    """The effects of one trial.

    Attributes:
        start: Number of calls before the check.
        calls: The calls of the trial.
        hints: Its numbers that do not depend on data, by value.
        effects: Those after the check.
        message: The exception's text: texts, and numbers with their formats.
    """

    start: int
    calls: Sequence[Call]
    hints: Mapping[Any, Any]
    effects: Sequence[dict[str, Any]]
    message: Sequence[Any]

    @property
    def has_numbers(self) -> bool:
        """Whether it contains a number of the trial's trace."""
        return bool(values_in([*self.effects, *self.message]))

    def fits(self, calls: Sequence[Call]) -> bool:
        """Whether a trace makes the calls of the trial up to the check."""
        kinds = [call.kind for call in self.calls[: self.start]]
        return not self.has_numbers or kinds == [call.kind for call in calls]

    def replayable(self) -> list[Call]:
        """Return the calls after the check that compute numbers."""
        after = self.calls[self.start :]
        return [call for call in after if call.kind == ITEM or call.kind.startswith("scalar.")]

    def with_values(self, data: Any, values: Mapping[Value, Value]) -> Any:
        """Return effects with the values of another trace; the text of a tensor has its shape.

        Args:
            data: `effects` or `message`.
            values: The values of the other trace by those of the trial.
        """
        if isinstance(data, dict) and "kept" in data:
            value = data["kept"]
            return {"kept": values[value]} if value in values else _shape_text(value)
        if isinstance(data, dict):
            return {key: self.with_values(item, values) for key, item in data.items()}
        if not isinstance(data, list):
            return data
        found = [self.with_values(item, values) for item in data]
        is_tensor = len(data) == 2 and isinstance(data[0], dict) and isinstance(found[0], str)
        return found[0] if is_tensor else found


def of_a_check(effect: Mapping[str, Any]) -> bool:
    """Whether an effect belongs to a failing check: one of a number, not of a tensor."""
    return "unless" in effect and effect["unless"]["kept"].geometry is None


class Before:
    """The state at the beginning of a trial.

    Args:
        objects: The object graph of the step, as it is now.
        is_first: Whether it is the first step, in which no recorders stand for what it fills.
    """

    def __init__(self, objects: ObjectGraph, *, is_first: bool) -> None:
        self._objects, self._is_first = objects, is_first
        self._gradients, self._flags = gradients(objects), _flags(objects)
        self._generators = _generators()
        self._unseen, self._classes = unseen_states(objects), class_attributes(objects)
        self._context = contextvars.copy_context()

    def left(self, context: contextvars.Context) -> str | None:
        """Describe what has changed; None if nothing has.

        Args:
            context: The context in which the trial has run.
        """
        then = self._objects
        found = changes(then.contents).items()
        filled = {n for n, each in found if self._is_first and (each.is_new or each.slot is None)}
        changed = next((name for name, _ in found if name not in filled), None)
        if changed is None and not self._is_first:
            changed = first_change(then.contents)
        if changed is not None:
            return shown(changed)
        try:
            check_unseen(self._unseen)
            check_class_attributes(self._classes, is_first=False)
            check_context(context, self._context)
        except UnsupportedError as error:
            return shown(error.details.get("name") or error.details["changed"][0])
        for entry, was, now in zip(then.tensors, self._flags, _flags(then), strict=True):
            if was != now:
                return shown(f"{entry.name}.requires_grad")
        if any(a is not b for a, b in zip(self._gradients, gradients(then), strict=True)):
            return "gradients"
        named = zip(_GENERATORS, self._generators, _generators(), strict=True)
        return next((name for name, was, now in named if was != now), None)


def _flags(objects: ObjectGraph) -> list[bool]:
    return [entry.value.requires_grad for entry in objects.tensors]


#: Kinds whose states `_generators` returns.
_GENERATORS = ("torch's random generator", "Python's random generator", "that of NumPy")


def _generators() -> list[Any]:
    with _disable_current_modes():
        state = torch.default_generator.get_state().tolist()
    return [state, random.getstate(), repr(np.random.get_state(legacy=False))]  # noqa: NPY002


def values_before(calls: Sequence[Call], others: Sequence[Call]) -> dict[Value, Value]:
    """Return the values of one trace by those of another of the same calls.

    Args:
        calls: The calls of the one trace.
        others: Those of the other.
    """
    return {
        old: new
        for call, other in zip(calls, others, strict=True)
        for old, new in zip(_made(other), _made(call), strict=True)
    }


def _made(call: Call) -> list[Value]:
    """Return the values that a call makes, views and results among them."""
    made = [value for value in call.returns if value is not None]
    return list(dict.fromkeys([*call.outputs, *made]))


def _shape_text(value: Value) -> str:
    shape = [] if value.geometry is None else list(value.geometry[0])
    return f"a tensor of shape {shape}"
