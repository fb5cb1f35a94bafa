"""The local ops of one op: inputs resharded, arguments localised, results brought to their layout.

Every device makes the call of its `templates.Template` on local tensors. If a device does not own
exactly the region of an input that it needs, the input is resharded first; a result that is partial
or elsewhere is reduced or resharded afterwards. Kernels that do not read strides get contiguous
copies of strided inputs.
Reference: Tofu (EuroSys 2019), section 6.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pardnn.errors import InvalidPlanError, shown
from pardnn.graph.ir import LOSS_KIND, Op, Tensor, writes
from pardnn.shard.aten.lookup import description_of
from pardnn.shard.boxes import is_dense, whole
from pardnn.shard.spmd.emitter import Anchor, Emitter, ShardedTensor, is_result, local_tensor
from pardnn.shard.spmd.gathered_writes import gather_in_place, gathered_writes
from pardnn.shard.spmd.multi_fetch import contiguous_copy, reshard
from pardnn.shard.spmd.partial_sums import keeps_terms
from pardnn.shard.spmd.spread_reduction import reduce_or_reshard
from pardnn.shard.spmd.templates import PartitionedOp, filled, non_local_tensor, shared_input


def emit_local_ops(emitter: Emitter, op: Op, partitioned: PartitionedOp) -> None:
    """Write the local ops of an op of the graph.

    Args:
        emitter: Where to write.
        op: The op.
        partitioned: What each device does of it.

    Raises:
        InvalidPlanError: E410, if it writes a tensor that is not local.
    """
    gathered = gathered_writes(emitter, op, partitioned)
    name = non_local_tensor(emitter, op, partitioned, gathered)
    if name is not None:
        raise InvalidPlanError(
            f"op {shown(op.name)} ({op.source or op.kind}) shares the storage of {shown(name)}, "
            "which is changed in place, but would need a part of it that is elsewhere.\n"
            "Give all views of one storage the same blocks, or leave them and the op whole."
        )
    anchor = Anchor(op, tuple([f"{op.name}@{device}" for device in emitter.devices]))
    local = _inputs(emitter, op, partitioned, anchor, frozenset(gathered.values()))
    outputs = [_output(emitter, op, partitioned, tensor) for tensor in op.outputs]
    for device in emitter.devices:
        if op.kind != LOSS_KIND or device == 0:
            _emit(emitter, op, partitioned, device, local[device], outputs)
    computed = {output.computed.tensor.name: output.computed for output in outputs}
    divisors = [_divisor(partitioned, number) for number in range(len(partitioned.returned))]
    for number in sorted(range(len(divisors)), key=lambda each: divisors[each] is not None):
        result, divisor = partitioned.returned[number], divisors[number]
        if result is None or computed[result].names == emitter.own(result).names:
            continue
        if result in gathered:
            copied = _copied(emitter, partitioned, local, gathered[result])
            gather_in_place(emitter, computed[result], gathered[result], anchor, copied)
            continue
        source = shared_input(emitter, op, emitter.tensors[result])
        is_view = source is not None and source in partitioned.names.values() and all(
            f"{source}@{device}" in by_slot.values() for device, by_slot in enumerate(local)
        )  # fmt: skip
        results = [found for found in partitioned.template.results[number] if found is not None]
        reduce_or_reshard(
            emitter, computed[result], results, anchor, is_view=is_view, divisor=divisor
        )


def _divisor(partitioned: PartitionedOp, number: int) -> str | None:
    """Return the output that divides the sum of a result's parts; None where nothing does."""
    results = partitioned.template.results[number]
    found = results[0] and results[0].divisor
    return None if found is None else partitioned.returned[found]


def _inputs(
    emitter: Emitter,
    op: Op,
    partitioned: PartitionedOp,
    anchor: Anchor,
    gathered: frozenset[str],
) -> list[dict[str, str]]:
    """Return, per device, the local tensor in each slot."""
    local: list[dict[str, str]] = [{} for _ in emitter.devices]
    resharded: dict[Any, list[str | None]] = {}
    is_loss = op.kind == LOSS_KIND
    for slot, name in partitioned.names.items():
        own = emitter.own(name)
        if partitioned.template.boxes[slot] == own.boxes and not is_loss:
            for by_slot, found in zip(local, own.names, strict=True):
                by_slot[slot] = str(found)
            continue
        requests = partitioned.template.requests[slot]
        if is_loss:
            requests = (requests[0], *[None] * (len(requests) - 1))
        if (name, requests) not in resharded:
            resharded[name, requests] = reshard(emitter, own, requests, anchor)
        for by_slot, found in zip(local, resharded[name, requests], strict=True):
            if found is not None:
                by_slot[slot] = found
    if emitter.strided and not _takes_strided(op):
        _copy_strided(emitter, partitioned, local, anchor, {*writes(op)} - gathered)
    return local


def _takes_strided(op: Op) -> bool:
    description = description_of(op.kind) if "." in op.kind else None
    return description is not None and description.takes_strided


