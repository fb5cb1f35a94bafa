"""Options that steer a plan, and how they become constraints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pardnn.errors import UsageError

if TYPE_CHECKING:
    from pardnn.plan.constraints import Constraint, Kind

ConstraintsFile = Annotated[
    Path | None, typer.Option("--constraints", help="File of constraints; see docs/guides.")
]
Pins = Annotated[
    list[str] | None,
    typer.Option(
        "--pin",
        metavar="NAME=DEVICE[,DEVICE]",
        help="Run an op, tensor or layer:PATH on one of these devices.",
    ),
]
Forbids = Annotated[
    list[str] | None,
    typer.Option(
        "--forbid",
        metavar="[NAME=]DEVICE[,DEVICE]",
        help="Never run an op, tensor or layer:PATH, or anything at all, on these devices.",
    ),
]
Together = Annotated[
    list[str] | None,
    typer.Option("--together", metavar="NAME[,NAME]", help="Run all of these on one device."),
]
Apart = Annotated[
    list[str] | None,
    typer.Option("--apart", metavar="NAME,NAME", help="Run no two of these on one device."),
]
Layouts = Annotated[
    list[str] | None,
    typer.Option(
        "--layout",
        metavar="NAME=DIM[@AXIS]",
        help="Cut a tensor, or a layer's parameters, along this dim, or keep them whole.",
    ),
]
Pieces = Annotated[
    int | None, typer.Option("--pieces", metavar="N", help="Cut the batch in just so many pieces.")
]
Prefers = Annotated[
    list[str] | None,
    typer.Option(
        "--prefer",
        metavar="NAME=DEVICE[,DEVICE]@TIME",
        help="Run it there, unless the step is slower by more than this, such as 2ms.",
    ),
]


def constraints_of(
    file: Path | None,
    pins: Sequence[str] | None = None,
    forbids: Sequence[str] | None = None,
    together: Sequence[str] | None = None,
    apart: Sequence[str] | None = None,
    layouts: Sequence[str] | None = None,
    pieces: int | None = None,
    prefers: Sequence[str] | None = None,
) -> tuple[Constraint, ...]:
    """Return the constraints of a file, and of options.

    Args:
        file: `--constraints`.
        pins: Each `--pin`.
        forbids: Each `--forbid`.
        together: Each `--together`.
        apart: Each `--apart`.
        layouts: Each `--layout`.
        pieces: `--pieces`.
        prefers: Each `--prefer`.

    Raises:
        UsageError: E245, if one says nothing; E204, if a time cannot be read.
        FileError: E403 to E407, if the file cannot be read.
    """
    given = (file, pins, forbids, together, apart, layouts, prefers)
    if pieces is None and not any(given):
        return ()
    from pardnn.plan.constraints import Constraint, fix_pieces, prefer, read_constraints
    from pardnn.units import parse_seconds

    found = [] if file is None else [*read_constraints(file)]
    found += _on_devices("pin", pins)
    found += _on_devices("forbid", forbids)
    groups: dict[Kind, Sequence[str] | None] = {"together": together, "apart": apart}
    for kind, texts in groups.items():
        found += [Constraint(kind=kind, what=tuple(text.split(","))) for text in texts or ()]
    found += map(_layout, layouts or ())
    found += [] if pieces is None else [fix_pieces(pieces)]
    for text in prefers or ():
        demand, at, price = text.rpartition("@")
        if not at:
            raise UsageError(f"--prefer {text!r:.80}: what is it worth? Write NAME=DEVICE@2ms.")
        found += [prefer(each, parse_seconds(price)) for each in _on_devices("pin", [demand])]
    return tuple(found)


def _on_devices(kind: Kind, texts: Sequence[str] | None) -> Iterator[Constraint]:
    from pardnn.plan.constraints import Constraint

    for text in texts or ():
        name, _, devices = text.rpartition("=")
        numbers = tuple(filter(None, devices.split(",")))
        yield Constraint(kind=kind, what=(name,) if name else (), devices=numbers)


def _layout(text: str) -> Constraint:
    """Return what `NAME=DIM[@AXIS]` demands."""
    from pardnn.plan.constraints import fix_layout

    name, _, rest = text.rpartition("=")
    dim, at, axis = rest.partition("@")
    is_number = dim.isascii() and dim.isdecimal() and len(dim) < 9
    if not name or not (is_number or dim == "whole") or (at and not axis):
        raise UsageError(f"--layout {text!r:.80}: write NAME=DIM[@AXIS], or NAME=whole[@AXIS].")
    return fix_layout(name, int(dim) if is_number else "whole", axis or None)
