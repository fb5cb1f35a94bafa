"""What the names of constraints stand for: numbers of ops and devices, tensors, layers."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

from pardnn.cluster import Cluster
from pardnn.errors import did_you_mean, shown
from pardnn.graph.ir import Graph, Tensor
from pardnn.graph.layers import is_within, known_layers, layers_of, origin
from pardnn.plan.constraints import Constraint, DeviceName, unusable

T = TypeVar("T")


class Named(NamedTuple):
    """A constraint by numbers.

    Attributes:
        constraint: As it was given.
        members: Numbers of the ops that each name stands for; all ops where there is no name.
        devices: Numbers.
        width: Devices of a submesh, on which ops are together; 1 where ops are whole.
    """

    constraint: Constraint
    members: tuple[tuple[int, ...], ...]
    devices: frozenset[int]
    width: int = 1


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
    width: int = 1,
) -> tuple[Named, ...]:
    """Return what constraints mean by numbers.

    Args:
        constraints: Of the user.
        graph: The step, whose names they use.
        planned: The graph whose ops are placed: itself, in pieces, with second calls, cut.
        cluster: Names the devices; None: they have numbers alone.
        num_devices: How many there are.
        width: Devices of a submesh, if ops are cut inside of submeshes.

    Raises:
        UsageError: E245, if a name or a device does not exist.
    """
    names = Names(graph, planned)
    index = {} if cluster is None else {d.name: i for i, d in enumerate(cluster.devices)}
    everything = tuple(range(len(planned.ops)))
    return tuple(
        Named(
            each,
            tuple(names.ops(name, each) for name in each.what) or (everything,),
            frozenset(_device(each, name, index, num_devices) for name in each.devices),
            width,
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
