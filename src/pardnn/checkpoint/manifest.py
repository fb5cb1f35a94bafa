"""The manifest of a checkpoint, `pardnn.checkpoint/2`: what lies where, and everything but tensors.

A checkpoint is a directory with one safetensors file per rank and `manifest.json`. A piece is a box
of one whole tensor; the pieces of a tensor are disjoint and cover it, so any other plan finds what
its devices need. The files' contents follow from the manifest alone: names, boxes and offsets.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pardnn import files
from pardnn.cluster import STRICT
from pardnn.errors import FileError, shown
from pardnn.plan.mesh import Box

#: Bytes of an element and safetensors' name, by torch's name of the type.
DTYPES: Mapping[str, tuple[int, str]] = {
    "bool": (1, "BOOL"), "uint8": (1, "U8"), "int8": (1, "I8"), "int16": (2, "I16"),
    "uint16": (2, "U16"), "int32": (4, "I32"), "uint32": (4, "U32"), "int64": (8, "I64"),
    "uint64": (8, "U64"), "float16": (2, "F16"), "bfloat16": (2, "BF16"), "float32": (4, "F32"),
    "float64": (8, "F64"), "float8_e4m3fn": (1, "F8_E4M3"), "float8_e5m2": (1, "F8_E5M2"),
    "complex64": (8, "C64"),
}  # fmt: skip
#: Of a manifest's plan: whether all steps so far placed whole ops. Older manifests do not tell.
KEPT_BITS = "keeps_bits"
#: A tensor of more pieces than this comes from no plan: clusters have at most as many devices.
MAX_PIECES = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A box of a tensor in one of the files.

    Attributes:
        file: Number of the file, which is the rank that wrote it.
        box: First and last index per dim, the last exclusive.
        start: Where it begins in the file, bytes.
        crc32: Of its bytes, in C order.
        sha256: Of the same, in hexadecimal.
    """

    __pydantic_config__ = STRICT

    file: int
    box: Box
    start: int
    crc32: int
    sha256: str

    @property
    def shape(self) -> tuple[int, ...]:
        """Extents of the box."""
        return tuple(high - low for low, high in self.box)


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTensor:
    """A parameter, buffer or optimizer state.

    Attributes:
        name: Path from the step's arguments: "model.h.0.weight",
            "optimizer.state.model.h.0.weight.exp_avg".
        kind: "parameter", "buffer" or "state".
        dtype: Torch's name of the type.
        shape: Of the whole tensor.
        pieces: Disjoint, and together the whole tensor.
        keys: (model, key) of every entry of a `model.state_dict()` that holds it; a tied parameter
            has several, a state and a buffer that is not persistent none.
    """

    __pydantic_config__ = STRICT

    name: str
    kind: Literal["parameter", "buffer", "state"]
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    keys: tuple[tuple[str, str], ...] = ()

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return DTYPES[self.dtype][0]

    @property
    def bytes(self) -> int:
        """Of the whole tensor."""
        return math.prod(self.shape) * self.itemsize

    def piece_bytes(self, piece: Piece) -> int:
        """Bytes of one piece."""
        return math.prod(piece.shape) * self.itemsize


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A checkpoint.

    Attributes:
        step: Steps that were trained.
        tensors: All that a step keeps for the next one, in the graph's order.
        files: Bytes of each file.
        numbers: Python values by name: of optimizers, schedulers and gradient scalers ("objects"),
            and what the step itself reads and counts in the user's objects ("held").
        random: States of the random generators: those of one device, whatever the number of ranks.
        extra: What the caller gave along.
        graph_fingerprint: Of the graph that ran.
        plan: What placed the state: algorithm, number of devices, fingerprint, and `KEPT_BITS`.
        versions: Of pardnn and torch.
        checksum: SHA-256 over everything else; a damaged manifest is refused.
    """

    __pydantic_config__ = STRICT

    format: Literal["pardnn.checkpoint/2"] = "pardnn.checkpoint/2"
    step: int
    tensors: tuple[SavedTensor, ...]
    files: tuple[int, ...]
    numbers: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    random: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    extra: Any = None
    graph_fingerprint: str | None = None
    plan: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    checksum: str | None = None

    @property
    def kept_bits(self) -> bool:
        """Whether one device's steps gave every bit of it, as far as is known."""
        return self.plan.get(KEPT_BITS) is not False

    @property
    def bytes(self) -> int:
        """Of all files but the manifest."""
        return sum(self.files)


def whole_box(shape: Sequence[int]) -> Box:
    """Return the box that is all of a tensor."""
    return tuple((0, extent) for extent in shape)


def intersection(first: Box, second: Box) -> Box | None:
    """Return what two boxes of one tensor share; None if they are disjoint."""
    found = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(first, second, strict=True))
    return None if any(low >= high for low, high in found) else found


def within(box: Box, outer: Box) -> Box:
    """Return a box by indices into another one that holds it."""
    return tuple((low - at, high - at) for (low, high), (at, _) in zip(box, outer, strict=True))


def piece_name(tensor: SavedTensor, piece: Piece) -> str:
    """Return a piece's name in its file: the tensor's, and the box where it is not all of it."""
    if piece.box == whole_box(tensor.shape):
        return tensor.name
    return tensor.name + "[" + ", ".join(f"{low}:{high}" for low, high in piece.box) + "]"


