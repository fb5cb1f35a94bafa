"""Constraints on a plan by name: where ops run, how tensors are cut, how many pieces.

| kind | `what` | more | holds where |
| --- | --- | --- | --- |
| pin | ops | `devices` | each of these ops runs on one of the devices |
| forbid | ops; none: all | `devices` | none of these ops runs on any of them |
| together | two or more, or one layer | | all of these ops run on one device |
| apart | two or more | | no device runs ops of two of them |
| layout | tensors | `dim`, `axis` | this mesh axis, or each, cuts them along this dim, or none |
| pieces | | `count` | the batch is cut in this many pieces |

`what` are names of ops, tensors and layers, "op:NAME", "tensor:NAME", "layer:PATH", or the name
alone, which is looked for in this order. A tensor stands for the op that makes it, which is where
it lies; a layer for all that works for it: parameters, gradients, optimizer states and updates.
Of a batch in pieces and of second calls every call is meant. An op that is cut inside of a submesh
is on all devices of it: a pin has to name all of these, and ops are together on one submesh. Of
layouts an op stands for what it makes, and a layer for its parameters; those without the dim are
not meant.

A constraint with a price is a preference: a plan that does not meet it counts as that much slower.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pardnn import files
from pardnn.cluster import STRICT
from pardnn.errors import UsageError, shown

Kind = Literal["pin", "forbid", "together", "apart", "layout", "pieces"]
#: Kinds that say where whole ops run.
PLACING = ("pin", "forbid", "together", "apart")
#: A dim that is none: the tensor is whole.
WHOLE = "whole"
#: Batches are cut in no more pieces.
MAX_PIECES = 100_000
#: No step takes as many seconds.
MAX_PRICE = 1e9
#: A device by its number or its name in the cluster.
DeviceName = int | str


@dataclass(frozen=True, kw_only=True)
class Constraint:
    """One constraint that the plan has to meet; with a price, a preference.

    Attributes:
        kind: See the module.
        what: Names of ops, tensors and layers.
        devices: Numbers, or names in the cluster.
        dim: For a layout: the tensor dim that is cut, or "whole".
        axis: For a layout: the mesh axis by number or name; None for every axis.
        count: For pieces: how many.
        price_s: Seconds that the step may lose to meet it; None if it has to be met.

    Raises:
        UsageError: E245, if something is missing or too much.
    """

    __pydantic_config__ = STRICT

    kind: Kind
    what: tuple[str, ...] = ()
    devices: tuple[DeviceName, ...] = ()
    dim: int | Literal["whole"] | None = None
    axis: int | str | None = None
    count: int | None = None
    price_s: float | None = None

    def __post_init__(self) -> None:
        """Check that it is complete."""
        why = next(_gaps(self), None)
        if why is not None:
            raise unusable(self, why)

    def __str__(self) -> str:
        """Return it as people write it."""
        price = "" if self.price_s is None else f" (worth {self.price_s:g} s)"
        return f"{self._demand()}{price}"

    def _demand(self) -> str:
        what = ", ".join(self.what)
        if self.kind == "pieces":
            return f"{self.count} pieces"
        if self.kind == "layout":
            where = "" if self.axis is None else f" on mesh axis {self.axis}"
            how = WHOLE if self.dim == WHOLE else f"cut along dim {self.dim}"
            return f"layout {what} {how}{where}"
        if self.kind in ("together", "apart"):
            return f"{self.kind} {what}"
        devices = " or ".join(map(str, self.devices))
        if self.kind == "pin":
            return f"pin {what} to {devices}"
        return f"forbid {devices} for {what}" if what else f"forbid {devices}"


def _gaps(each: Constraint) -> Iterator[str]:
    """Yield what is missing in a constraint, or too much."""
    kind = each.kind
    if (kind in ("pin", "forbid")) != bool(each.devices):
        yield "it takes no devices" if each.devices else "it names no device"
    if not each.what and kind not in ("forbid", "pieces"):
        yield "it names no op, tensor or layer"
    if len(each.what) < 2 and kind == "apart":
        yield "apart needs two or more names"
    if (kind == "layout") != (each.dim is not None):
        yield "a layout needs a dim (a number of at least 0, or whole); other kinds take none"
    if isinstance(each.dim, int) and each.dim < 0:
        yield f"dim is {each.dim}; it must be a number of at least 0, or whole"
    if each.axis is not None and kind != "layout":
        yield "only a layout has a mesh axis"
    if (kind == "pieces") != (each.count is not None) or (kind == "pieces" and each.what):
        yield "pieces take a count and nothing else; other kinds take no count"
    if each.count is not None and not 1 <= each.count <= MAX_PIECES:
        yield f"the number of pieces is {each.count}; it must be from 1 to {MAX_PIECES}"
    price = each.price_s
    if price is not None and not (math.isfinite(price) and 0 < price <= MAX_PRICE):
        yield f"its price is {price:g} s; it must be above 0 and at most {MAX_PRICE:g} s"


@dataclass(frozen=True, kw_only=True)
class Constraints:
    """The file of constraints."""

    __pydantic_config__ = STRICT

    format: Literal["pardnn.constraints/1"] = "pardnn.constraints/1"
    constraints: tuple[Constraint, ...]


def pin(what: str, *devices: DeviceName) -> Constraint:
    """Return the constraint that an op, tensor or layer is on one of these devices.

    Args:
        what: Such as "layer:model.h.3".
        *devices: Numbers, or names in the cluster. With several, each op may be on any of them.
    """
    return Constraint(kind="pin", what=(what,), devices=devices)


def forbid(*devices: DeviceName, what: str | None = None) -> Constraint:
    """Return the constraint that an op, tensor or layer is on none of these devices.

    Args:
        *devices: Numbers, or names in the cluster.
        what: Such as "layer:model.h.3"; None for all ops.
    """
    return Constraint(kind="forbid", what=() if what is None else (what,), devices=devices)


def together(*what: str) -> Constraint:
    """Return the constraint that all of these ops, tensors and layers are on one device."""
    return Constraint(kind="together", what=what)


def apart(*what: str) -> Constraint:
    """Return the constraint that no two of these ops, tensors and layers share a device."""
    return Constraint(kind="apart", what=what)


def fix_layout(what: str, dim: int | Literal["whole"], axis: int | str | None = None) -> Constraint:
    """Return the constraint that a tensor, or a layer's parameters, are cut this way or kept whole.

    Args:
        what: Such as "model.h.3.mlp.c_fc.weight" or "layer:model.h.3.mlp.c_fc".
        dim: The tensor dim that is cut, or "whole".
        axis: The mesh axis by number or name; None for every axis.
    """
    return Constraint(kind="layout", what=(what,), dim=dim, axis=axis)


def fix_pieces(count: int) -> Constraint:
    """Return the constraint that the batch is cut in this many pieces."""
    return Constraint(kind="pieces", count=count)


def prefer(constraint: Constraint, price_s: float) -> Constraint:
    """Return a preference: the constraint holds unless it slows the step by more than its price.

    Args:
        constraint: A constraint of any kind.
        price_s: The price, in seconds per step.
    """
    return dataclasses.replace(constraint, price_s=price_s)


def hard(constraints: Iterable[Constraint]) -> tuple[Constraint, ...]:
    """Return the constraints that a plan has to meet."""
    return tuple(each for each in constraints if each.price_s is None)


def placing(constraints: Iterable[Constraint]) -> tuple[Constraint, ...]:
    """Return the constraints that a plan has to meet, and that say where whole ops run."""
    return tuple(each for each in hard(constraints) if each.kind in PLACING)


def cutting(constraints: Iterable[Constraint]) -> tuple[Constraint, ...]:
    """Return the constraints that a plan has to meet, and that no uncut tensor meets."""
    return tuple(e for e in hard(constraints) if e.kind == "layout" and e.dim != WHOLE)


def read_constraints(path: str | Path) -> tuple[Constraint, ...]:
    """Read a `pardnn.constraints/1` file.

    Raises:
        FileError: E403 to E407.
        UsageError: E245, if a constraint is incomplete.
    """
    what = f"constraints file {str(path)!r}"
    return files.parse_as(Constraints, files.read_bytes(path), what).constraints


def constraint_to_dict(constraint: Constraint) -> dict[str, Any]:
    """Return a constraint as JSON types."""
    data = {
        "kind": constraint.kind,
        "what": list(constraint.what),
        "devices": list(constraint.devices),
    }
    more = ("dim", "axis", "count", "price_s")
    found = {key: getattr(constraint, key) for key in more}
    return data | {key: value for key, value in found.items() if value is not None}


def unusable(constraint: Constraint, why: str, hint: str = "") -> UsageError:
    """Return E245, with the constraint."""
    return UsageError(
        f"constraint {shown(str(constraint))}: {why}.{hint}",
        code="E245",
        details={"constraint": constraint_to_dict(constraint)},
    )
