"""From a trace to a graph: dead code elimination, order edges and names.

Dead calls are dropped, except random ones: they advance the generator as in the eager step. A write
in place comes after every consumer of the old content (an anti-dependence). Such an edge is left
out if data dependences already give the order: O(calls x consumers of written storages / 64), as
the ancestors of a call are a bit set.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from pardnn.backends.torch.capture.first_step.gradients import GradientNames
from pardnn.backends.torch.capture.trace_ir import ITEM, Call, Storage, Value
from pardnn.backends.torch.ops.codec import encode, find_call
from pardnn.backends.torch.ops.kernel_memory import workspace
from pardnn.graph.build import build_graph
from pardnn.graph.ir import ALIGNMENT, LOSS_KIND, SOURCE_KINDS, Graph, Op, Tensor, addresses_storage

_HOST_BYTES = 8


class Captured(NamedTuple):
    """A captured step.

    Attributes:
        graph: The graph of the step.
        uncarried: Names of the tensors that the step changes, but its graph does not.
        gradients: What it does with gradients that its graph does not have.
        made_anew: How the tensors are made that eager steps keep and the graph makes each time:
            `KeptTensors.origins`.
        live: Names of numbers of objects that change between calls and that the graph reads.
        unleft: Names of the batch's tensors on which eager steps leave a gradient.
        constants: Real tensors that are constants of it, with their values.
        flags: Names of buffers that it treats as constants.
    """

    graph: Graph
    uncarried: tuple[str, ...]
    gradients: GradientNames
    made_anew: Mapping[str, Any] = MappingProxyType({})
    live: frozenset[str] = frozenset()
    unleft: tuple[str, ...] = ()
    constants: Sequence[tuple[torch.Tensor, Value]] = ()
    flags: Collection[str] = frozenset()


def live_calls(calls: Sequence[Call], outputs: Iterable[Call]) -> list[Call]:
    """Return the calls that `outputs` and random calls depend on, in the order of the trace."""
    stack = [*outputs, *(call for call in calls if call.random and not call.replays)]
    live: set[Call] = set()
    while stack:
        call = stack.pop()
        if call in live:
            continue
        live.add(call)
        stack.extend(value.call for value in call.inputs)
        stack.extend(call.after)
        stack.extend([call.replays] if call.replays else [])
        for storage, version in call.reads:
            stack.extend(storage.writes[:version])
    return [call for call in calls if call in live]


def add_order_edges(calls: Sequence[Call]) -> None:
    """Extend `after` so that each write follows the consumers and the write before it.

    A consumer also follows the write before it, even one of other elements.

    Args:
        calls: Live calls in a correct order.
    """
    kept = set(calls)
    written = {storage for call in calls for storage in _mutated_storages(call)}
    bits: dict[Call, int] = {}
    for call in calls:
        if any(storage in written for storage, _ in call.reads):
            bits[call] = 1 << len(bits)
    ancestor_bits: dict[Call, int] = {}
    consumers: dict[Storage, list[Call]] = {storage: [] for storage in written}
    last_write: dict[Storage, Call] = {}
    for call in calls:
        before = 0
        for predecessor in [*(value.call for value in call.inputs), *call.after]:
            if predecessor in kept:
                before |= ancestor_bits.get(predecessor, 0) | bits.get(predecessor, 0)
        writes = [last_write[s] for s in dict.fromkeys(s for s, _ in call.reads) if s in last_write]
        changed = _mutated_storages(call)
        for predecessor in [*writes, *(c for s in changed for c in reversed(consumers[s]))]:
            if predecessor is not call and not before & bits[predecessor]:
                call.after.append(predecessor)
                before |= ancestor_bits[predecessor] | bits[predecessor]
        for storage in changed:
            consumers[storage], last_write[storage] = [], call
        for storage, _ in call.reads:
            if storage in written:
                consumers[storage].append(call)
        ancestor_bits[call] = before
    for call in calls:
        call.after = [other for other in dict.fromkeys(call.after) if other in kept]


def _mutated_storages(call: Call) -> list[Storage]:
    storages = (value.storage for value in call.mutated)
    return [storage for storage in dict.fromkeys(storages) if storage is not None]


def name_calls(calls: Sequence[Call]) -> None:
    """Name calls and values "addmm", "addmm_1", ...; sources have their names already."""
    taken = {call.name for call in calls if call.kind in SOURCE_KINDS}
    counts: dict[str, int] = {}
    for call in calls:
        if not call.name:
            base = base_name(call.kind)
            call.name = _unused_name(base, counts, taken)
        single = len(call.outputs) == 1
        for i, value in enumerate(call.outputs):
            value.name = call.name if single else f"{call.name}.{i}"


def base_name(kind: str) -> str:
    """Return the op's name within its kind: "mm" of "aten.mm.default"."""
    if kind.startswith("scalar."):
        return kind.replace(".", "_")
    if kind == ITEM:
        return "item"
    parts = kind.replace("::", ".").split(".")
    return (parts[1] if len(parts) > 1 else parts[0]).strip("_")


def _unused_name(base: str, counts: dict[str, int], taken: set[str]) -> str:
    while True:
        count = counts.get(base, 0)
        counts[base] = count + 1
        name = base if count == 0 else f"{base}_{count}"
        if name not in taken:
            return name


