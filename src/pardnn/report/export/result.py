"""What `export`, `draw` and `code` report."""

from __future__ import annotations

from dataclasses import dataclass

from pardnn.report.results import STRICT, StateDifference


@dataclass(frozen=True, kw_only=True)
class ExportResult:
    """What `export` and `draw` wrote."""

    __pydantic_config__ = STRICT

    output: str
    format: str
    bytes: int


@dataclass(frozen=True, kw_only=True)
class CodeResult:
    """What `code` wrote and, if it ran, how its steps went.

    Attributes:
        code: Of the one rank that was asked for, if no file was.
        files: The files of the ranks, if they were to stay.
        losses: One per step, if the code ran; None for one that is not finite.
        step_s: Seconds of each step on the slowest rank, likewise.
        reference_losses: Those of the user's own step on one device, if it was asked for.
        verified: Whether losses and state are those of one device, likewise.
        tolerance: Relative, of the losses, as in `RunResult`; so are the next two.
        largest_difference: Of the losses, relative.
        state: After the last step.
    """

    __pydantic_config__ = STRICT

    code: str | None = None
    files: tuple[str, ...] = ()
    losses: tuple[float | None, ...] = ()
    step_s: tuple[float, ...] = ()
    reference_losses: tuple[float | None, ...] | None = None
    verified: bool | None = None
    tolerance: float | None = None
    largest_difference: float | None = None
    state: StateDifference | None = None
