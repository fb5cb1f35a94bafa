"""Writing a checkpoint: all ranks write their pieces, then rank 0 commits them."""

from __future__ import annotations

import dataclasses
import threading
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pardnn.backends.torch.checkpoint.contents import Contents, chunks, with_sums
from pardnn.backends.torch.checkpoint.phases import Phases
from pardnn.backends.torch.comm.world import World
from pardnn.backends.torch.runtime.memory.limits import is_out_of_memory
from pardnn.checkpoint.checksum import Sums
from pardnn.checkpoint.directory import Lock, Reservation, commit, discard, piece_path, reserve
from pardnn.checkpoint.manifest import Manifest, check_manifest, pieces_by_file
from pardnn.checkpoint.pieces import piece_header, write_tensors
from pardnn.errors import MismatchError


@dataclass(frozen=True)
class Snapshot:
    """What one rank writes of a step.

    Attributes:
        root: Directory of the run.
        contents: The contents of all ranks.
        values: This rank's live values or copies of them, by the names of `contents`.
        manifest: The manifest without tensors, the same on all ranks except for random states.
        random: Checksum of the random state that must be the same on all ranks; None if no op
            draws.
        keep: As for `directory.commit`.
    """

    root: Path
    contents: Contents
    values: Mapping[str, torch.Tensor]
    manifest: Manifest
    random: int | None
    keep: int | None


def write_snapshot(snapshot: Snapshot, world: World, lock: Lock | None, key: str) -> None:
    """Write a checkpoint and return when it is durable; all ranks take part.

    Args:
        snapshot: The snapshot of this rank.
        world: This rank's connections.
        lock: Rank 0's lock on the directory.
        key: Used once; the same on all ranks.

    Raises:
        FileError: E433, on all ranks, if one of them could not write. No part of it remains.
        MismatchError: E521, if the ranks save different things; E518, if their random states
            differ.
        RankError: E602, if a rank was lost.
        StuckError: E702, if a rank does not come.
    """
    step = snapshot.manifest.step
    phases = Phases(world, key, f"saving step {step} in {str(snapshot.root)!r}")
    reservation: Reservation | None = None

    def reserved() -> dict[str, Any]:
        nonlocal reservation
        told: dict[str, Any] = {"step": step, "root": str(snapshot.root), "keep": snapshot.keep}
        told |= {"random": snapshot.random}
        if lock is not None:
            reservation = reserve(snapshot.root, step)
            told["temporary"] = reservation.temporary.name
        return told

    def committed() -> None:
        if reservation is not None:
            tensors = tuple(with_sums(snapshot.contents.tensors, sums))
            manifest = dataclasses.replace(
                snapshot.manifest, tensors=tensors, files=snapshot.contents.files
            )
            check_manifest(manifest, "the new checkpoint")
            commit(reservation, manifest, snapshot.keep)

    def discarded() -> None:
        if reservation is not None:
            discard(reservation)

    try:
        found = phases.run(reserved)
        _check_equal(found)
        directory = snapshot.root / found[0]["temporary"]
        rows = phases.run(lambda: _written(snapshot, directory, world.rank, phases), undo=discarded)
        sums = [[Sums(*each) for each in row] for row in rows]  # JSON has turned them into lists
        phases.run(committed, undo=discarded)
    finally:
        discarded()  # after a commit, none is left


def _check_equal(found: list[dict[str, Any]]) -> None:
    for rank, each in enumerate(found):
        for name, value in each.items():
            if value == found[0][name]:
                continue
            if name == "random":
                raise MismatchError(
                    f"torch's random state differs between rank 0 and rank {rank}, and the step "
                    "draws numbers.\nDraw the same numbers on all ranks between steps.",
                    code="E518",
                )
            raise MismatchError(
                f"the ranks save different things: {name} is {found[0][name]!r:.200} on rank 0 "
                f"and {value!r:.200} on rank {rank}.\nEvery rank calls `save` alike.",
                code="E521",
            )


def _written(snapshot: Snapshot, directory: Path, rank: int, phases: Phases) -> list[Sums]:
    """Write this rank's file and return the checksums of its pieces."""
    if not directory.is_dir():
        raise MismatchError(
            f"{str(directory)!r}, which rank 0 has just made, is not there.\n"
            "Checkpoints need a file system that all ranks share.",
            code="E521",
        )
    found = snapshot.contents
    pieces = pieces_by_file(found.tensors, len(found.files))[rank]
    return write_tensors(
        piece_path(directory, rank),
        piece_header(pieces, snapshot.manifest.step),
        (chunks(snapshot.values[name]) for name in found.values[rank]),
        phases.tick,
    )


def copied(snapshot: Snapshot, held: int, limit: int | None, world: World) -> Snapshot | None:
    """Return a snapshot of host copies, which no step changes; None if there is no room.

    Args:
        snapshot: The snapshot of this rank.
        held: Largest number of bytes that this rank holds in a step.
        limit: Bytes that it may hold; None without limit.
        world: This rank's connections.
    """
    step, names = snapshot.manifest.step, snapshot.contents.values[world.rank]
    need = held + snapshot.contents.files[world.rank]
    if limit is None or world.device.type != "cpu" or need <= limit:
        try:
            copies = {name: snapshot.values[name].detach().cpu().clone() for name in names}
            return dataclasses.replace(snapshot, values=copies)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
    warnings.warn(
        f"rank {world.rank} saves step {step} before it continues: with a copy of what it writes "
        f"it would hold {need} bytes, but its limit is {limit}",
        stacklevel=4,
    )
    return None


class Writing:
    """A save that runs during the next steps.

    Args:
        snapshot: The snapshot for `write_snapshot`, with copies.
        world: This rank's connections.
        lock: Rank 0's lock on the directory.
        key: Used once; the same on all ranks.
    """

    def __init__(self, snapshot: Snapshot, world: World, lock: Lock | None, key: str) -> None:
        self._error: BaseException | None = None
        arguments = (snapshot, world, lock, key)
        self._thread = threading.Thread(target=self._run, args=arguments, name="pardnn-save")
        self._thread.start()

    def _run(self, *arguments: Any) -> None:
        try:
            write_snapshot(*arguments)
        except BaseException as error:
            self._error = error

    def join(self) -> None:
        """Wait until it has ended.

        Raises:
            PardnnError: The error that it failed with.
        """
        self._thread.join()
        if self._error is not None:
            raise self._error
