"""Undoing in-place writes on a condition: the old or new content is selected bit by bit.

Each selection is moved up to where its tensor was last used, so that only one old copy is alive at
a time.

Complexity: one copy and one selection for each storage that is written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from pardnn.backends.torch.capture.refusals import unsupported
from pardnn.backends.torch.capture.trace_ir import Call, Storage
from pardnn.backends.torch.capture.tracer import Tracer

_CLONE = torch.ops.aten.clone.default


class Undoing:
    """Keeps the content of each storage before it is first written.

    Args:
        tracer: The tracer of the step.
        whole_of: Returns the tensor whose content is to be kept, which covers the storage of the
            one that is written; None if nothing is to be kept.
    """

    def __init__(
        self, tracer: Tracer, whole_of: Callable[[torch.Tensor], torch.Tensor | None]
    ) -> None:
        self._tracer, self._whole_of = tracer, whole_of
        self._start = len(tracer.calls)
        # The tensor and its old content, by torch's storage.
        self.kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._outer = tracer.before_write
        tracer.before_write = self._keep

    def _keep(self, tensor: torch.Tensor) -> None:
        if self._outer is not None:
            self._outer(tensor)
        key = tensor.untyped_storage()._cdata
        if key not in self.kept:
            whole = self._whole_of(tensor)
            if whole is not None:
                self.kept[key] = whole, self._tracer.recorded(_CLONE, whole)
                self._tracer.undoing.add(self._tracer.calls[-1])

    def end(self) -> None:
        """Stop keeping content."""
        self._tracer.before_write = self._outer

    def undo(self, is_undone: torch.Tensor) -> None:
        """Record the selections; `end` was called before.

        Args:
            is_undone: A boolean tensor of no dimensions, computed before the calls.

        Raises:
            UnsupportedError: E802, if a tensor got another storage meanwhile.
        """
        tracer = self._tracer
        blocks: list[tuple[Storage, int]] = []
        begin = len(tracer.calls)
        for key, (tensor, old) in self.kept.items():
            storage = tracer.aliases.value(tensor).storage
            if storage is None or tensor.untyped_storage()._cdata != key:
                raise unsupported.data_dependent_branch(tracer.locator.line())
            blocks.append((storage, len(tracer.calls)))
            condition = is_undone
            if condition.device != tensor.device:
                condition = record(tracer, "_to_copy", condition, device=tensor.device)
            chosen = record(tracer, "where.self", condition, old, tensor)
            record(tracer, "copy_", tensor, chosen)
        tracer.undoing.update(tracer.calls[begin:])
        if blocks:
            _move_up_selections(tracer.calls, self._start, blocks)


def record(tracer: Tracer, op: str, *args: Any, **kwargs: Any) -> Any:
    """Record a call of ATen's `op`, whatever modes are active, and return its fake result.

    Args:
        tracer: The tracer of the step.
        op: Its name, with that of the overload unless it is "default".
        *args: Its arguments.
        **kwargs: Its keyword arguments.
    """
    name, _, overload = op.partition(".")
    call = getattr(getattr(torch.ops.aten, name), overload or "default")
    with _disable_current_modes(), tracer.fake_mode, torch.no_grad():
        return tracer.recorded(call, *args, **kwargs)


def _move_up_selections(calls: list[Call], start: int, blocks: list[tuple[Storage, int]]) -> None:
    """Move each block of calls to just after the last use of its storage.

    Args:
        calls: The trace, reordered in place.
        start: Index of the first call that may be undone.
        blocks: For each storage, the index of its first call; the blocks are the end of the trace.
    """
    first = blocks[0][1]
    last: dict[Storage, int] = {}
    for i in range(start, first):
        values = [*calls[i].inputs, *calls[i].outputs]
        last.update((value.storage, i) for value in values if value.storage is not None)
    keys = [(i, 0, i) for i in range(start, first)]
    ends = [begin for _, begin in blocks[1:]] + [len(calls)]
    for (storage, begin), end in zip(blocks, ends, strict=True):
        keys += [(last[storage], 1, i) for i in range(begin, end)]
    calls[start:] = [calls[i] for _, _, i in sorted(keys)]