def _copy_strided(
    emitter: Emitter,
    partitioned: PartitionedOp,
    local: Sequence[dict[str, str]],
    anchor: Anchor,
    changed: set[str],
) -> None:
    """Copy inputs that are strided here and dense in the graph, but for those that are changed.

    What is written by parts, as a fused update of a whole parameter, is copied back with the parts
    of other devices: such kernels take the parts for runs of memory.
    """
    for device, by_slot in enumerate(local):
        if emitter.strided.isdisjoint(by_slot.values()):
            continue
        for slot, name in by_slot.items():
            tensor = emitter.tensors[partitioned.names[slot]]
            box = partitioned.template.boxes[slot][device]
            if name not in emitter.strided or tensor.name in changed or box is None:
                continue
            everything = whole(tensor.shape or ())
            if is_dense(tensor, everything, everything):
                by_slot[slot] = contiguous_copy(emitter, tensor, device, box, name, anchor)


def _copied(
    emitter: Emitter, partitioned: PartitionedOp, local: Sequence[Mapping[str, str]], target: str
) -> frozenset[int]:
    """Return the devices on which the part of a tensor that is written is a copy."""
    (slot,) = (slot for slot, name in partitioned.names.items() if name == target)
    own, parts = emitter.own(target), partitioned.template.boxes[slot]
    return frozenset(
        device
        for device, (box, part) in enumerate(zip(own.boxes, parts, strict=True))
        if box is not None and part is not None and not is_dense(own.tensor, box, part)
        and local[device][slot] not in emitter.strided
    )  # fmt: skip


class _Output(NamedTuple):
    """An output as it is computed, and the slot of the input whose storage it shares."""

    computed: ShardedTensor
    alias: str | None


def _output(emitter: Emitter, op: Op, partitioned: PartitionedOp, tensor: Tensor) -> _Output:
    source = shared_input(emitter, op, tensor)
    slot = None
    if source is not None:
        slot = next((slot for slot, name in partitioned.names.items() if name == source), None)
        if slot is None:
            raise InvalidPlanError(
                f"{shown(tensor.name)} shares the storage of {shown(source)}, which op "
                f"{shown(op.name)} ({op.source or op.kind}) does not take as an argument.\n"
                "Capture the graph again."
            )
    return _Output(_computed(emitter, partitioned, tensor), slot)


def _computed(emitter: Emitter, partitioned: PartitionedOp, tensor: Tensor) -> ShardedTensor:
    """Return an output as it is computed: under its final name where that is its layout."""
    own = emitter.own(tensor.name)
    if tensor.name not in partitioned.returned:
        return own
    number = partitioned.returned.index(tensor.name)
    template = partitioned.template
    boxes, is_partial = template.made[number], template.is_partial[number]
    if keeps_terms(emitter, partitioned, number) or (not is_partial and boxes == own.boxes):
        return own
    base = emitter.fresh(f"{tensor.name}:here")
    names = tuple(
        name if not is_partial and box == mine else f"{base}@{device}"
        for device, (name, box, mine) in enumerate(zip(own.names, boxes, own.boxes, strict=True))
    )
    return ShardedTensor(tensor, names, boxes)


def _emit(
    emitter: Emitter,
    op: Op,
    partitioned: PartitionedOp,
    device: int,
    local: Mapping[str, str],
    outputs: Sequence[_Output],
) -> None:
    local_outputs: list[Tensor] = []
    renamed: dict[str | None, str | None] = {None: None}
    for computed, slot in outputs:
        name, box = computed.names[device], computed.boxes[device]
        assert name is not None
        assert box is not None
        renamed[computed.tensor.name] = name
        alias = None if slot is None else local[slot]
        if alias in emitter.strided:
            emitter.strided.add(name)
        local_outputs.append(local_tensor(computed.tensor, name, box, alias))
    fraction = partitioned.template.fractions[device]
    is_kept = op.memory != "residual" or any(is_result(op, t, device) for t in local_outputs)
    backward = op.backward_of and f"{op.backward_of}@{device}"
    emitter.emit(
        device,
        Op(
            name=f"{op.name}@{device}", kind=op.kind, inputs=tuple(dict.fromkeys(local.values())),
            after=emitter.after(op, device), outputs=tuple(local_outputs),
            memory=op.memory if is_kept else "normal",
            seconds=op.seconds and {kind: s * fraction for kind, s in op.seconds.items()},
            workspace=math.ceil(op.workspace * fraction), source=op.source, module=op.module,
            backward_of=backward if backward in emitter.names else None, step=op.step,
            arguments=_arguments(op, partitioned, device, local, renamed),
        ),
    )  # fmt: skip


def _arguments(
    op: Op,
    partitioned: PartitionedOp,
    device: int,
    local: Mapping[str, str],
    renamed: Mapping[str | None, str | None],
) -> dict[str, Any] | None:
    """Return the arguments of a local op, given its tensors by slot and by output."""
    if op.arguments is None:
        return None
    args, kwargs = partitioned.template.arguments[device]
    found = dict(op.arguments)
    if "args" in found or args:
        found["args"] = [filled(argument, local) for argument in args]
    if "kwargs" in found or kwargs:
        found["kwargs"] = {key: filled(argument, local) for key, argument in kwargs.items()}
    if found.get("returns"):
        found["returns"] = [renamed[name] for name in partitioned.returned]
    if "mutates" in found:
        slots = {name: slot for slot, name in partitioned.names.items()}
        found["mutates"] = [local[slots[name]] for name in found["mutates"]]
    return found
