"""Piece files: safetensors, written and read as streams.

A safetensors file is the length of a header (8 bytes, little endian), the header in JSON (name,
type, shape and offsets of each tensor), then the data. The header of a piece file follows from the
manifest, so it is known before any tensor is, and nothing in it is believed when it is read.

Deviation from the package `safetensors`, which reads what is written here: its writer takes all
tensors at once and syncs nothing, and its reader maps the file privately, which a rank's memory
limit counts. Here at most two times `CHUNK_BYTES`, or two rows, are in memory beside the tensors.

Each piece has checksums of its own. Several pieces are read at once, each on a thread that reads
and sums in turn (`READERS`); a single one is summed by a second thread while it is read.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple, TypeVar

from pardnn.checkpoint import disk
from pardnn.checkpoint.checksum import Checksum, Sums
from pardnn.checkpoint.directory import io_error, piece_path
from pardnn.checkpoint.manifest import (
    DTYPES,
    Piece,
    SavedTensor,
    piece_name,
)
from pardnn.errors import FileError, shown
from pardnn.plan.mesh import Box

CHUNK_BYTES = 8 << 20
#: Threads that read pieces side by side, the caller's among them: each takes a core, a buffer and,
#: but the caller's, a stack of 8 MiB, which a rank's memory limit counts.
READERS = 2
#: Data begins at a multiple of this, so that every reader may map any type.
_ALIGNMENT = 8

Named = tuple[str, str, tuple[int, ...]]
"""Name, dtype and shape of a tensor in a file."""

T = TypeVar("T")


class Rows(NamedTuple):
    """Some rows of a tensor, along its first dim, as they lie in a file.

    Attributes:
        box: Of the whole tensor.
        data: Its elements in C order.
        is_placed: Whether they were read to where the reader wants them.
    """

    box: Box
    data: memoryview
    is_placed: bool = False


def header(tensors: Sequence[Named], metadata: Mapping[str, str] | None = None) -> bytes:
    """Return a file's first bytes, up to the data.

    Args:
        tensors: In the order of their data.
        metadata: Texts for readers.
    """
    table: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, dtype, shape in tensors:
        itemsize, kind = DTYPES[dtype]
        start, end = end, end + math.prod(shape) * itemsize
        table[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


def piece_header(pieces: Sequence[tuple[SavedTensor, Piece]], step: int) -> bytes:
    """Return the first bytes of a rank's file.

    Args:
        pieces: What it holds, in the order of the data.
        step: Steps that were trained.
    """
    tensors = [(piece_name(t, piece), t.dtype, piece.shape) for t, piece in pieces]
    return header(tensors, {"format": "pt", "pardnn.checkpoint": "1", "step": str(step)})


def write_tensors(
    path: Path,
    first: bytes,
    contents: Iterable[Iterable[memoryview]],
    tick: Callable[[], None] | None = None,
) -> list[Sums]:
    """Write a file, durably, and return the checksums of each tensor's bytes.

    Args:
        path: Must not exist.
        first: Its header.
        contents: For each tensor the chunks of its data.
        tick: As for `disk.write_file`.

    Raises:
        FileError: E433.
    """
    sums: list[Sums] = []

    def chunks(checksum: Checksum) -> Iterator[memoryview | bytes]:
        yield first
        for content in contents:
            for chunk in content:
                for start in range(0, len(chunk), CHUNK_BYTES):
                    part = chunk[start : start + CHUNK_BYTES]
                    checksum.add(part)
                    yield part
            sums.append(checksum.take())

    try:
        with closing(Checksum()) as checksum:
            disk.write_file(path, chunks(checksum), tick)
    except OSError as error:
        raise io_error("cannot write", path, error) from error
    return sums


class PieceReader:
    """Reads pieces of a step and compares their checksums; `close` ends its thread.

    Args:
        directory: Of the step.
        is_alone: No other thread reads meanwhile: one of its own takes the checksums.
        with_sha256: Compare SHA-256 too, not CRC-32 alone.
    """

    def __init__(
        self, directory: Path, *, is_alone: bool = True, with_sha256: bool = False
    ) -> None:
        self._directory = directory
        self._checksum = Checksum(is_beside=is_alone, with_sha256=with_sha256)
        # Two in turn: the checksum of one is taken while the next is read.
        self._buffers = [bytearray() for _ in range(1 + is_alone)]

    def close(self) -> None:
        """End the thread."""
        self._checksum.close()

    def rows(
        self,
        tensor: SavedTensor,
        piece: Piece,
        place: Callable[[Box], memoryview | None] = lambda _: None,
    ) -> Iterator[Rows]:
        """Yield a piece's data, some rows at a time, and compare its checksums at the end.

        Each `data` that is not placed is overwritten by the next but one; by the next, if the
        reader is not alone.

        Args:
            tensor: That the piece is of.
            piece: To read.
            place: Returns the memory of rows, given their box of the whole tensor; None where they
                have none that is contiguous.

        Raises:
            FileError: E432, if the data is damaged; E434, if it cannot be read.
        """
        path = piece_path(self._directory, piece.file)
        try:
            with path.open("rb", buffering=0) as stream:
                stream.seek(piece.start)
                at = piece.start
                for box, size in _steps(piece, tensor.piece_bytes(piece)):
                    at += size
                    disk.advise(stream.fileno(), at, CHUNK_BYTES, "WILLNEED")
                    memory = place(box)
                    data = self._buffer(size) if memory is None else memory
                    read_exactly(stream, data)
                    self._checksum.add(data)
                    yield Rows(box, data, memory is not None)
        except OSError as error:
            raise io_error("cannot read", path, error, "E434") from error
        finally:
            found = self._checksum.take()
        if found.crc32 != piece.crc32 or found.sha256 not in ("", piece.sha256):
            raise damaged(path, tensor, piece)

    def _buffer(self, size: int) -> memoryview:
        self._buffers.reverse()
        if len(self._buffers[0]) < size:
            self._buffers[0] = bytearray(size)
        return memoryview(self._buffers[0])[:size]


def read_side_by_side(
    directory: Path,
    pieces: Sequence[T],
    read: Callable[[PieceReader, T], None],
    *,
    with_sha256: bool = False,
) -> None:
    """Call `read` once for each piece, on `READERS` threads, each with a reader of its own.

    Args:
        directory: Of the step.
        pieces: In the order in which they are begun: that of the files is the fastest.
        read: Called on any of the threads; its first error ends the others after their piece.
        with_sha256: As for `PieceReader`.
    """
    readers = min(READERS, len(pieces))
    rest, failed = iter(pieces), Event()  # a list's iterator gives each of its items once

    def work() -> None:
        try:
            is_alone = readers == 1
            made = PieceReader(directory, is_alone=is_alone, with_sha256=with_sha256)
            with closing(made) as reader:
                for piece in rest:
                    if failed.is_set():
                        return
                    read(reader, piece)
        except BaseException:
            failed.set()
            raise

    with ThreadPoolExecutor(READERS, thread_name_prefix="pardnn-read") as pool:
        others = [pool.submit(work) for _ in range(1, readers)]
        work()
    for other in others:
        other.result()


def _steps(piece: Piece, size: int) -> Iterator[tuple[Box, int]]:
    """Yield boxes of about `CHUNK_BYTES`, whole rows each, and their bytes.

    Args:
        piece: That they make up.
        size: Of the piece, bytes.
    """
    extent = piece.shape[0] if piece.shape else 1
    row_bytes = size // extent if extent else 0
    step = max(1, CHUNK_BYTES // row_bytes) if row_bytes else max(1, extent)
    for low in range(0, extent, step):
        high = min(extent, low + step)
        box = piece.box
        if box:
            first = box[0][0]
            box = ((first + low, first + high), *box[1:])
        yield box, (high - low) * row_bytes


def read_exactly(stream: Any, data: memoryview) -> None:
    """Fill a buffer from a file; OSError if the file ends before."""
    while len(data):
        count = stream.readinto(data)
        if not count:
            raise OSError("it ends too early")
        data = data[count:]


def damaged(path: Path, tensor: SavedTensor, piece: Piece) -> FileError:
    """Return the error of a piece whose bytes are not those that were written."""
    name = piece_name(tensor, piece)
    return FileError(
        f"the checkpoint is damaged: {tensor.kind} {shown(name)} in {shown(str(path))} does not "
        "match its checksum.\nLoad an older step, or copy the checkpoint again.",
        code="E432",
        details={"tensor": tensor.name, "path": str(path)},
    )
