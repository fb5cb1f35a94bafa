"""Tensors rebound under a condition on data: `if loss < best: best = loss.detach()`.

Problem: after such code a name or an attribute stands for one of two tensors, and only a run knows
which.

Idea: it becomes a third tensor, `torch.where(skips, old, new)`, which has the bits of the chosen
one. This equals the eager step as long as nothing can tell the copy from the original: the
originals may not be written afterwards while the copy is still read, and the copy may be written
only if the originals are no longer used. The backward pass would add zeros from the branch not
taken, which are NaN if its derivative is infinite, so tensors that require a gradient are refused.

Complexity: one selection per tensor, and a look at the calls after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from pardnn.backends.torch.capture.refusals import unsupported
from pardnn.backends.torch.capture.restore import Changed, changes
from pardnn.backends.torch.capture.rewrites.undoing import record
from pardnn.backends.torch.capture.trace_ir import Call, Storage, Value
from pardnn.backends.torch.capture.tracer import Tracer


class _Selected(NamedTuple):
    """One selection.

    Attributes:
        call: The call that selects.
        copy: Storage of its result.
        originals: The storages of what it selects from.
        line: "file.py:line" of the condition.
    """

    call: Call
    copy: Storage
    originals: tuple[Storage, Storage]
    line: str | None


class ChosenTensors:
    """The selections of one trace.

    Args:
        tracer: The tracer of the step.
    """

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._selected: list[_Selected] = []

    def select(self, skips: torch.Tensor, old: Any, new: Any, line: str | None) -> Any:
        """Return a tensor that is `old` if code was skipped, else `new`; None if impossible.

        Args:
            skips: A boolean tensor of no dimensions.
            old: What was bound before the code, or after the other branch.
            new: What is bound after it.
            line: "file.py:line" of the condition.
        """
        tracer = self._tracer
        pair = old, new
        if not all(isinstance(x, torch.Tensor) and tracer.aliases.knows(x) for x in pair):
            return None
        if old.requires_grad or new.requires_grad or old.device != new.device:
            return None
        if (old.shape, old.stride(), old.dtype) != (new.shape, new.stride(), new.dtype):
            return None
        if skips.device != old.device:
            skips = record(tracer, "_to_copy", skips, device=old.device)
        result = record(tracer, "where.self", skips, old, new)
        if result.stride() != old.stride():
            return None
        copy, *originals = (_storage(tracer.aliases.value(x)) for x in (result, old, new))
        one, other = originals
        self._selected.append(_Selected(tracer.calls[-1], copy, (one, other), line))
        return result

    def check(self, results: Sequence[Value | None]) -> None:
        """Reject a trace that could tell a copy from the original.

        Args:
            results: Values that outlive the step.

        Raises:
            UnsupportedError: E802.
        """
        calls = self._tracer.calls
        left = {value.storage for value in results if value is not None}
        for call, copy, originals, line in self._selected:
            later = calls[calls.index(call) + 1 :]
            written = next(
                (i for i, c in enumerate(later) if _writes(c, *originals) and not _copies(c, copy)),
                None,
            )
            if written is not None and (copy in left or _are_used(later[written:], copy)):
                raise unsupported.choice(line, "assigns a tensor that is written later")
            if any(_writes(c, copy) for c in later) and (
                any(x.source or x in left for x in originals) or _are_used(later, *originals)
            ):
                raise unsupported.choice(line, "assigns a tensor into which later code writes")


def rebound_tensors(contents: Sequence[tuple[str, Any, Any]]) -> dict[str, Changed]:
    """Return the places that hold another tensor than before, by name.

    Args:
        contents: `ObjectGraph.contents` of the walk before.
    """
    found = changes(contents, _is_other_tensor)
    return {n: each for n, each in found.items() if each.slot is not None and not each.is_new}


def _is_other_tensor(now: Any, then: Any) -> bool:
    are_tensors = isinstance(now, torch.Tensor) and isinstance(then, torch.Tensor)
    return are_tensors and now is not then


def _storage(value: Value) -> Storage:
    assert value.storage is not None
    return value.storage


def _writes(call: Call, *storages: Storage) -> bool:
    return any(value.storage in storages for value in call.mutated)


def _copies(call: Call, copy: Storage) -> bool:
    """Whether a call gives an original the bits of the copy, as the end of a step does."""
    return call.kind == "aten.copy_.default" and call.inputs[-1].storage is copy


def _are_used(calls: Sequence[Call], *storages: Storage) -> bool:
    return any(value.storage in storages for call in calls for value in call.inputs)
