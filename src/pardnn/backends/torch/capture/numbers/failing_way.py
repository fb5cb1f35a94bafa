"""What a check tells where it fails: prints before the exception, and the numbers in its message.

Problem: `raise ValueError(f"loss is {loss.item()}")` and the prints before it run in a trial, whose
trace is thrown away; the step's own trace takes the other way.

Idea: both traces are the same up to the check, call by call. What the trial has recorded after it
is numbers and arithmetic on them, so these calls are recorded again in the step's trace, on the
values at the same positions, and what was told is noted there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pardnn.backends.torch.capture.numbers.left_behind import ITEM, values_in
from pardnn.backends.torch.capture.trace_ir import Call, Value


@dataclass(frozen=True)
class FailingWay:
    """What one trial has told.

    Attributes:
        start: Number of calls before the check.
        calls: Of the trial.
        hints: Its numbers that do not depend on data, by value.
        effects: What it told after the check.
        message: The exception's text: texts, and numbers with their formats.
    """

    start: int
    calls: Sequence[Call]
    hints: Mapping[Any, Any]
    effects: Sequence[dict[str, Any]]
    message: Sequence[Any]

    @property
    def has_numbers(self) -> bool:
        """Whether anything in it is a number of the trial's trace."""
        return bool(values_in([*self.effects, *self.message]))

    def fits(self, calls: Sequence[Call]) -> bool:
        """Whether a trace, as far as to the check, has the calls of the trial."""
        kinds = [call.kind for call in self.calls[: self.start]]
        return not self.has_numbers or kinds == [call.kind for call in calls]

    def replayable(self) -> list[Call]:
        """Return the calls after the check that compute numbers."""
        after = self.calls[self.start :]
        return [call for call in after if call.kind == ITEM or call.kind.startswith("scalar.")]

    def with_values(self, data: Any, values: Mapping[Value, Value]) -> Any:
        """Return what was told with values of another trace; a tensor has its shape for its text.

        Args:
            data: Of `effects` or `message`.
            values: Those of the other trace, by those of the trial.
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


def values_before(calls: Sequence[Call], others: Sequence[Call]) -> dict[Value, Value]:
    """Return the values of one trace by those of another of the same calls.

    Args:
        calls: Of the one.
        others: Of the other.
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
