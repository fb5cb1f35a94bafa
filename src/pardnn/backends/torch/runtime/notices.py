"""The notice that a step is captured again: one line, by the logger "pardnn"."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from pardnn.backends.torch.user_step.guards.item import Change
from pardnn.errors import MismatchError, shown, without_addresses

_LOGGER = logging.getLogger("pardnn")
#: A value that changes at this many calls in a row, each captured again, is reported once.
MANY_IN_A_ROW = 8
#: So is this many captures in all.
MANY = 64


class Made(NamedTuple):
    """How long a variant took to make, seconds.

    Attributes:
        capture_s: The duration of the capture.
        plan_s: The duration of planning; 0 if the graph was planned before.
    """

    capture_s: float = 0.0
    plan_s: float = 0.0


def not_left(names: Sequence[str]) -> None:
    """Report tensors made from constants that eager steps would keep from their first use on.

    Args:
        names: The names of the tensors; a parallel step makes them again each time, and leaves
            none.
    """
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    _LOGGER.warning(
        "pardnn: %s%s is made from constants at its first use and kept: each parallel step makes "
        "it again and does not leave it there. To find it there, run one step before "
        "parallelizing.",
        shown(names[0]), more,
    )  # fmt: skip


def gradients_not_left(names: Sequence[str]) -> None:
    """Report tensors of the batch that get no gradient.

    Args:
        names: The names of the tensors.
    """
    _LOGGER.warning(
        "pardnn: %s requires a gradient, which a parallel step does not leave on it: its grad stays"
        " None. Return it from the step: return loss, x.grad.", shown(names[0]),
    )  # fmt: skip


class Notices:
    """Reports each capture, and once that there are too many.

    Args:
        what: What is captured, in words: "step".
        is_silent: Report nothing, as on all ranks but one.
    """

    def __init__(self, what: str, *, is_silent: bool) -> None:
        self._what, self._is_silent = what, is_silent
        self._last: deque[tuple[int, frozenset[str]]] = deque(maxlen=MANY_IN_A_ROW)
        self._count = 0
        self._is_told = False

    def captured(
        self, made: Made, changes: Sequence[Change], step: int, moved: Sequence[str]
    ) -> None:
        """Report that the step was captured again.

        Args:
            made: How long it took.
            changes: What has changed.
            step: How many steps have run before.
            moved: Names of the state tensors that had to move.
        """
        self._count += 1
        self._last.append((step, frozenset(change.name for change in changes)))
        if self._is_silent:
            return
        where = f"; {len(moved)} tensors of state moved" if moved else ""
        _LOGGER.warning(
            "pardnn: %s %d is captured again (%.1f s) and planned (%.1f s), since %s%s",
            self._what, step, made.capture_s, made.plan_s, told(changes), where,
        )  # fmt: skip
        if not self._is_told and (self._count >= MANY or self._is_in_a_row()):
            self._is_told = True
            _LOGGER.warning("pardnn: %s", self._advice())

    def _is_in_a_row(self) -> bool:
        steps = [step for step, _ in self._last]
        is_full = len(steps) == MANY_IN_A_ROW and steps[-1] - steps[0] == MANY_IN_A_ROW - 1
        return is_full and bool(frozenset.intersection(*(names for _, names in self._last)))

    def _advice(self) -> str:
        names = frozenset.intersection(*(names for _, names in self._last))
        name = shown(min(names)) if names else "what the step reads"
        return (
            f"the step was captured {self._count} times, since {name} changes again and again; "
            "each takes time and memory. Make a number an argument of the step, a float or a "
            "tensor; pad batches to a few shapes."
        )


def told(changes: Sequence[Change]) -> str:
    """Describe what has changed."""
    texts = dict.fromkeys(  # two guards may watch one place
        f"{shown(change.name)} is {_text(change.now)}, but was {_text(change.then)}"
        for change in changes
    )
    first = [*texts][:3]
    return "; ".join(first) + (f" (and {len(texts) - 3} more)" if len(texts) > 3 else "")


def _text(value: Any) -> str:
    """Return a value in one line; a tensor's numbers would take several."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)}"
    if any(isinstance(each, torch.Tensor) for each in pytree.tree_leaves(value)):
        return f"a {type(value).__name__} with tensors"
    return " ".join(without_addresses(repr(value)).split())[:60]


def changed_values(changes: Sequence[Change]) -> MismatchError:
    """Return E509: values have changed, and nothing can plan again."""
    return MismatchError(
        f"the step was captured with other values: {told(changes)}.\nThe graph holds only for the "
        "captured ones. Pass a number that changes from call to call as an argument of the step: "
        "a float or a tensor. If only the first call differs, run one step of your own before. "
        "Everything else must stay as it was when the step was captured, and gradients are made "
        "and reset inside it; without a plan of your own, `parallelize` captures each case.",
        code="E509",
        details={"changed": [change.name for change in changes[:20]]},
    )
