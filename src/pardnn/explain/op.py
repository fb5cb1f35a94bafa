"""Why an op or a tensor is where it is: its waits, its memory, and what other decisions cost."""

from __future__ import annotations

import numpy as np

from pardnn.explain.case import Case
from pardnn.explain.cuts import other_cuts
from pardnn.explain.memory import Memory, device_memory
from pardnn.explain.moved import judged_each, moves
from pardnn.explain.subjects import Subject
from pardnn.explain.submeshes import Mixed, mixed_of, on_submesh, together
from pardnn.explain.waiting import chain_of, waits_of, why_then
from pardnn.graph.ir import Op, Tensor
from pardnn.graph.layers import block_of, origin
from pardnn.report.explained import (
    Alternative,
    Call,
    DeviceExplained,
    LayerSeconds,
    OpExplained,
    Sent,
    TensorExplained,
)

#: Calls of one op, and ops that move with it, that are listed: a step in 64 pieces has 64.
LISTED = 8


def explain_op(case: Case, subject: Subject) -> OpExplained:
    """Explain an op of the graph, or of what the plan made of it.

    Args:
        case: The plan.
        subject: Which.
    """
    op = _op(case, subject.name, subject.ops)
    a = case.planned.arrays
    tensors = [t for i in subject.ops for t in range(a.output_ptr[i], a.output_ptr[i + 1])]
    return OpExplained(
        name=subject.name,
        kind=op.kind,
        layer=case.layers[subject.ops[0]],
        source=op.source,
        calls=tuple(_call(case, i) for i in subject.ops[:LISTED]),
        num_calls=len(subject.ops),
        moves_with=_moves_with(case, subject.ops),
        constraints=tuple(str(each.constraint) for each in case.constraints_on(subject.ops)),
        memory=Memory(case).of_tensors(tensors),
        layouts={t.name: case.layouts[t.name] for t in op.outputs if t.name in case.layouts},
        alternatives=_alternatives(case, subject, [t.name for t in op.outputs]),
        makespan_s=case.timeline.makespan,
        peak_bytes=case.peak_bytes,
        notes=case.notes,
    )


def explain_tensor(case: Case, subject: Subject) -> TensorExplained:
    """Explain a tensor of the graph, or of what the plan made of it.

    Args:
        case: The plan.
        subject: Which; its ops are those that make it.
    """
    op = _op(case, subject.name, subject.ops)
    tensor = next(t for t in _outputs(case, subject) if _is_named(t.name, subject.name))
    numbers = {name: i for i, name in enumerate(case.tensor_names)}
    ours = [numbers[t.name] for t in _outputs(case, subject) if _is_named(t.name, subject.name)]
    whole = next((t for t in op.outputs if t.name == subject.name), tensor)
    lies = subject.name if whole is not tensor else subject.name.rpartition("@")[0]
    return TensorExplained(
        name=subject.name,
        bytes=whole.bytes,
        shape=whole.shape,
        dtype=whole.dtype,
        made_by=op.name,
        layer=case.layers[subject.ops[0]],
        source=op.source,
        layout=case.layouts.get(lies),
        memory=Memory(case).of_tensors(ours),
        messages=_messages(case, set(ours)),
        alternatives=_alternatives(case, subject, [lies]),
        makespan_s=case.timeline.makespan,
        peak_bytes=case.peak_bytes,
        notes=case.notes,
    )


def explain_device(case: Case, device: int) -> DeviceExplained:
    """Explain what a device does, what it waits for, and what it holds.

    Args:
        case: The plan.
        device: Its number.
    """
    begin, end = case.arrays.order_ptr[device : device + 2].tolist()
    sums: dict[str, float] = {}
    for op in case.arrays.order_op[begin:end].tolist():
        layer = block_of(case.layers[op])
        sums[layer] = sums.get(layer, 0.0) + float(case.seconds[op])
    busy = float(case.timeline.busy(case.arrays.place, case.plan.num_devices)[device])
    by_time = sorted(sums.items(), key=lambda each: (-each[1], each[0]))
    return DeviceExplained(
        name=case.devices[device],
        makespan_s=case.timeline.makespan,
        busy_s=busy,
        idle_s=max(case.timeline.makespan - busy, 0.0),  # a sum of parts may round up
        ops=end - begin,
        layers=tuple(LayerSeconds(layer=name, seconds=seconds) for name, seconds in by_time),
        waits=waits_of(case, device),
        memory=device_memory(Memory(case), device),
        notes=case.notes,
    )


def _alternatives(case: Case, subject: Subject, tensors: list[str]) -> tuple[Alternative, ...]:
    """Evaluate what the plan could have done with an op or tensor instead."""
    mixed = mixed_of(case)
    if mixed is not None:
        return *_submeshes(case, mixed, subject.ops), *other_cuts(case, tensors, mixed)
    if case.plan.partition is not None:
        return other_cuts(case, tensors)
    return moves(case, subject.ops)


def _submeshes(case: Case, mixed: Mixed, ops: tuple[int, ...]) -> tuple[Alternative, ...]:
    """Evaluate some local ops, and all that must be with them, on other submeshes."""
    goes, size = together(mixed, ops), mixed.made.partition.mesh.size
    places = {
        f"on {', '.join(case.devices[at * size : (at + 1) * size])}": on_submesh(mixed, goes, at)
        for at in range(mixed.made.partition.submeshes)
        if (mixed.row[goes] != at).any()
    }
    return judged_each(case, places)


def _op(case: Case, name: str, ops: tuple[int, ...]) -> Op:
    """Return the op of the graph that is meant; that of the planned graph if there is none."""
    whole = {op.name: op for op in case.graph.ops}
    planned = case.planned.ops[ops[0]]
    return whole.get(name) or whole.get(origin(planned.name)) or planned


def _is_named(tensor: str, name: str) -> bool:
    return tensor == name or origin(tensor) == name


def _outputs(case: Case, subject: Subject) -> list[Tensor]:
    return [tensor for i in subject.ops for tensor in case.planned.ops[i].outputs]


def _call(case: Case, op: int) -> Call:
    return Call(
        op=case.planned.ops[op].name,
        device=case.devices[int(case.arrays.place[op])],
        start_s=float(case.timeline.start[op]),
        finish_s=float(case.timeline.finish[op]),
        chain=chain_of(case, op),
    )


def _moves_with(case: Case, ops: tuple[int, ...]) -> tuple[str, ...]:
    """Return the other ops that have to be on the same device."""
    mixed = mixed_of(case)
    if mixed is not None:
        asked = {mixed.made.of[i] for i in ops}
        goes = np.flatnonzero(together(mixed, ops)).tolist()
        return tuple(mixed.graph.ops[i].name for i in goes if i not in asked)
    if case.plan.partition is not None:
        return ()
    groups = set(case.groups[list(ops)].tolist())
    return tuple(
        op.name
        for i, op in enumerate(case.planned.ops)
        if int(case.groups[i]) in groups and i not in ops
    )


def _messages(case: Case, tensors: set[int]) -> tuple[Sent, ...]:
    arrays, line = case.arrays, case.timeline
    return tuple(
        Sent(
            tensor=case.tensor_names[tensor],
            source=case.devices[int(arrays.message_source[i])],
            target=case.devices[int(arrays.message_target[i])],
            bytes=int(case.planned.arrays.tensor_bytes[tensor]),
            start_s=float(line.message_start[i]),
            finish_s=float(line.message_finish[i]),
            why=why_then(case, i),
        )
        for i, tensor in enumerate(arrays.message_tensor.tolist())
        if tensor in tensors
    )
