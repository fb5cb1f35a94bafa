"""What `run --verify` says of the state: what differs, by how much, and nothing else."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from pardnn.backends.torch.launch.compare_state import compared_state
from pardnn.checkpoint import pieces
from pardnn.checkpoint.directory import Lock, commit, piece_path, reserve
from pardnn.checkpoint.manifest import Manifest, Piece, SavedTensor
from pardnn.checkpoint.pieces import piece_header, write_tensors


def step(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).sum()


def _save(root: Path, value: torch.Tensor) -> None:
    """Save a weight as the rank that holds all of it does."""
    lock = Lock(root)
    reservation = reserve(root, 1)
    box = tuple((0, size) for size in value.shape)
    piece = Piece(file=0, box=box, start=0, crc32=0, sha256="")
    tensor = SavedTensor(
        name="model.weight", kind="parameter", dtype="float32", shape=tuple(value.shape),
        pieces=(piece,), keys=(("model", "weight"),),
    )  # fmt: skip
    first, data = piece_header([(tensor, piece)], 1), value.numpy().tobytes()
    path = piece_path(reservation.temporary, 0)
    (sums,) = write_tensors(path, first, [[memoryview(data)]])
    piece = dataclasses.replace(piece, start=len(first), **sums._asdict())
    tensor = dataclasses.replace(tensor, pieces=(piece,))
    commit(reservation, Manifest(step=1, tensors=(tensor,), files=(len(first) + len(data),)), None)
    lock.release()


@pytest.mark.parametrize("rows", [1, 2, 7])
def test_a_tensor_of_many_chunks_is_compared_whole(
    rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks are read into one memory; a weight of 98 MiB was said to differ, though it did not."""
    monkeypatch.setattr(pieces, "CHUNK_BYTES", 12 * rows)
    model = torch.nn.Linear(3, 7, bias=False)
    weight = model.weight.detach()
    _save(tmp_path, weight)
    found, notes = compared_state(step, (model, torch.ones(1, 3)), tmp_path)
    assert found == {"tensors": 1, "differing": 0, "largest_difference": 0.0, "worst": None}
    assert notes == []
    weight[3, 1] = 2 * weight.abs().max()
    found, _ = compared_state(step, (model, torch.ones(1, 3)), tmp_path)
    assert found is not None
    assert (found["differing"], found["worst"]) == (1, "model.weight")
    assert 0.5 <= found["largest_difference"] <= 1.5
