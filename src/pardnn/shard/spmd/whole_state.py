"""Notes on parameters and states that a plan keeps whole because an op cannot be cut.

Problem: one update without a description keeps a parameter and its states whole on every device,
which defeats the purpose of the plan, 1/k of the memory, and no number of the plan says why.
Idea: a tensor that is written in place, or viewed in such a storage, has to be used where it is
owned. An op that does so and has no loop that cuts the tensor is the reason.
Complexity: O(ops + tensors).
"""

from __future__ import annotations

from collections.abc import Iterator

from pardnn.errors import PardnnError, shown
from pardnn.graph.ir import Op, writes
from pardnn.plan.state_layout import STATE_KINDS
from pardnn.shard.aten.lookup import description_of
from pardnn.shard.aten.without import reason_without
from pardnn.shard.boxes import whole
from pardnn.shard.partition.call import bind_call, call_of
from pardnn.shard.partition.strategy import Cut, strategies
from pardnn.shard.spmd.emitter import Emitter
from pardnn.units import bytes_text

#: Names in a note; more are counted.
NAMED = 3


def whole_state_notes(emitter: Emitter) -> list[str]:
    """Return a note for each operator that keeps parameters, buffers or states whole.

    Tensors that are whole by choice, or too short to be cut, have none.
    """
    left = {op.outputs[0].name: op for op in emitter.graph.ops if _is_whole(emitter, op)}
    found: dict[str, tuple[Op, list[str]]] = {}
    for op in emitter.graph.ops if left else ():
        if op.is_source or "." not in op.kind or op.kind.startswith("scalar."):
            continue
        for name in _kept(emitter, op):
            owner = emitter.owners[name]
            if owner in left and not _may_cut(emitter, op, name):
                del left[owner]
                found.setdefault(op.kind, (op, []))[1].append(str(owner))
    return [_note(emitter, op, names) for op, names in found.values()]


def _is_whole(emitter: Emitter, op: Op) -> bool:
    """Whether a source is whole on every device although it is long enough to be cut."""
    if op.kind not in STATE_KINDS:
        return False
    (tensor,) = op.outputs
    shape = tensor.shape or ()
    is_long = max(shape, default=0) >= emitter.mesh.size > 1
    return is_long and all(box == whole(shape) for box in emitter.boxes[tensor.name])


def _kept(emitter: Emitter, op: Op) -> Iterator[str]:
    """Yield the tensors that an op must use where they are owned."""
    changed = writes(op)
    viewed = {emitter.owners[tensor.name] for tensor in op.outputs} & emitter.written
    for name in op.inputs:
        if name in changed or emitter.owners[name] in viewed:
            yield name


def _may_cut(emitter: Emitter, op: Op, name: str) -> bool:
    """Whether some loop of an op cuts a tensor that it reads."""
    description = description_of(op.kind)
    if description is None:
        return False
    try:
        call = call_of(op, emitter.tensors)
        slots = [slot for slot, of in bind_call(description, call).names.items() if of == name]
        found = strategies(call)
    except PardnnError:
        return False
    return any(isinstance(s.inputs[slot], Cut) for s in found for slot in slots)


def _note(emitter: Emitter, op: Op, names: list[str]) -> str:
    size = sum(emitter.tensors[name].bytes for name in names)
    ordered = sorted(names, key=lambda name: -emitter.tensors[name].bytes)
    listed = ", ".join(map(shown, ordered[:NAMED]))
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    why = "cannot be cut along their dims"
    if description_of(op.kind) is None:
        why = f"has no description ({reason_without(op.kind) or 'see pardnn.describe'})"
    return (
        f"whole on every device, {bytes_text(size)} of parameters and states: {listed}{more}; "
        f"{op.kind} at {op.source or 'an unknown line'} changes them in place and {why}"
    )
