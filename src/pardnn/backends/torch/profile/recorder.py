"""The times of a rank's actions while it trains: a time stamp after each, medians at the end.

Stamps and the row of a step take 0.5 us per action; an action with its op seldom less than 25.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from pardnn.backends.torch.comm.wire_format import MessageSpec
from pardnn.plan.actions import Action, Compute, Wait

#: How many of the latest steps medians cover.
MOST_STEPS = 16


class Recorder:
    """Times of a rank's actions.

    Args:
        actions: What the rank does in a step.
        specs: The specs of all messages.

    Attributes:
        steps: Steps recorded so far.
    """

    def __init__(self, actions: Sequence[Action], specs: Sequence[MessageSpec]) -> None:
        self.steps = 0
        self._rows: deque[np.ndarray] = deque(maxlen=MOST_STEPS)
        self._ops: list[tuple[int, str]] = []
        self._waits: list[tuple[int, str]] = []
        for number, action in enumerate(actions):
            if isinstance(action, Compute):
                self._ops.append((number, action.op))
            elif isinstance(action, Wait):
                self._waits.append((number, specs[action.message].tensor))

    def begin(self) -> list[float]:
        """Return the stamps of a step, to which one more is appended after each action."""
        return [time.perf_counter()]

    def end(self, stamps: list[float]) -> None:
        """Keep the stamps of a step that has run."""
        self._rows.append(np.array(stamps))
        self.steps += 1

    def times(self, peak_bytes: int) -> dict[str, Any]:
        """Return the fields of `plan.run_record.RankTimes`; empty columns before any step."""
        rows = np.array(self._rows) if self._rows else np.zeros((0, 1))
        data: dict[str, Any] = {
            "step_s": (rows[:, -1] - rows[:, 0]).tolist(), "peak_bytes": peak_bytes,
        }  # fmt: skip
        names = ("op", "start_s", "seconds"), ("tensor", "wait_start_s", "wait_s")
        for columns, found in zip(names, (self._ops, self._waits), strict=True):
            numbers = [number for number, _ in found] if self._rows else []
            begin = rows[:, numbers]
            took = rows[:, [number + 1 for number in numbers]] - begin
            values = (
                [name for _, name in found] if self._rows else [],
                _medians(begin - rows[:, :1]),
                _medians(took),
            )
            data |= dict(zip(columns, values, strict=True))
        return data


def _medians(values: np.ndarray) -> list[float]:
    return np.median(values, axis=0).tolist() if values.size else []
