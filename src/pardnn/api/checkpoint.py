"""Checkpoints on disk: what they hold, whether they are whole, a model taken out of them."""

from __future__ import annotations

import secrets
from pathlib import Path

from pardnn import files
from pardnn.checkpoint.directory import committed, io_error, read_manifest, resolve
from pardnn.checkpoint.manifest import Manifest
from pardnn.checkpoint.verify import export, models_of, verify
from pardnn.report.results import CheckpointExportResult, CheckpointResult, CheckpointVerifyResult


def opened(root: Path, step: int | None) -> tuple[Path, Manifest]:
    """Return directory and manifest of a step.

    Args:
        root: Directory of the run.
        step: Trained steps; None takes the latest.

    Raises:
        FileError: E430, E431, E406 to E408, E435.
        MismatchError: E502.
    """
    path = resolve(root, step)
    return path, read_manifest(path)


def show_checkpoint(root: Path, step: int | None = None) -> CheckpointResult:
    """Return what a step holds.

    Args:
        root: Directory of the run.
        step: Trained steps; None takes the latest.

    Raises:
        FileError: As `opened`.
    """
    path, manifest = opened(root, step)
    plan = manifest.plan
    return CheckpointResult(
        step=manifest.step,
        steps=tuple(sorted({each.step for each in committed(root)})),
        path=str(path),
        num_tensors=len(manifest.tensors),
        total_bytes=manifest.bytes,
        file_bytes=manifest.files,
        models=tuple(models_of(manifest)),
        algorithm=plan.get("algorithm"),
        num_devices=plan.get("num_devices"),
        versions=dict(manifest.versions),
        extra=manifest.extra,
    )


def verify_checkpoint(root: Path, step: int | None = None) -> CheckpointVerifyResult:
    """Read every byte of a step and compare it with its checksums.

    Args:
        root: Directory of the run.
        step: Trained steps; None takes the latest.

    Raises:
        FileError: As `opened`; E432, naming the tensor that is damaged; E434.
    """
    path, manifest = opened(root, step)
    verify(path, manifest)
    return CheckpointVerifyResult(
        step=manifest.step,
        path=str(path),
        num_tensors=len(manifest.tensors),
        read_bytes=manifest.bytes,
    )


def export_checkpoint(
    root: Path,
    output: Path,
    step: int | None = None,
    *,
    model: str | None = None,
    optimizer: bool = False,
) -> CheckpointExportResult:
    """Write the whole model of a step into one safetensors file.

    Args:
        root: Directory of the run.
        output: File to write; an old one is replaced once the new one is complete.
        step: Trained steps; None takes the latest.
        model: The one to write; None writes all.
        optimizer: Write optimizer states too.

    Raises:
        FileError: As `verify_checkpoint`; E433, if the file cannot be written.
        UsageError: E234, if there is no such model.
    """
    path, manifest = opened(root, step)
    temporary = output.with_name(f"{output.name}.tmp-{secrets.token_hex(6)}")
    try:
        count = export(path, manifest, temporary, model=model, optimizer=optimizer)
        files.rename(temporary, output)
    except OSError as error:
        raise io_error("cannot write", output, error) from error
    finally:
        temporary.unlink(missing_ok=True)
    return CheckpointExportResult(step=manifest.step, output=str(output), num_tensors=count)
