"""Options that steer a plan, and how they become constraints."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from pardnn.errors import UsageError, shown

if TYPE_CHECKING:
    from pardnn.plan.constraints import Constraint, Kind

ConstraintsFile = Annotated[
    Path | None,
    typer.Option("--constraints", help="Constraints file (docs/guides/steering.md)."),
]
Pins = Annotated[
    list[str] | None,
    typer.Option(
        "--pin",
        metavar="NAME=DEVICE[,DEVICE]",
        help="Run an op, tensor or layer:PATH on one of these devices. Repeatable.",
    ),
]
Forbids = Annotated[
    list[str] | None,
    typer.Option(
        "--forbid",
        metavar="[NAME=]DEVICE[,DEVICE]",
        help="Never run an op, tensor or layer:PATH (or anything) on these devices. Repeatable.",
    ),
]
Together = Annotated[
    list[str] | None,
    typer.Option(
        "--together", metavar="NAME[,NAME]", help="Run all of these on one device. Repeatable."
    ),
]
Apart = Annotated[
    list[str] | None,
    typer.Option(
        "--apart", metavar="NAME,NAME", help="Run no two of these on the same device. Repeatable."
    ),
]
Layouts = Annotated[
    list[str] | None,
    typer.Option(
        "--layout",
        metavar="NAME=DIM|whole[@AXIS]",
        help="Cut a tensor or a layer's parameters along this dim, or keep them whole, on this "
        "mesh axis (default: all). Repeatable.",
    ),
]
Pieces = Annotated[
    int | None,
    typer.Option("--pieces", metavar="N", help="Cut the batch into N pieces; `check` proves it."),
]
Prefers = Annotated[
    list[str] | None,
    typer.Option(
        "--prefer",
        metavar="NAME=DEVICE[,DEVICE]@TIME",
        help="Run it there unless that slows the step by more than TIME, such as 2ms. Repeatable.",
    ),
]


class Demands(NamedTuple):
    """What a command line demands of a plan: a file of constraints, and options of each kind."""

    constraints: ConstraintsFile = None
    pin: Pins = None
    forbid: Forbids = None
    together: Together = None
    apart: Apart = None
    layout: Layouts = None
    pieces: Pieces = None
    prefer: Prefers = None


def constraints_of(demands: Demands) -> tuple[Constraint, ...]:
    """Return the constraints of a file, and of options.

    Raises:
        UsageError: E245, if one says nothing; E204, if a time cannot be read.
        FileError: E403 to E407, if the file cannot be read.
    """
    if demands.pieces is None and not any(demands):
        return ()
    from pardnn.plan.constraints import Constraint, fix_pieces, prefer, read_constraints
    from pardnn.units import parse_seconds

    found = [] if demands.constraints is None else [*read_constraints(demands.constraints)]
    found += [_on_devices("pin", text) for text in demands.pin or ()]
    found += [_on_devices("forbid", text) for text in demands.forbid or ()]
    groups: dict[Kind, Sequence[str] | None] = {
        "together": demands.together,
        "apart": demands.apart,
    }
    for kind, texts in groups.items():
        found += [Constraint(kind=kind, what=tuple(text.split(","))) for text in texts or ()]
    found += map(_layout, demands.layout or ())
    found += [] if demands.pieces is None else [fix_pieces(demands.pieces)]
    for text in demands.prefer or ():
        demand, at, price = text.rpartition("@")
        if not at:
            raise UsageError(f"--prefer {text!r:.80}: the price is missing. Write NAME=DEVICE@2ms.")
        found.append(prefer(_on_devices("prefer", demand), parse_seconds(price)))
    return tuple(found)


#: What stands behind options that name devices.
_FORMS = {
    "pin": "NAME=DEVICE[,DEVICE]",
    "forbid": "[NAME=]DEVICE[,DEVICE]",
    "prefer": "NAME=DEVICE[,DEVICE]@TIME",
}


def _on_devices(option: str, text: str) -> Constraint:
    """Return what an option demands of devices; of `--prefer`, without its price."""
    from pardnn.plan.constraints import Constraint

    name, _, devices = text.rpartition("=")
    numbers = tuple(filter(None, devices.split(",")))
    kind = "forbid" if option == "forbid" else "pin"
    if not numbers or (kind == "pin" and not name):
        raise UsageError(f"--{option} {shown(text)}: write {_FORMS[option]}.")
    return Constraint(kind=kind, what=(name,) if name else (), devices=numbers)


def _layout(text: str) -> Constraint:
    """Return what `NAME=DIM[@AXIS]` demands."""
    from pardnn.plan.constraints import fix_layout

    name, _, rest = text.rpartition("=")
    dim, at, axis = rest.partition("@")
    is_number = dim.isascii() and dim.isdecimal() and len(dim) < 9
    if not name or not (is_number or dim == "whole") or (at and not axis):
        raise UsageError(f"--layout {text!r:.80}: write NAME=DIM[@AXIS], or NAME=whole[@AXIS].")
    return fix_layout(name, int(dim) if is_number else "whole", axis or None)
