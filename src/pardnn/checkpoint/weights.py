"""Weights in safetensors files, as models are published: one file, or several with an index.

    model.safetensors
    model.safetensors.index.json        {"weight_map": {"wte.weight": "model-00001-of-00002..."}}
    model-00001-of-00002.safetensors ...

Only headers are read here, and nothing in them is believed: every tensor must have a known type and
lie within its file. The data is read some rows at a time; see `pieces` for why not by the package.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pardnn import files
from pardnn.checkpoint.directory import io_error
from pardnn.checkpoint.manifest import DTYPES, whole_box
from pardnn.checkpoint.pieces import CHUNK_BYTES, Rows, read_exactly
from pardnn.errors import FileError, shown

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
#: The package's own limit.
_MAX_HEADER_BYTES = 100_000_000
_BY_CODE = {code: (name, size) for name, (size, code) in DTYPES.items()}


class StoredTensor(NamedTuple):
    """A whole tensor in a file.

    Attributes:
        path: Of the file.
        dtype: Torch's name of the type.
        shape: Of the tensor.
        start: Where its data begins, bytes.
    """

    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int


@dataclass(frozen=True)
class Weights:
    """What weight files hold.

    Attributes:
        path: Of the file or of the index.
        tensors: By name.
        fingerprint: Of names, types, shapes and places; the same on ranks that read one file.
    """

    path: Path
    tensors: Mapping[str, StoredTensor]
    fingerprint: str


def open_weights(path: str | Path) -> Weights:
    """Return what weight files hold.

    Args:
        path: A safetensors file, an index as Hugging Face writes it, or their directory.

    Raises:
        FileError: E434, if a file cannot be read; E436, if it is none of these, or damaged.
    """
    path = Path(path)
    if path.is_dir():
        path = path / INDEX if (path / INDEX).is_file() else path / WEIGHTS
    tensors = _indexed(path) if path.suffix == ".json" else _header(path)
    rows = sorted((n, t.path.name, t.dtype, t.shape, t.start) for n, t in tensors.items())
    return Weights(path, tensors, hashlib.sha256(repr(rows).encode()).hexdigest())


def _indexed(path: Path) -> dict[str, StoredTensor]:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise io_error("cannot read", path, error, "E434") from error
    data = files.parse_json(content, f"index {shown(str(path))}")
    where = data.get("weight_map") if isinstance(data, dict) else None
    if not isinstance(where, dict) or not all(isinstance(name, str) for name in where.values()):
        raise _unfit(path, "it has no weight_map of names and files")
    outside = [name for name in where.values() if Path(name).name != name]
    if outside:
        raise _unfit(path, f"it names {shown(outside[0])}, which is not a file next to it")
    found = {name: _header(path.with_name(name)) for name in sorted(set(where.values()))}
    lacking = [name for name, file in where.items() if name not in found[file]]
    if lacking:
        text = f"{shown(lacking[0])} is not in {shown(where[lacking[0]])}, where it should be"
        raise _unfit(path, text)
    return {name: found[file][name] for name, file in where.items()}


def _header(path: Path) -> dict[str, StoredTensor]:
    try:
        with path.open("rb") as stream:
            size = path.stat().st_size
            (length,) = struct.unpack("<Q", stream.read(8).ljust(8, b"\xff"))
            if length > min(_MAX_HEADER_BYTES, size - 8):
                raise _unfit(path, "it is not a safetensors file")
            content = stream.read(length)
    except OSError as error:
        raise io_error("cannot read", path, error, "E434") from error
    table = files.parse_json(content, f"the header of {shown(str(path))}")
    if not isinstance(table, dict):
        raise _unfit(path, "its header is not an object")
    table.pop("__metadata__", None)
    begin = 8 + length
    return {name: _stored(path, name, row, begin, size) for name, row in table.items()}


def _stored(path: Path, name: str, row: Any, begin: int, size: int) -> StoredTensor:
    """Return a tensor of a header, checked against the file's size."""
    try:
        code, shape, (start, end) = row["dtype"], tuple(row["shape"]), row["data_offsets"]
        numbers = (*shape, start, end)
    except (TypeError, KeyError, ValueError) as error:
        raise _unfit(path, f"the entry of {shown(name)} is incomplete") from error
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise _unfit(path, f"the entry of {shown(name)} has invalid sizes")
    if not isinstance(code, str) or code not in _BY_CODE:
        raise _unfit(
            path, (f"{shown(name)} has the type {shown(str(code))}, which torch does not have")
        )
    dtype, itemsize = _BY_CODE[code]
    if end - start != math.prod(shape) * itemsize or begin + end > size:
        raise _unfit(path, f"{shown(name)} is not within the file")
    return StoredTensor(path, dtype, shape, begin + start)


def _unfit(path: Path, reason: str) -> FileError:
    return FileError(
        f"cannot read weights from {shown(str(path))}: {reason}.\n"
        f"Give a safetensors file, {INDEX}, or their directory; copy damaged files again.",
        code="E436",
        details={"path": str(path)},
    )


def stored_rows(tensor: StoredTensor, low: int = 0, high: int | None = None) -> Iterator[Rows]:
    """Yield rows of a tensor, some at a time; each `data` is overwritten by the next one.

    Args:
        tensor: To read.
        low: First row.
        high: Last row, exclusive; None reads to the end.

    Raises:
        FileError: E434, if the data cannot be read.
    """
    extent = tensor.shape[0] if tensor.shape else 1
    high = extent if high is None else high
    row_bytes = math.prod(tensor.shape[1:]) * DTYPES[tensor.dtype][0]
    step = max(1, min(high - low, CHUNK_BYTES // row_bytes if row_bytes else high - low))
    buffer = memoryview(bytearray(step * row_bytes))
    try:
        with tensor.path.open("rb", buffering=0) as stream:
            stream.seek(tensor.start + low * row_bytes)
            for first in range(low, high, step):
                last = min(high, first + step)
                data = buffer[: (last - first) * row_bytes]
                read_exactly(stream, data)
                rest = whole_box(tensor.shape)[1:]
                yield Rows(((first, last), *rest) if tensor.shape else (), data)
    except OSError as error:
        raise io_error("cannot read", tensor.path, error, "E434") from error