def graph_of(
    name: str,
    calls: Sequence[Call],
    loss: Value | None,
    granted: dict[str, Any],
    accelerator: str,
    result: Any = None,
) -> Graph:
    """Return named calls as a checked graph.

    Args:
        name: The name of the graph.
        calls: Live, ordered and named.
        loss: The value that is the loss; None of an evaluation.
        granted: What the graph takes for granted, the `arguments` of its loss op.
        accelerator: Device type of the model.
        result: Structure of what the step returns, of `result.named_result`; None: the loss.
    """
    groups = _groups(calls)
    ops = [_op(call, groups, accelerator) for call in calls]
    arguments = granted if result is None else {**granted, "result": result}
    marked = () if loss is None else (loss.name,)
    mark = Op(name=LOSS_KIND, kind=LOSS_KIND, inputs=marked, arguments=arguments or None)
    ops.append(mark)
    return dataclasses.replace(build_graph(name, ops), is_captured=True)


def with_contents(graph: Graph, read: list[str]) -> Graph:
    """Return a graph with a note of the large contents that its step reads."""
    if not read:
        return graph
    *ops, mark = graph.ops
    arguments = {**(mark.arguments or {}), "contents": read}
    found = build_graph(graph.name, [*ops, dataclasses.replace(mark, arguments=arguments)])
    return dataclasses.replace(found, is_captured=True)


def _groups(calls: Sequence[Call]) -> dict[Storage, str]:
    """Name the group of each written storage; storages that one call allocates or writes share it.

    So do storages that a call addresses by offset, since a copy of a view begins elsewhere.
    O(calls), by union-find.
    """
    together = {storage for call in calls for storage in _mutated_storages(call)}
    together |= {s for call in calls if addresses_storage(call.kind) for s in _storages(call)}
    leader: dict[Storage, Storage] = {}

    def find(storage: Storage) -> Storage:
        while leader.setdefault(storage, storage) is not storage:
            storage = leader[storage]
        return storage

    for call in calls:
        touched = [storage for storage in _storages(call) if storage in together]
        for storage in touched:
            leader[find(storage)] = find(touched[0])
    return {storage: find(storage).owner.name for storage in leader}


def _storages(call: Call) -> list[Storage]:
    """Return the storages of a call's outputs, and the one that it addresses."""
    values = [*call.outputs, *(call.inputs[:1] if addresses_storage(call.kind) else ())]
    return [value.storage for value in values if value.storage is not None]


def _op(call: Call, groups: dict[Storage, str], accelerator: str) -> Op:
    named = (groups.get(storage) for storage in _storages(call))
    return Op(
        name=call.name,
        kind=call.kind,
        inputs=tuple(value.name for value in call.inputs),
        after=tuple(other.name for other in call.after),
        outputs=tuple(tensor_of(value) for value in call.outputs),
        memory=_memory(call),
        workspace=_workspace(call),
        group=next((group for group in named if group is not None), None),
        source=call.source,
        module=call.module or None,
        arguments=_arguments(call, accelerator),
        backward_of=call.backward_of.name or None if call.backward_of else None,
    )


def _workspace(call: Call) -> int:
    inputs, outputs = (
        [value.geometry for value in values if value.geometry is not None]
        for values in (call.inputs, call.outputs)
    )
    return workspace(call.kind, inputs, outputs)


def _memory(call: Call) -> Any:
    if call.kind in SOURCE_KINDS:
        return "normal" if call.kind == "input" else "residual"
    if call.kept:
        return "residual"
    owns = any(value.base is None for value in call.outputs)
    return "normal" if owns or not call.outputs else "reference"


def tensor_of(value: Value) -> Tensor:
    """Return a value as a tensor of the graph."""
    if value.geometry is None:
        assert value.kind is not None
        return Tensor(
            name=value.name, bytes=_HOST_BYTES, shape=(), dtype=f"host.{value.kind.__name__}"
        )
    shape, strides, offset, dtype = value.geometry
    size, is_view = math.prod(shape) * dtype.itemsize, value.base is not None
    return Tensor(
        name=value.name,
        bytes=size,
        shape=tuple(shape),
        dtype=str(dtype).removeprefix("torch."),
        strides=None if _is_contiguous(shape, strides) else tuple(strides),
        alias_of=value.base.name if value.base is not None else None,
        # In a trace, the owner of a storage starts at its beginning.
        misaligned_bytes=offset * dtype.itemsize % ALIGNMENT if size and is_view else 0,
    )


def _is_contiguous(shape: torch.Size, strides: tuple[int, ...]) -> bool:
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if stride != expected:
            return False
        expected *= max(size, 1)
    return True


def _arguments(call: Call, accelerator: str) -> dict[str, Any] | None:
    if call.kind in SOURCE_KINDS:
        return call.arguments

    def name_of(value: Any) -> str:
        if not isinstance(value, Value):
            raise KeyError
        return value.name

    kwargs = {
        key: encode(value, name_of, accelerator)
        for key, value in call.kwargs.items()
        if value is not None or _has_no_default(call.kind, key)
    }
    arguments: dict[str, Any] = {"args": encode(call.args, name_of, accelerator)}
    if kwargs:
        arguments["kwargs"] = kwargs
    if call.replays is not None:
        arguments["redraws"] = call.replays.name
    returned = [None if value is None else value.name for value in call.returns]
    if returned != [value.name for value in call.outputs]:
        arguments["returns"] = returned
    if call.mutated and not _is_in_place(call):
        arguments["mutates"] = [value.name for value in call.mutated]
    return arguments


def _has_no_default(kind: str, name: str) -> bool:
    """Whether a call must give an argument even if it is None, as `torch.rand(n, generator=None)`.

    Args:
        kind: The kind of the call.
        name: The name of the argument.
    """
    schema: Any = getattr(find_call(kind), "_schema", None)
    arguments = schema.arguments if schema else ()
    return any(each.name == name and not each.has_default_value() for each in arguments)


def _is_in_place(call: Call) -> bool:
    """Whether the kind's own name says that the call changes what its outputs alias."""
    parts = call.kind.split(".")
    return "::" not in call.kind and len(parts) == 3 and parts[1].endswith("_")
