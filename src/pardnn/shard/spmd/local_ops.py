"""The devices' parts of one op: regions provided, arguments localised, results settled."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pardnn.errors import InvalidPlanError, shown
from pardnn.graph.ir import LOSS_KIND, Op, Tensor, writes
from pardnn.shard.aten.lookup import description_of
from pardnn.shard.boxes import is_dense, whole
from pardnn.shard.spmd.builder import At, Builder, Held, part
from pardnn.shard.spmd.multi_fetch import packed, provide
from pardnn.shard.spmd.spread_reduction import settle
from pardnn.shard.spmd.templates import Work, filled, misplaced, shared_input


def run(b: Builder, op: Op, work: Work) -> None:
    """Write the devices' parts of an op.

    Raises:
        InvalidPlanError: E410, if it writes what is not local.
    """
    name = misplaced(b, op, work)
    if name is not None:
        raise InvalidPlanError(
            f"op {shown(op.name)} ({op.source or op.kind}) shares the storage of {shown(name)}, "
            "which is changed in place, but would need a part of it that is elsewhere.\n"
            "Give all views of one storage the same blocks, or leave them and the op whole."
        )
    at = At(op, tuple([f"{op.name}@{device}" for device in b.devices]))
    local = _inputs(b, op, work, at)
    made = [_made(b, op, work, tensor) for tensor in op.outputs]
    for device in b.devices:
        if op.kind != LOSS_KIND or device == 0:
            _emit(b, op, work, device, local[device], made)
    raws = {output.raw.tensor.name: output.raw for output in made}
    for number, result in enumerate(work.returned):
        if result is None or raws[result].names == b.own(result).names:
            continue
        source = shared_input(b, op, b.tensors[result])
        is_view = source is not None and source in work.names.values() and all(
            f"{source}@{device}" in here.values() for device, here in enumerate(local)
        )  # fmt: skip
        shares = [share for share in work.template.shares[number] if share is not None]
        settle(b, raws[result], shares, at, is_view=is_view)


def _inputs(b: Builder, op: Op, work: Work, at: At) -> list[dict[str, str]]:
    """Return, per device, the local tensor in each slot."""
    local: list[dict[str, str]] = [{} for _ in b.devices]
    provided: dict[Any, list[str | None]] = {}
    is_loss = op.kind == LOSS_KIND
    for slot, name in work.names.items():
        own = b.own(name)
        if work.template.boxes[slot] == own.boxes and not is_loss:
            for here, found in zip(local, own.names, strict=True):
                here[slot] = str(found)
            continue
        wants = work.template.wants[slot]
        if is_loss:
            wants = (wants[0], *[None] * (len(wants) - 1))
        if (name, wants) not in provided:
            provided[name, wants] = provide(b, own, wants, at)
        for here, found in zip(local, provided[name, wants], strict=True):
            if found is not None:
                here[slot] = found
    if b.gaps and not _takes_gaps(op):
        _close_gaps(b, op, work, local, at)
    return local


def _takes_gaps(op: Op) -> bool:
    description = description_of(op.kind) if "." in op.kind else None
    return description is not None and description.takes_strided


def _close_gaps(b: Builder, op: Op, work: Work, local: Sequence[dict[str, str]], at: At) -> None:
    """Copy inputs that have gaps here and none in the graph, but for those that are changed."""
    changed = writes(op)
    for device, here in enumerate(local):
        if b.gaps.isdisjoint(here.values()):
            continue
        for slot, name in here.items():
            tensor, box = b.tensors[work.names[slot]], work.template.boxes[slot][device]
            if name not in b.gaps or tensor.name in changed or box is None:
                continue
            everything = whole(tensor.shape or ())
            if is_dense(tensor, everything, everything):
                here[slot] = packed(b, tensor, device, box, name, at)


class _Made(NamedTuple):
    """An output as the devices leave it, and the slot of the input whose storage it shares."""

    raw: Held
    alias: str | None


def _made(b: Builder, op: Op, work: Work, tensor: Tensor) -> _Made:
    source = shared_input(b, op, tensor)
    slot = None
    if source is not None:
        slot = next(slot for slot, name in work.names.items() if name == source)
    return _Made(_raw(b, work, tensor), slot)


def _raw(b: Builder, work: Work, tensor: Tensor) -> Held:
    """Return under which names the devices leave an output, and what that is of the whole."""
    own = b.own(tensor.name)
    if tensor.name not in work.returned:
        return own
    number = work.returned.index(tensor.name)
    boxes, is_partial = work.template.made[number], work.template.is_partial[number]
    if not is_partial and boxes == own.boxes:
        return own
    base = b.fresh(f"{tensor.name}:here")
    names = tuple(
        name if not is_partial and box == mine else f"{base}@{device}"
        for device, (name, box, mine) in enumerate(zip(own.names, boxes, own.boxes, strict=True))
    )
    return Held(tensor, names, boxes)


def _emit(
    b: Builder,
    op: Op,
    work: Work,
    device: int,
    local: Mapping[str, str],
    made: Sequence[_Made],
) -> None:
    outputs: list[Tensor] = []
    renamed: dict[str | None, str | None] = {None: None}
    for raw, slot in made:
        name, box = raw.names[device], raw.boxes[device]
        assert name is not None
        assert box is not None
        renamed[raw.tensor.name] = name
        alias = None if slot is None else local[slot]
        if alias in b.gaps:
            b.gaps.add(name)
        outputs.append(part(raw.tensor, name, box, alias))
    share = work.template.fractions[device]
    backward = op.backward_of and f"{op.backward_of}@{device}"
    b.emit(
        device,
        Op(
            name=f"{op.name}@{device}", kind=op.kind, inputs=tuple(dict.fromkeys(local.values())),
            after=b.after(op, device), outputs=tuple(outputs), memory=op.memory,
            seconds=op.seconds and {kind: s * share for kind, s in op.seconds.items()},
            workspace=math.ceil(op.workspace * share), source=op.source, module=op.module,
            backward_of=backward if backward in b.names else None, step=op.step,
            arguments=_arguments(op, work, device, local, renamed),
        ),
    )  # fmt: skip


def _arguments(
    op: Op,
    work: Work,
    device: int,
    local: Mapping[str, str],
    renamed: Mapping[str | None, str | None],
) -> dict[str, Any] | None:
    """Return the call on a device's parts, given its tensors by slot and by output."""
    if op.arguments is None:
        return None
    args, kwargs = work.template.arguments[device]
    found = dict(op.arguments)
    if "args" in found or args:
        found["args"] = [filled(form, local) for form in args]
    if "kwargs" in found or kwargs:
        found["kwargs"] = {key: filled(form, local) for key, form in kwargs.items()}
    if "returns" in found:
        found["returns"] = [renamed[name] for name in work.returned]
    if "mutates" in found:
        slots = {name: slot for slot, name in work.names.items()}
        found["mutates"] = [local[slots[name]] for name in found["mutates"]]
    return found
