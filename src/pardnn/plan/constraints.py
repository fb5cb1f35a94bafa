"""Constraints on a plan by name: where ops run, how tensors are cut, how many pieces.

| kind | `what` | more | holds where |
| --- | --- | --- | --- |
| pin | ops | `devices` | each of these ops runs on one of the devices |
| forbid | ops; none: all | `devices` | none of these ops runs on any of them |
| together | two or more, or one layer | | all of these ops run on one device |
| apart | two or more | | no device runs ops of two of them |
| layout | tensors | `dim`, `axis` | this mesh axis, or each, cuts them along this dim, or none |
| pieces | | `count` | the batch is cut in this many pieces |

`what` has names of ops, tensors and layers: "op:NAME", "tensor:NAME", "layer:PATH", or just the
name, which is looked up in this order. A tensor stands for the op that makes it, on whose device
it is; a layer for everything that belongs to it: parameters, gradients, optimizer states and
updates. If the batch is in pieces or ops are called twice, every call is meant. In layouts an op
stands for its results and a layer for its parameters, except those without the dim.

A constraint with a price is a preference: a plan that does not meet it counts as that much slower.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from pardnn import files
from pardnn.cluster import STRICT, Cluster
from pardnn.errors import UsageError, did_you_mean, shown
from pardnn.graph.ir import Graph, Tensor
from pardnn.graph.layers import is_within, known_layers, layers_of, origin

T = TypeVar("T")

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


class Names:
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
        return self._looked_up(text, constraint, self._ops_of)

    def knows(self, text: str) -> bool:
        """Whether there are ops that a name stands for."""
        return next(self._found(text, self._ops_of), None) is not None

    def tensors(self, text: str, constraint: Constraint) -> tuple[Tensor, ...]:
        """Return the tensors that a name stands for: what an op makes, a layer's parameters.

        Raises:
            UsageError: E245, if there are none.
        """
        return self._looked_up(text, constraint, self._tensors_of)

    def _looked_up(
        self, text: str, constraint: Constraint, find: Callable[[str, str], tuple[T, ...]]
    ) -> tuple[T, ...]:
        found = next(self._found(text, find), None)
        if found is not None:
            return found
        kinds, name = _kinds(text)
        known = [*self.whole, *self.maker, *{layer for layer in self.layers if layer}]
        hint = did_you_mean(name, known)
        raise unusable(constraint, f"no {' or '.join(kinds)} is named {shown(name)}", hint)

    def _found(
        self, text: str, find: Callable[[str, str], tuple[T, ...]]
    ) -> Iterator[tuple[T, ...]]:
        kinds, name = _kinds(text)
        return filter(None, (find(kind, name) for kind in kinds))

    def _ops_of(self, kind: str, name: str) -> tuple[int, ...]:
        if kind == "layer":
            inside = (i for i, layer in enumerate(self.layers) if name and is_within(layer, name))
            return tuple(inside)
        op = name if kind == "op" else self.maker.get(name)
        return tuple(self.calls.get(op, ())) if op in self.whole else ()

    def _tensors_of(self, kind: str, name: str) -> tuple[Tensor, ...]:
        ops = [self.planned.ops[i] for i in self._ops_of(kind, name)]
        if kind == "layer":
            ops = [op for op in ops if op.kind == "parameter"]
        made = [tensor for op in ops for tensor in op.outputs]
        return tuple(tensor for tensor in made if kind != "tensor" or tensor.name == name)


def _kinds(text: str) -> tuple[tuple[str, ...], str]:
    """Return what a name may be of, and the name without that."""
    prefix, _, rest = text.partition(":")
    every = ("op", "tensor", "layer")
    return ((prefix,), rest) if prefix in every else (every, text)


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
    names = Names(graph, planned)
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


def said_of(graph: Graph, constraints: Sequence[Constraint]) -> tuple[Constraint, ...]:
    """Return what constraints that were made for another graph of a model say of this one.

    An evaluation has no gradients and no updates, so names are missing there.
    """
    names = Names(graph, graph)
    found: list[Constraint] = []
    for each in constraints:
        what = tuple(name for name in each.what if names.knows(name))
        is_left = len(what) > 1 or what == each.what or (what and each.kind in ("pin", "forbid"))
        if is_left:
            found.append(dataclasses.replace(each, what=what))
    return tuple(found)


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
    raise unusable(constraint, f"there is no device {shown(text)}", f"\nThere are {numbers}.")


def unusable(constraint: Constraint, why: str, hint: str = "") -> UsageError:
    """Return E245, with the constraint."""
    return UsageError(
        f"constraint {shown(str(constraint))}: {why}.{hint}",
        code="E245",
        details={"constraint": constraint_to_dict(constraint)},
    )
