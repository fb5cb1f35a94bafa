"""Verifying a step's files, and writing a whole model from them: both without a framework."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np

from pardnn.checkpoint.directory import io_error, piece_path
from pardnn.checkpoint.manifest import Manifest, Piece, SavedTensor, pieces_by_file
from pardnn.checkpoint.pieces import (
    PieceReader,
    header,
    piece_header,
    read_side_by_side,
    write_tensors,
)
from pardnn.errors import FileError, UsageError, shown
from pardnn.plan.mesh import Box


def verify(directory: Path, manifest: Manifest) -> None:
    """Read every byte of a step and compare both its checksums with the manifest.

    Args:
        directory: Of the step.
        manifest: Of the step.

    Raises:
        FileError: E432 (damaged, naming the tensor) or E434 (it cannot be read).
    """
    for number, pieces in enumerate(pieces_by_file(manifest.tensors, len(manifest.files))):
        path = piece_path(directory, number)
        expected = piece_header(pieces, manifest.step)
        try:
            with path.open("rb") as stream:
                found = stream.read(len(expected))
        except OSError as error:
            raise io_error("cannot read", path, error, "E434") from error
        if found != expected:
            raise FileError(
                f"the checkpoint is damaged: the header of {shown(str(path))} is not the one that "
                "was written.\nLoad an older step, or copy the checkpoint again.",
                code="E432",
                details={"path": str(path)},
            )
        read_side_by_side(directory, pieces, _read_through, with_sha256=True)


def _read_through(reader: PieceReader, piece: tuple[SavedTensor, Piece]) -> None:
    for _ in reader.rows(*piece):
        pass


def models_of(manifest: Manifest) -> list[str]:
    """Return the names of the models of a step, in its order."""
    return list(dict.fromkeys(model for t in manifest.tensors for model, _ in t.keys))


def exported_names(
    tensors: Sequence[SavedTensor], *, optimizer: bool = False
) -> tuple[list[tuple[str, SavedTensor]], dict[str, str]]:
    """Return the names of a whole model's tensors in a file, and the further names of tied ones.

    With one model they are the keys of its `state_dict()`; with several, each has the model's name
    before it. Tied tensors are written once, as `safetensors.torch.save_model` does.

    Args:
        tensors: Of a checkpoint.
        optimizer: Add optimizer states, under the names that checkpoints give them.

    Returns:
        Names and tensors in order, and of each further name the one that was written.
    """
    models = {model for tensor in tensors for model, _ in tensor.keys}
    found: list[tuple[str, SavedTensor]] = []
    tied: dict[str, str] = {}
    for tensor in tensors:
        names = [key if len(models) == 1 else f"{model}.{key}" for model, key in tensor.keys]
        if not names and optimizer and tensor.kind == "state":
            names = [tensor.name]
        if names:
            found.append((names[0], tensor))
            tied |= dict.fromkeys(names[1:], names[0])
    return found, tied


def export(
    directory: Path,
    manifest: Manifest,
    path: Path,
    *,
    model: str | None = None,
    optimizer: bool = False,
) -> int:
    """Write the whole model of a step into one safetensors file, a tensor at a time.

    Args:
        directory: Of the step.
        manifest: Of the step.
        path: Of the new file, which must not exist yet.
        model: The one to write; None writes all.
        optimizer: Write optimizer states too.

    Returns:
        Number of tensors written.

    Raises:
        UsageError: E234, if there is no such model.
        FileError: E432 to E434.
    """
    tensors = manifest.tensors
    if model is not None:
        if model not in models_of(manifest):
            raise UsageError(
                f"the checkpoint has no model {shown(model)}; it has "
                f"{', '.join(models_of(manifest))}",
                code="E234",
            )
        tensors = tuple(t for t in tensors if any(of == model for of, _ in t.keys))
    found, tied = exported_names(tensors, optimizer=optimizer)
    first = header(
        [(name, tensor.dtype, tensor.shape) for name, tensor in found], {"format": "pt", **tied}
    )
    with closing(PieceReader(directory)) as reader:
        write_tensors(path, first, (whole_bytes(reader, tensor) for _, tensor in found))
    return len(found)


def whole_bytes(reader: PieceReader, tensor: SavedTensor) -> Iterator[memoryview]:
    """Yield a whole tensor's data; in one chunk where several pieces make it up.

    Raises:
        FileError: E432 (damaged, naming the tensor) or E434 (it cannot be read).
    """
    if len(tensor.pieces) == 1:
        for rows in reader.rows(tensor, tensor.pieces[0]):
            yield rows.data
        return
    whole = memoryview(bytearray(tensor.bytes))
    for piece in tensor.pieces:
        for rows in reader.rows(tensor, piece):
            _place(whole, tensor, rows.box, rows.data)
    yield whole


def _place(whole: memoryview, tensor: SavedTensor, box: Box, data: memoryview) -> None:
    """Copy the data of a box to where it belongs in the whole tensor."""
    into = np.frombuffer(whole, np.uint8).reshape(*tensor.shape, tensor.itemsize)
    shape = [high - low for low, high in box]
    part = into[tuple(slice(low, high) for low, high in box)]
    part[...] = np.frombuffer(data, np.uint8).reshape(*shape, tensor.itemsize)
