"""Numbers 0 in a batch in whose places a step leaves tensors: `meter.sum += loss.detach()`.

Problem: at the next call the batch has a tensor there, which the graph has to read.
Idea: the step is captured with a tensor of zeros in each such place, and its trace must compute
what the one with the numbers does. Ranks put tensors there, too (`runtime.batch_zeros`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from pardnn.backends.torch.capture.restore import Changed
from pardnn.backends.torch.capture.step_trace import StepTrace
from pardnn.backends.torch.user_step.held_numbers import is_zero
from pardnn.backends.torch.user_step.object_graph import ObjectGraph
from pardnn.errors import PardnnError


class BatchNumbers(NamedTuple):
    """The numbers 0 in whose places a step leaves tensors.

    Attributes:
        first: The trace of the step with the numbers.
        changes: What it leaves in the places, by name.
    """

    first: StepTrace
    changes: Mapping[str, Changed]

    @contextlib.contextmanager
    def replaced(self) -> Iterator[None]:
        """Put tensors of zeros in the places while the context is open."""
        for each in self.changes.values():
            assert each.slot is not None
            each.slot.set(torch.zeros(each.now.shape, dtype=each.now.dtype))
        try:
            yield
        finally:
            for each in self.changes.values():
                assert each.slot is not None
                each.slot.set(each.then)


def batch_numbers(
    error: PardnnError, first: StepTrace | None, objects: ObjectGraph, batch: Sequence[int]
) -> BatchNumbers | None:
    """Return the numbers because of which a step was refused; None if they were not the cause.

    Args:
        error: What ended the capture.
        first: The trace of the first step.
        objects: What its objects held before.
        batch: Indices of the arguments that are the batch.
    """
    names = tuple(f"{name}." for name, index in objects.arguments if index in batch)
    assigned: Mapping[str, Any] = first.assigned if first else {}
    found = {
        name: each.change
        for name, each in assigned.items()
        if name.startswith(names) and is_zero(each.change.then)
        and isinstance(each.change.now, torch.Tensor) and each.change.slot is not None
    }  # fmt: skip
    told = error.code == "E804" and found.keys() & error.details.get("changed", ())
    return BatchNumbers(first, found) if first and told else None
