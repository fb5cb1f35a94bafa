"""How `pardnn run --verify` compares parameters, buffers and optimizer states.

The ranks write their shards as a checkpoint below the run's private directory; the reference, which
has the whole state of one device, reads it tensor by tensor and compares it with its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from pardnn.backends.torch.user_step.sources import sources
from pardnn.checkpoint.directory import read_manifest, resolve
from pardnn.checkpoint.manifest import SavedTensor
from pardnn.checkpoint.pieces import PieceReader
from pardnn.checkpoint.verify import whole_bytes

#: How many tensors without a counterpart are named.
NAMED = 5


def compared_state(
    step: Callable[..., Any], args: Sequence[Any], root: Path
) -> tuple[dict[str, Any] | None, list[str]]:
    """Compare the state that ranks have written with that of a step that ran on one device.

    Args:
        step: The step, after its last call.
        args: Its arguments.
        root: The root of the checkpoint; absent if none was written.

    Returns:
        Tensors compared, how many differ in some bit, the largest difference relative to the
        tensor's largest element (None if it is not a number) and its tensor; and notes.
    """
    if not (root / "latest").exists():
        return None, []
    directory = resolve(root)
    own = {source.name: source for source in sources(step, args)}
    missing: list[str] = []
    differences: dict[str, float | None] = {}
    count = 0
    with closing(PieceReader(directory)) as reader:
        for tensor in read_manifest(directory).tensors:
            value = own[tensor.name].get() if tensor.name in own else None
            if not isinstance(value, torch.Tensor):
                missing.append(tensor.name)
                continue
            count += 1
            found = _read(reader, tensor)
            if not _same_bits(found, value):
                differences[tensor.name] = _difference(found, value)
    notes = []
    if missing:
        names = ", ".join(missing[:NAMED]) + (", ..." if missing[NAMED:] else "")
        notes.append(f"not compared, as one device has none of that name: {names}")
    worst = max(differences, key=lambda name: _rank(differences[name]), default=None)
    largest = differences[worst] if worst is not None else 0.0
    return {
        "tensors": count, "differing": len(differences), "largest_difference": largest,
        "worst": worst,
    }, notes  # fmt: skip


def _rank(difference: float | None) -> float:
    return float("inf") if difference is None else difference


def _read(reader: PieceReader, tensor: SavedTensor) -> torch.Tensor:
    data = bytearray()
    for chunk in whole_bytes(reader, tensor):
        data += chunk  # the next chunk is read into the same memory
    dtype = getattr(torch, tensor.dtype)
    if not data:
        return torch.empty(tensor.shape, dtype=dtype)
    return torch.frombuffer(data, dtype=dtype).reshape(tensor.shape)


def _same_bits(found: torch.Tensor, expected: torch.Tensor) -> bool:
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    one, other = (t.detach().cpu().contiguous().reshape(-1) for t in (found, expected))
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def _difference(found: torch.Tensor, expected: torch.Tensor) -> float | None:
    """Return the largest difference relative to the largest element; None if not finite."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return None
    wide = torch.complex128 if found.is_complex() else torch.float64
    one, other = (t.detach().cpu().to(wide) for t in (found, expected))
    apart = (one - other).abs()
    apart[(one == other) | (one.isnan() & other.isnan())] = 0.0  # equal infinities
    largest, scale = apart.max(), torch.maximum(one.abs().max(), other.abs().max())
    if largest == 0:
        return 0.0
    return float(largest / scale) if largest.isfinite() and scale.isfinite() else None
