"""Reading the shards of this rank from a checkpoint, which any other plan may have written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import torch

from pardnn.backends.torch.checkpoint.contents import memory
from pardnn.backends.torch.checkpoint.phases import Phases
from pardnn.backends.torch.checkpoint.unread import UnreadState, owners_of
from pardnn.backends.torch.comm.world import World
from pardnn.backends.torch.ops.partition_ops import box_view
from pardnn.backends.torch.runtime.binding import Binding
from pardnn.backends.torch.runtime.program import Program
from pardnn.checkpoint.directory import read_manifest, resolve
from pardnn.checkpoint.manifest import (
    Manifest,
    Piece,
    SavedTensor,
    intersection,
    whole_box,
    within,
)
from pardnn.checkpoint.pieces import PieceReader, Rows, read_side_by_side
from pardnn.errors import MismatchError, shown
from pardnn.plan.mesh import Box
from pardnn.plan.state_layout import shard_of

#: What to do if calls have created state that the checkpoint lacks.
_BEFORE = " If a call of the step makes such state, load before the first such call."


def agreed_manifest(
    root: Path,
    step: int | None,
    world: World,
    phases: Phases,
    check: Callable[[Manifest, str], None],
) -> tuple[Path, Manifest]:
    """Return the directory of a step and its manifest, the same on all ranks.

    Args:
        root: The root of the run.
        step: Number of trained steps; None for the latest.
        world: This rank's connections.
        phases: The phases of this load.
        check: Raises unless a manifest fits; its second argument is the checkpoint's name.

    Raises:
        MismatchError: E521, if ranks read different files; what `check` raises, on all ranks.
    """
    chosen = phases.run(lambda: resolve(root, step).name if world.rank == 0 else None)[0]
    directory, manifests = root / chosen, list[Manifest]()

    def checked() -> str | None:
        if not directory.is_dir():
            raise MismatchError(
                f"{str(directory)!r}, which rank 0 reads, is not there.\n"
                "Checkpoints need a file system that all ranks share.",
                code="E521",
            )
        manifests.append(read_manifest(directory))
        check(manifests[0], f"checkpoint {str(directory)!r}")
        return manifests[0].checksum

    phases.agree(
        checked,
        f"the ranks read different manifests in {str(directory)!r}.\n"
        "Checkpoints need a file system that all ranks share.",
    )
    return directory, manifests[0]


def check_tensors(
    program: Program, manifest: Manifest, what: str, unread: UnreadState | None, binding: Binding
) -> set[str]:
    """Check that a checkpoint holds exactly the state of a step; gradients may be None there.

    Args:
        program: What runs.
        manifest: The manifest of the checkpoint.
        what: Names the checkpoint.
        unread: States that no graph reads: a checkpoint may have others; None: it must not.
        binding: The binding of the user's objects.

    Returns:
        The names of the states that no graph reads and that have a place.

    Raises:
        MismatchError: E520, naming the first tensor that is missing, superfluous, or of another
            shape or type.
    """
    saved = {tensor.name: tensor for tensor in manifest.tensors}
    own = {op.name: op for op in program.sources.values() if op.name in program.state}
    missing = [name for name in own if name not in saved and name not in (unread or ())]
    missing = [name for name in missing if _of_gradient(name, binding) is None]
    more = [name for name in saved if name not in own]
    places = (
        owners_of([saved[name] for name in more], binding) if more and unread is not None else {}
    )
    more = [name for name in more if name not in places]
    if missing or more:
        told = [
            f"{verb} {shown(names[0])}" + (f" and {len(names) - 1} more" if names[1:] else "")
            for verb, names in (("lacks", missing), ("has", more))
            if names
        ]
        raise MismatchError(
            f"{what} is of another model or optimizer: it {' and '.join(told)}"
            + (", which the step does not have" if more else "")
            + ".\nBuild model and optimizer as they were when it was saved."
            + _BEFORE * (not more and all(own[name].kind == "state" for name in missing)),
            code="E520",
            details={"missing": missing[:20], "unexpected": more[:20]},
        )
    for name, op in ((name, op) for name, op in own.items() if name in saved):
        output, tensor = op.outputs[0], saved[name]
        shape = tuple(output.shape or ())
        if (tensor.shape, tensor.dtype) != (shape, output.dtype):
            raise MismatchError(
                f"{what} holds {op.kind} {shown(name)} as {tensor.dtype} {list(tensor.shape)}; "
                f"the step has {output.dtype} {list(shape)}.\n"
                "Build the model as it was when it was saved; types are not converted.",
                code="E520",
                details={"tensor": name},
            )
    return places


def _of_gradient(name: str, binding: Binding) -> torch.Tensor | None:
    """Return the parameter of a gradient; None for other state."""
    return binding.sources[name].parameter if name in binding.sources else None


def fill(
    program: Program,
    binding: Binding,
    rank: int,
    live: Mapping[str, Any],
    directory: Path,
    manifest: Manifest,
    tick: Callable[[], None],
) -> None:
    """Read the values of this rank's residents into their storages.

    Gradients that the checkpoint lacks were None when it was saved, and become it.

    Args:
        program: What runs.
        binding: The binding of the user's objects.
        rank: This rank.
        live: Its live values, by the names of the planned graph.
        directory: The directory of the step.
        manifest: The manifest of the step.
        tick: Called now and then.

    Raises:
        FileError: E432, if a piece is damaged; E434, if it cannot be read.
    """
    saved = {tensor.name: tensor for tensor in manifest.tensors}
    values: list[torch.Tensor] = []
    pieces: list[_Wanted] = []
    for op in program.residents(rank):
        of, box = shard_of(op, program.sources)
        if of not in saved:
            continue
        tensor = saved[of]
        box = box or whole_box(tensor.shape)
        values.append(live[op.outputs[0].name].detach())
        common = (each for each in tensor.pieces if intersection(each.box, box) is not None)
        pieces += [_Wanted(tensor, each, values[-1], box) for each in common]
    one_at_a_time = Lock()

    def alive() -> None:
        with one_at_a_time:
            tick()

    def read(reader: PieceReader, wanted: _Wanted) -> None:
        with torch.no_grad():  # the mode is per thread
            _read(reader, wanted, alive)

    try:
        read_side_by_side(directory, pieces, read)
    finally:
        for value in values:  # the memory was written behind torch's back
            torch.autograd.graph.increment_version(value)
    for name in program.state.keys() - saved.keys():
        if (parameter := _of_gradient(name, binding)) is not None:
            parameter.grad = None


class _Wanted(NamedTuple):
    """A piece that a resident needs.

    Attributes:
        tensor: The whole saved tensor.
        piece: A piece of it.
        value: The resident.
        box: The box of the whole tensor: what the resident holds.
    """

    tensor: SavedTensor
    piece: Piece
    value: torch.Tensor
    box: Box


def _read(reader: PieceReader, wanted: _Wanted, tick: Callable[[], None]) -> None:
    tensor, piece, value, box = wanted
    dtype = getattr(torch, tensor.dtype)

    def place(rows: Box) -> memoryview | None:
        if intersection(rows, box) != rows:
            return None
        part = box_view(value, within(rows, box))
        is_plain = part.device.type == "cpu" and not part.is_conj() and not part.is_neg()
        return memory(part) if is_plain and part.is_contiguous() else None

    for rows in reader.rows(tensor, piece, place):
        tick()
        if not rows.is_placed:
            copy_rows(value, box, rows, dtype)


def copy_rows(value: torch.Tensor, box: Box, rows: Rows, dtype: torch.dtype) -> None:
    """Copy the intersection of some rows of a tensor with a box of it.

    Args:
        value: The values of the box; written.
        box: The box of the whole tensor.
        rows: The rows, read from a file.
        dtype: The dtype of the rows.
    """
    common = intersection(rows.box, box)
    if common is None or not len(rows.data):
        return
    shape = [high - low for low, high in rows.box]
    read = torch.frombuffer(rows.data, dtype=dtype).reshape(shape)
    box_view(value, within(common, box)).copy_(box_view(read, within(common, rows.box)))
