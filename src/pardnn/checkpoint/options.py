"""What a run is told about its checkpoints."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from pardnn.checkpoint.directory import Lock, check_steps, read_manifest, resolve
from pardnn.errors import FileError, UsageError, shown


@dataclass(frozen=True, kw_only=True)
class SaveOptions:
    """Where and when a run saves, and from which step it goes on.

    Attributes:
        directory: Of the run.
        every: Steps from one checkpoint to the next; None saves after the last step only.
        keep: How many steps stay; None keeps all.
        first_step: Trained step to go on from; None starts again.
        kept_bits: Whether one device's steps gave every bit of what the run resumes from.
    """

    directory: str
    every: int | None = None
    keep: int | None = None
    first_step: int | None = None
    kept_bits: bool = True

    def is_due(self, step: int, last: int) -> bool:
        """Whether a run saves after a number of trained steps.

        Args:
            step: Trained so far.
            last: Trained when the run ends.
        """
        return step == last or (self.every is not None and step % self.every == 0)


def save_options(
    directory: Path | None,
    every: int | None,
    keep: int | None,
    *,
    resume: bool,
    on_signal: str | None = None,
) -> SaveOptions | None:
    """Return what the options of `pardnn run` say; None without `--save`.

    Args:
        directory: `--save`.
        every: `--every`.
        keep: `--keep`.
        resume: `--resume`: go on from the latest step.
        on_signal: `--on-signal`.

    Raises:
        UsageError: E233, if one needs another, or `keep` is no number of steps.
        FileError: E430, E431, E4xx, if there is no complete step to resume from, or the directory
            cannot be written.
        MismatchError: E522, if another run saves there.
    """
    if directory is None:
        if every is not None or keep is not None or resume or on_signal == "save":
            raise UsageError(
                "--every, --keep, --resume and --on-signal save go with --save DIR, the directory "
                "of the run",
                code="E233",
            )
        return None
    check_steps("keep", keep)
    if directory.exists() and not directory.is_dir():
        why = "it is a file, not the directory of a run"
        raise FileError(f"cannot save in {shown(str(directory))}: {why}", code="E433")
    if directory.is_dir():  # ranks ask again: until they do, another run may remove what is resumed
        Lock(directory).release()
    options = SaveOptions(directory=str(directory.resolve()), every=every, keep=keep)
    if not resume:
        return options
    found = read_manifest(resolve(directory))
    return replace(options, first_step=found.step, kept_bits=found.kept_bits)
