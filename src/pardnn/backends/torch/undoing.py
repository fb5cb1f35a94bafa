"""Writes of a part of a step that are put back where a condition holds.

What is written is copied before its first write, and after its last write it becomes the copy or
stays what it is. Both stand beside the writes themselves, so that one tensor's copy is gone before
the next one's is made.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from pardnn.backends.torch import refuse
from pardnn.backends.torch.trace import Tracer
from pardnn.backends.torch.values import Call, Storage


@contextlib.contextmanager
def keep_unless(
    tracer: Tracer, skipped: torch.Tensor, tensors: Sequence[torch.Tensor]
) -> Iterator[None]:
    """Undo what happens inside to `tensors` where `skipped` is true, bit by bit.

    Args:
        tracer: Of the step that is running.
        skipped: A truth of no dimensions, computed before.
        tensors: What may be written in place inside; what is not written costs nothing.

    Raises:
        UnsupportedError: E802, if one of them gets another storage inside.
    """
    start = len(tracer.calls)
    by_storage = {tensor.untyped_storage()._cdata: tensor for tensor in tensors}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> None:
        key = tensor.untyped_storage()._cdata
        if key in by_storage and key not in kept:
            kept[key] = tracer.recorded(torch.ops.aten.clone.default, by_storage[key])

    tracer.before_write = keep
    try:
        yield
    finally:
        tracer.before_write = None
    blocks: list[tuple[Storage, int]] = []
    for key, old in kept.items():
        tensor = by_storage[key]
        storage = tracer.memory.value(tensor).storage
        if storage is None or tensor.untyped_storage()._cdata != key:
            raise refuse.decision_by_value(tracer.locator.line())
        blocks.append((storage, len(tracer.calls)))
        with torch.no_grad():
            tensor.copy_(torch.where(skipped.to(tensor.device), old, tensor))
    if blocks:
        _move_up(tracer.calls, start, blocks)


def _move_up(calls: list[Call], start: int, blocks: list[tuple[Storage, int]]) -> None:
    """Move each block of calls to where its storage has been touched for the last time."""
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
