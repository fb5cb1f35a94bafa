"""Checkpoints written without a framework, for tests."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np

from pardnn.checkpoint.directory import Lock, commit, discard, piece_path, reserve
from pardnn.checkpoint.manifest import Manifest, Piece, SavedTensor, pieces_by_file
from pardnn.checkpoint.pieces import piece_header, write_tensors


def array(step: int) -> np.ndarray:
    return np.arange(24, dtype=np.float32).reshape(4, 6) + 100 * step


def write_step(root: Path, step: int, keep: int | None = None) -> None:
    """Write a step of one cut and one whole tensor in two files, as two ranks do."""
    lock = Lock(root)
    reservation = None
    try:
        reservation = reserve(root, step)
        boxes = (((0, 4), (0, 2)), ((0, 4), (2, 6)))
        cut = SavedTensor(
            name="model.w", kind="parameter", dtype="float32", shape=(4, 6),
            pieces=tuple(
                Piece(file=i, box=b, start=0, crc32=0, sha256="") for i, b in enumerate(boxes)
            ),
            keys=(("model", "w"), ("model", "tied")),
        )  # fmt: skip
        count = SavedTensor(
            name="optimizer.state.model.w.step", kind="state", dtype="int64", shape=(),
            pieces=(Piece(file=1, box=(), start=1 << 40, crc32=0, sha256=""),),
        )  # fmt: skip
        data = {
            (0, "model.w"): array(step)[:, :2].tobytes(),
            (1, "model.w"): array(step)[:, 2:].tobytes(),
            (1, count.name): np.int64(step).tobytes(),
        }
        found: dict[tuple[int, str], Piece] = {}
        sizes = []
        for number, pieces in enumerate(pieces_by_file([cut, count], 2)):
            first = piece_header(pieces, step)
            contents = [[memoryview(data[number, tensor.name])] for tensor, _ in pieces]
            path = piece_path(reservation.temporary, number)
            sums = write_tensors(path, first, contents)
            at = len(first)
            for (tensor, piece), both in zip(pieces, sums, strict=True):
                found[number, tensor.name] = dataclasses.replace(piece, start=at, **both._asdict())
                at += len(data[number, tensor.name])
            sizes.append(at)
        tensors = tuple(
            dataclasses.replace(t, pieces=tuple(found[p.file, t.name] for p in t.pieces))
            for t in (cut, count)
        )
        manifest = Manifest(step=step, tensors=tensors, files=tuple(sizes), extra={"epoch": step})
        commit(reservation, manifest, keep)
    finally:
        if reservation is not None:
            discard(reservation)
        lock.release()
