"""Which layer should be made smaller: the same plan with a layer half as large, simulated.

Half as large: its ops take half of their seconds, and its tensors (parameters, optimizer states,
gradients, activations, workspace) half of their bytes, so that its messages are shorter, too.
Placement and order stay, so a new plan may gain more; what other layers make from the layer's
results keeps its size. It is a prediction that says where to look first.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from jaxtyping import Bool
from numpy import ndarray

from pardnn.explain.case import Case, layer_seconds
from pardnn.explain.memory import Memory, state_bytes
from pardnn.graph.csr import frozen
from pardnn.graph.layers import NO_LAYER, block_of
from pardnn.report.explained import LayerRow, LayersExplained
from pardnn.sim.engine import run_lists
from pardnn.sim.peak import peaks
from pardnn.sim.timeline import Timeline


def explain_layer(case: Case, name: str, ops: Iterable[int]) -> LayersExplained:
    """Explain one layer: time, bytes, devices, and what half of it would bring.

    Args:
        case: The plan.
        name: Of the layer.
        ops: Its ops.
    """
    inside = np.zeros(len(case.planned.ops), dtype=bool)
    inside[list(ops)] = True
    return _explained(case, "layer", [_row(case, Memory(case), name, inside)])


def explain_layers(case: Case) -> LayersExplained:
    """Explain all blocks, sorted by the time, then the bytes, that halving them saves."""
    memory = Memory(case)
    blocks = np.array([block_of(layer) for layer in case.layers], dtype=object)
    names = dict.fromkeys(blocks.tolist())
    rows = [_row(case, memory, name or NO_LAYER, blocks == name) for name in names]
    rows.sort(key=lambda row: (row.half_change_s, max(row.half_peak_bytes)))
    return _explained(case, "layers", rows)


def _explained(case: Case, subject: str, rows: list[LayerRow]) -> LayersExplained:
    return LayersExplained(
        subject=subject,  # pyright: ignore[reportArgumentType]
        devices=tuple(case.devices),
        makespan_s=case.timeline.makespan,
        peak_bytes=case.peak_bytes,
        usable_bytes=tuple(case.usable),
        rows=tuple(rows),
        notes=case.notes,
    )


def _row(case: Case, memory: Memory, name: str, inside: Bool[ndarray, " n"]) -> LayerRow:
    line, held = halved(case, inside)
    a, arrays = case.planned.arrays, case.arrays
    sent = inside[a.tensor_op[arrays.message_tensor]]
    return LayerRow(
        name=name,
        ops=int(inside.sum()),
        seconds=tuple(layer_seconds(case, inside).tolist()),
        held_bytes=tuple(_held(memory, device, inside) for device in range(len(case.devices))),
        state_bytes=state_bytes(case, inside.tolist()),
        sent_bytes=int(a.tensor_bytes[arrays.message_tensor[sent]].sum()),
        half_makespan_s=line.makespan,
        half_change_s=line.makespan - case.timeline.makespan,
        half_peak_bytes=held,
    )


def halved(case: Case, inside: Bool[ndarray, " n"]) -> tuple[Timeline, tuple[int, ...]]:
    """Return timeline and peaks of the same plan with some ops and their tensors half as large.

    Args:
        case: The plan.
        inside: Whether each op is.
    """
    a = case.planned.arrays
    sizes = np.where(inside[a.tensor_op], a.tensor_bytes // 2, a.tensor_bytes)
    space = np.where(inside, a.workspace // 2, a.workspace)
    smaller = a._replace(tensor_bytes=frozen(sizes), workspace=frozen(space))
    seconds = np.where(inside, case.machine.seconds / 2, case.machine.seconds)
    machine = case.machine._replace(seconds=np.ascontiguousarray(seconds))
    line = run_lists(smaller, machine, case.arrays)
    return line, tuple(peaks(smaller, case.arrays).tolist())


def _held(memory: Memory, device: int, inside: Bool[ndarray, " n"]) -> int:
    """Return what some ops hold at a device's peak."""
    case, at = memory.case, memory.peak_at[device]
    if at < 0:
        return 0
    maker = case.planned.arrays.tensor_op
    live = (s for s in memory.storages[device] if memory.is_live(device, s))
    number = memory.rows[device][at]
    space = int(case.planned.arrays.workspace[number]) if inside[number] else 0
    return space + sum(s.bytes for s in live if inside[maker[s.tensor]])
