"""What users may ask about, by name: ops, tensors, layers, devices; misspelt names."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Literal, NamedTuple

from pardnn.errors import UsageError, close_names, shown
from pardnn.explain.case import Case
from pardnn.graph.layers import is_within, origin
from pardnn.plan.plan import graph_in_pieces

#: Names that are suggested for one that there is not.
SUGGESTED = 5


class Subject(NamedTuple):
    """What is asked about.

    Attributes:
        kind: What it is.
        name: Of an op, tensor or layer.
        device: Its number; -1 if it is none.
        ops: Numbers of the ops of the planned graph that are meant: an op's pieces, shards and
            second calls, or those of a layer.
    """

    kind: Literal["op", "tensor", "layer", "device"]
    name: str
    device: int
    ops: tuple[int, ...]


def subject_of(case: Case, name: str) -> Subject:
    """Return what a name means: an op of the graph or of the plan, a tensor, a layer, or a device.

    A device is named as in the cluster, or by its number. "op:NAME" and the like, as constraints
    have them, say which is meant.

    Raises:
        UsageError: E241, with similar names.
    """
    kind, _, rest = name.partition(":")
    of_kind = (each for each in _meant(case, rest) if each.kind == kind)
    found = next(itertools.chain(_meant(case, name), of_kind), None)
    if found is None:
        raise _unknown(case, name)
    return found


def _meant(case: Case, name: str) -> Iterator[Subject]:
    """Yield what a name may mean, first what is most likely."""
    whole = {op.name for op in case.graph.ops}
    tensors = {t.name: op.name for op in case.graph.ops for t in op.outputs}
    planned = {op.name: i for i, op in enumerate(case.planned.ops)}
    if name in whole:
        yield Subject("op", name, -1, _calls(case, name))
    elif name in planned:
        yield Subject("op", name, -1, (planned[name],))
    shards = tuple(i for i, op in enumerate(case.planned.ops) if op.name.rpartition("@")[0] == name)
    if shards and any(op.name == name for op in graph_in_pieces(case.graph, case.plan).ops):
        yield Subject("op", name, -1, shards)
    if name in tensors:
        yield Subject("tensor", name, -1, _calls(case, tensors[name]))
    elif name in case.tensor_names:
        maker = case.planned.arrays.tensor_op[case.tensor_names.index(name)]
        yield Subject("tensor", name, -1, (int(maker),))
    inside = tuple(i for i, layer in enumerate(case.layers) if is_within(layer, name))
    if name and inside:
        yield Subject("layer", name, -1, inside)
    number = _device(case, name)
    if number is not None:
        yield Subject("device", case.devices[number], number, ())


def _calls(case: Case, name: str) -> tuple[int, ...]:
    """Return what the planned graph has of an op: itself, its pieces or shards, further calls."""
    return tuple(
        i for i, op in enumerate(case.planned.ops) if op.name == name or origin(op.name) == name
    )


def _device(case: Case, name: str) -> int | None:
    if name in case.devices:
        return case.devices.index(name)
    number = name.lower().removeprefix("device").strip(" :")
    is_number = number.isascii() and number.isdecimal() and len(number) < 9
    return int(number) if is_number and int(number) < case.plan.num_devices else None


def layer_names(case: Case) -> list[str]:
    """Return every module path of the graph, and the paths above them, in their order."""
    found: dict[str, None] = {}
    for layer in case.layers:
        parts = layer.split(".") if layer else []
        found |= {".".join(parts[:i]): None for i in range(1, len(parts) + 1)}
    return list(found)


def _unknown(case: Case, name: str) -> UsageError:
    names = [name for op in case.graph.ops for name in (op.name, *(t.name for t in op.outputs))]
    found = close_names(name, [*case.devices, *layer_names(case), *names], SUGGESTED)
    more = f" and {len(case.devices) - SUGGESTED} more" if len(case.devices) > SUGGESTED else ""
    devices = ", ".join(case.devices[:SUGGESTED]) + more
    hint = f"Did you mean {', '.join(map(shown, found))}?" if found else f"Devices are {devices}."
    return UsageError(
        f"no op, tensor, layer or device is named {shown(name)}.\n{hint}",
        code="E241",
        details={"name": name, "suggestions": found},
    )