def pieces_by_file(
    tensors: Iterable[SavedTensor], num_files: int
) -> list[list[tuple[SavedTensor, Piece]]]:
    """Return what each file holds, in the order of its bytes.

    Args:
        tensors: Of the checkpoint.
        num_files: How many files it has.
    """
    found: list[list[tuple[SavedTensor, Piece]]] = [[] for _ in range(num_files)]
    for tensor in tensors:
        for piece in tensor.pieces:
            found[piece.file].append((tensor, piece))
    return [sorted(each, key=lambda pair: pair[1].start) for each in found]


def manifest_to_json(manifest: Manifest) -> bytes:
    """Return the content of a manifest's file, with its checksum."""
    data = _to_dict(manifest)
    return files.dump_json(data | {"checksum": _checksum(data)})


def manifest_from_json(content: bytes, what: str) -> Manifest:
    """Parse and check the content of a manifest's file.

    Raises:
        FileError: E406 to E408; E435, if tensors and pieces do not fit together.
        MismatchError: E502.
    """
    manifest = files.parse_as(Manifest, content, what)
    if manifest.checksum is None or manifest.checksum != _checksum(_to_dict(manifest)):
        raise FileError(
            f"{what} is damaged: its content does not match its checksum.\n"
            "Load an older step, or copy the checkpoint again.",
            code="E408",
        )
    check_manifest(manifest, what)
    return manifest


def _to_dict(manifest: Manifest) -> dict[str, Any]:
    data = {f.name: getattr(manifest, f.name) for f in dataclasses.fields(manifest)}
    # Through text, so that a tuple and the list that is read for it have one checksum.
    data["tensors"] = [_tensor_to_dict(tensor) for tensor in manifest.tensors]
    del data["checksum"]
    return json.loads(json.dumps(data, allow_nan=False))


def _tensor_to_dict(tensor: SavedTensor) -> dict[str, Any]:
    pieces = [
        {"file": p.file, "box": p.box, "start": p.start, "crc32": p.crc32, "sha256": p.sha256}
        for p in tensor.pieces
    ]
    return {
        "name": tensor.name, "kind": tensor.kind, "dtype": tensor.dtype, "shape": tensor.shape,
        "pieces": pieces, "keys": tensor.keys,
    }  # fmt: skip


def _checksum(data: Mapping[str, Any]) -> str:
    text = json.dumps(data, sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def check_manifest(manifest: Manifest, what: str) -> None:
    """Check that every tensor is covered by its pieces and every file filled by them.

    Args:
        manifest: To check.
        what: Names it in errors.

    Raises:
        FileError: E435, naming the tensor.
    """
    names: set[str] = set()
    for tensor in manifest.tensors:
        problem = "appears twice" if tensor.name in names else _tensor_problem(tensor, manifest)
        if problem:
            raise FileError(
                f"{what}: tensor {shown(tensor.name)} {problem}",
                code="E435",
                details={"tensor": tensor.name},
            )
        names.add(tensor.name)
    if manifest.step < 0:
        raise FileError(f"{what}: $.step is {manifest.step}", code="E435")
    for number, pieces in enumerate(pieces_by_file(manifest.tensors, len(manifest.files))):
        end = max(0, pieces[0][1].start) if pieces else manifest.files[number]
        for tensor, piece in pieces:
            if piece.start != end:
                raise FileError(
                    f"{what}: file {number} has a gap or an overlap at byte {end}, before "
                    f"{shown(piece_name(tensor, piece))}",
                    code="E435",
                    details={"tensor": tensor.name},
                )
            end += tensor.piece_bytes(piece)
        if end != manifest.files[number]:
            raise FileError(f"{what}: file {number} does not end with its last piece", code="E435")


def _tensor_problem(tensor: SavedTensor, manifest: Manifest) -> str | None:
    if tensor.dtype not in DTYPES:
        return f"has the unknown type {shown(tensor.dtype)}"
    if any(extent < 0 for extent in tensor.shape):
        return f"has the shape {list(tensor.shape)}"
    if len(tensor.pieces) > MAX_PIECES:
        return f"has {len(tensor.pieces)} pieces, more than {MAX_PIECES}"
    for piece in tensor.pieces:
        if not 0 <= piece.file < len(manifest.files):
            return f"is in file {piece.file}, but there are {len(manifest.files)}"
        is_inside = len(piece.box) == len(tensor.shape) and all(
            0 <= low <= high <= extent
            for (low, high), extent in zip(piece.box, tensor.shape, strict=True)
        )
        if not is_inside:
            return f"of shape {list(tensor.shape)} has a piece at {[list(d) for d in piece.box]}"
    covered = sum(math.prod(piece.shape) for piece in tensor.pieces)
    overlap = any(
        intersection(a.box, b.box) is not None
        for i, a in enumerate(tensor.pieces)
        for b in tensor.pieces[:i]
    )
    if overlap or covered != math.prod(tensor.shape) or not tensor.pieces:
        return f"of {math.prod(tensor.shape)} elements is not covered exactly once by its pieces"
    return None
