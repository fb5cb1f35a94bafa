"""What a user demands of a plan: where ops run, together or apart; read, named, and proven.

| kind | `what` | `devices` | holds where |
| --- | --- | --- | --- |
| pin | ops | some | each of these ops runs on one of the devices |
| forbid | ops; none: all | some | none of these ops runs on any of them |
| together | two or more, or one layer | none | all of these ops run on one device |
| apart | two or more | none | no device runs ops of two of them |

`what` are names of ops, tensors and layers, "op:NAME", "tensor:NAME", "layer:PATH", or the name
alone, which is looked for in this order. A tensor stands for the op that makes it, which is where
it lies; a layer for all that works for it: parameters, gradients, optimizer states and updates.
Of a batch in pieces and of second calls every call is meant.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pardnn import files
from pardnn.cluster import STRICT, Cluster
from pardnn.errors import PardnnError, UsageError, shown
from pardnn.graph.ir import Graph
from pardnn.graph.layers import is_within, known_layers, layers_of, origin

Kind = Literal["pin", "forbid", "together", "apart"]
#: A device by its number or its name in the cluster.
DeviceName = int | str


@dataclass(frozen=True, kw_only=True)
class Constraint:
    """One demand, which a plan meets or is none.

    Attributes:
        kind: See the module.
        what: Names of ops, tensors and layers.
        devices: Numbers, or names of the cluster.

    Raises:
        UsageError: E245, if it says nothing.
    """

    __pydantic_config__ = STRICT

    kind: Kind
    what: tuple[str, ...] = ()
    devices: tuple[DeviceName, ...] = ()

    def __post_init__(self) -> None:
        """Check that it says something."""
        names_devices = self.kind in ("pin", "forbid")
        if names_devices != bool(self.devices):
            raise _unusable(self, "it names no device" if names_devices else "it takes no devices")
        if not self.what and self.kind != "forbid":
            raise _unusable(self, "it names no op, tensor or layer")
        if len(self.what) < 2 and self.kind == "apart":
            raise _unusable(self, "two or more can be apart")

    def __str__(self) -> str:
        """Return it as people write it."""
        what = ", ".join(self.what)
        if self.kind in ("together", "apart"):
            return f"{self.kind} {what}"
        devices = " or ".join(map(str, self.devices))
        if self.kind == "pin":
            return f"pin {what} to {devices}"
        return f"forbid {devices} for {what}" if what else f"forbid {devices}"


@dataclass(frozen=True, kw_only=True)
class Constraints:
    """The file of constraints."""

    __pydantic_config__ = STRICT

    format: Literal["pardnn.constraints/1"] = "pardnn.constraints/1"
    constraints: tuple[Constraint, ...]


def pin(what: str, *devices: DeviceName) -> Constraint:
    """Return the demand that an op, tensor or layer is on one of these devices.

    Args:
        what: Such as "layer:model.h.3".
        *devices: Numbers, or names of the cluster. Of several, each op is on any of them.
    """
    return Constraint(kind="pin", what=(what,), devices=devices)


def forbid(*devices: DeviceName, what: str | None = None) -> Constraint:
    """Return the demand that an op, tensor or layer is on none of these devices.

    Args:
        *devices: Numbers, or names of the cluster.
        what: Such as "layer:model.h.3"; None for all ops.
    """
    return Constraint(kind="forbid", what=() if what is None else (what,), devices=devices)


def together(*what: str) -> Constraint:
    """Return the demand that all of these ops, tensors and layers are on one device."""
    return Constraint(kind="together", what=what)


def apart(*what: str) -> Constraint:
    """Return the demand that no device has ops of two of these ops, tensors and layers."""
    return Constraint(kind="apart", what=what)


def read_constraints(path: str | Path) -> tuple[Constraint, ...]:
    """Read a `pardnn.constraints/1` file.

    Raises:
        FileError: E403 to E407.
        UsageError: E245, if a constraint says nothing.
    """
    what = f"constraints file {str(path)!r}"
    return files.parse_as(Constraints, files.read_bytes(path), what).constraints


def constraint_to_dict(constraint: Constraint) -> dict[str, Any]:
    """Return a constraint as JSON types."""
    return {
        "kind": constraint.kind,
        "what": list(constraint.what),
        "devices": list(constraint.devices),
    }


class Named(NamedTuple):
    """A constraint by numbers.

    Attributes:
        constraint: As it was given.
        members: Numbers of the ops that each name stands for; all ops where there is no name.
        devices: Numbers.
    """

    constraint: Constraint
    members: tuple[tuple[int, ...], ...]
    devices: frozenset[int]


class _Names:
    """What names stand for in the graph whose ops a plan places."""

    def __init__(self, graph: Graph, planned: Graph) -> None:
        self.graph, self.planned = graph, planned
        self.whole = {op.name for op in graph.ops}
        self.maker = {t.name: op.name for op in graph.ops for t in op.outputs}
        self.calls: dict[str, list[int]] = {}
        for i, op in enumerate(planned.ops):
            name = op.name if op.name in self.whole else origin(op.name)
            self.calls.setdefault(name, []).append(i)

    @functools.cached_property
    def layers(self) -> list[str]:
        """The layer of each op that a plan places: a third of a check, where it is asked for."""
        own = layers_of(self.graph)
        is_whole = self.planned is self.graph or self.planned.ops == self.graph.ops
        return own if is_whole else layers_of(self.planned, known_layers(self.graph, own))

    def ops(self, text: str, constraint: Constraint) -> tuple[int, ...]:
        """Return the ops that a name stands for.

        Raises:
            UsageError: E245, if there are none.
        """
        prefix, _, rest = text.partition(":")
        kinds = (prefix,) if prefix in ("op", "tensor", "layer") else ("op", "tensor", "layer")
        name = rest if len(kinds) == 1 else text
        for kind in kinds:
            found = self._of(kind, name)
            if found:
                return found
        known = [*self.whole, *self.maker, *{layer for layer in self.layers if layer}]
        close = difflib.get_close_matches(name, sorted(set(known)), n=3)
        hint = f"\nDid you mean {', '.join(map(shown, close))}?" if close else ""
        raise _unusable(constraint, f"no {' or '.join(kinds)} is named {shown(name)}", hint)

    def _of(self, kind: str, name: str) -> tuple[int, ...]:
        if kind == "layer":
            inside = (i for i, layer in enumerate(self.layers) if name and is_within(layer, name))
            return tuple(inside)
        op = name if kind == "op" else self.maker.get(name)
        return tuple(self.calls.get(op, ())) if op in self.whole else ()


def named(
    constraints: Sequence[Constraint],
    graph: Graph,
    planned: Graph,
    cluster: Cluster | None,
    num_devices: int,
) -> tuple[Named, ...]:
    """Return what constraints mean by numbers.

    Args:
        constraints: Of the user.
        graph: The step, whose names they use.
        planned: The graph whose ops are placed: itself, in pieces, with second calls.
        cluster: Names the devices; None: they have numbers alone.
        num_devices: How many there are.

    Raises:
        UsageError: E245, if a name or a device is not there.
    """
    names = _Names(graph, planned)
    index = {} if cluster is None else {d.name: i for i, d in enumerate(cluster.devices)}
    everything = tuple(range(len(planned.ops)))
    return tuple(
        Named(
            each,
            tuple(names.ops(name, each) for name in each.what) or (everything,),
            frozenset(_device(each, name, index, num_devices) for name in each.devices),
        )
        for each in constraints
    )


def _device(
    constraint: Constraint, name: DeviceName, index: Mapping[str, int], num_devices: int
) -> int:
    if isinstance(name, str) and name in index:
        return index[name]
    text = str(name)
    if text.isascii() and text.isdecimal() and len(text) < 9 and int(text) < num_devices:
        return int(text)
    known = ", ".join([*index][:5]) or "no names"
    numbers = f"{num_devices} devices, 0 to {num_devices - 1} ({known})"
    raise _unusable(constraint, f"there is no device {shown(text)}", f"\nThere are {numbers}.")


def _unusable(constraint: Constraint, why: str, hint: str = "") -> UsageError:
    return UsageError(
        f"constraint {shown(str(constraint))}: {why}.{hint}",
        code="E245",
        details={"constraint": constraint_to_dict(constraint)},
    )


def constraint_problems(
    constraints: Sequence[Constraint],
    graph: Graph,
    planned: Graph,
    placement: Mapping[str, int],
    cluster: Cluster | None,
    num_devices: int,
) -> Iterator[str]:
    """Yield each constraint that a placement breaks, with the ops that break it.

    Args:
        constraints: Of the user.
        graph: The step, whose names they use.
        planned: The graph whose ops are placed.
        placement: Device of each op of `planned`.
        cluster: Names the devices, if it is known.
        num_devices: How many there are.
    """
    if not constraints:
        return
    try:
        found = named(constraints, graph, planned, cluster, num_devices)
    except PardnnError as error:
        yield error.message.splitlines()[0]
        return
    place = [placement[op.name] for op in planned.ops]
    for each in found:
        at = breaking(each, place)
        if at is not None:
            ops = " and ".join(f"{planned.ops[i].name!r:.60} is on device {place[i]}" for i in at)
            yield f"constraint {shown(str(each.constraint))} is broken: {ops}"


def breaking(each: Named, place: Sequence[int]) -> tuple[int, ...] | None:
    """Return the op, or the two ops, that break a constraint; None if it holds.

    Args:
        each: The constraint.
        place: Device of each op.
    """
    kind, everywhere = each.constraint.kind, [i for row in each.members for i in row]
    if kind == "pin":
        return next(((i,) for i in everywhere if place[i] not in each.devices), None)
    if kind == "forbid":
        return next(((i,) for i in everywhere if place[i] in each.devices), None)
    if kind == "together":
        first = everywhere[0]
        return next(((first, i) for i in everywhere if place[i] != place[first]), None)
    owner: dict[int, tuple[int, int]] = {}
    for number, row in enumerate(each.members):
        for i in row:
            member, other = owner.setdefault(place[i], (number, i))
            if member != number:
                return (other, i)
    return None
