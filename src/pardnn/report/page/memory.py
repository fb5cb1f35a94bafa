"""Memory along each device's order, by kind: what the proof of the peak adds up."""

from __future__ import annotations

import numpy as np
from jaxtyping import Int64
from numpy import ndarray

from pardnn.graph.ir import Graph, Op
from pardnn.graph.storage_kinds import storage_kinds
from pardnn.plan.memory import Storages, all_storages
from pardnn.plan.plan import order_rows
from pardnn.report.page.contents import KINDS, Held, MemoryChart
from pardnn.report.page.simulated import Simulated

#: Points of all charts together, and of one at least and at most.
POINTS, LEAST_POINTS, MOST_POINTS = 8000, 40, 1000
#: Storages that are listed at each peak.
MOST_LIVE = 20
TRANSFERS, WORKSPACE = KINDS.index("transfers"), KINDS.index("workspace")


def memory_charts(found: Simulated) -> tuple[MemoryChart, ...]:
    """Return a chart per device. O(ops + storages), and the points."""
    storages = all_storages(found.graph, found.arrays)
    kind = _kinds(found.graph, storages)
    points = min(MOST_POINTS, max(LEAST_POINTS, POINTS // max(found.arrays.num_devices, 1)))
    ends = np.searchsorted(storages.device, np.arange(found.arrays.num_devices + 1)).tolist()
    charts: list[MemoryChart] = []
    for device, row in enumerate(order_rows(found.arrays)):
        own = slice(ends[device], ends[device + 1])
        mine = Storages(*(column[own] for column in storages))
        charts.append(_chart(found, np.array(row, dtype=np.int64), mine, kind[own], points))
    return tuple(charts)


def _kinds(graph: Graph, storages: Storages) -> Int64[ndarray, " s"]:
    """Return the kind of each storage, as a row of `KINDS`."""
    kinds = np.array([KINDS.index(each) for each in storage_kinds(graph)], dtype=np.int64)
    kind = kinds[storages.tensor]
    kind[storages.message >= 0] = TRANSFERS
    return kind


def _chart(
    found: Simulated,
    row: Int64[ndarray, " p"],
    storages: Storages,
    kind: Int64[ndarray, " s"],
    points: int,
) -> MemoryChart:
    length = len(row)
    if not length:
        return MemoryChart(position=(), op=(), held=(), peak_at=0, live=(), others_bytes=0)
    change = np.zeros((len(KINDS), length + 1), dtype=np.int64)
    np.add.at(change, (kind, np.maximum(storages.allocated, 0)), storages.bytes)
    is_freed = storages.released >= 0
    gone = (kind[is_freed], storages.released[is_freed] + 1)
    np.subtract.at(change, gone, storages.bytes[is_freed])
    held = np.cumsum(change, axis=1)[:, :length]
    held[WORKSPACE] += found.graph.arrays.workspace[row]
    total = held.sum(axis=0)
    shown = _worst(total, points)
    peak = int(total.argmax())
    live, others = _live_at(found, row, storages, kind, peak)
    return MemoryChart(
        position=tuple(shown.tolist()),
        op=tuple(found.graph.ops[i].name for i in row[shown].tolist()),
        held=tuple(map(tuple, held[:, shown].tolist())),
        peak_at=int(np.searchsorted(shown, peak)),
        live=live,
        others_bytes=others,
    )


def _worst(total: Int64[ndarray, " p"], points: int) -> Int64[ndarray, " q"]:
    """Return the first position of the largest total within each of some equal parts."""
    if len(total) <= points:
        return np.arange(len(total))
    begins = np.unique(np.linspace(0, len(total), points, endpoint=False).astype(np.int64))
    parts = np.split(total, begins[1:])
    return begins + np.array([int(part.argmax()) for part in parts])


def _live_at(
    found: Simulated,
    row: Int64[ndarray, " p"],
    storages: Storages,
    kind: Int64[ndarray, " s"],
    at: int,
) -> tuple[tuple[Held, ...], int]:
    """Return the largest storages that are live at a position, and the bytes of the others."""
    is_live = (storages.allocated <= at) & ((storages.released < 0) | (storages.released >= at))
    live = np.flatnonzero(is_live & (storages.bytes > 0))
    live = live[np.lexsort((live, -storages.bytes[live]))]
    listed, ops = live[:MOST_LIVE], found.graph.ops
    rows = zip(
        storages.tensor[listed].tolist(), storages.bytes[listed].tolist(),
        kind[listed].tolist(), storages.released[listed].tolist(),
        strict=True,
    )  # fmt: skip
    first = found.graph.arrays.output_ptr
    held: list[Held] = []
    for tensor, size, which, released in rows:
        producer = int(found.graph.arrays.tensor_op[tensor])
        maker: Op = ops[producer]
        held.append(
            Held(
                tensor=maker.outputs[tensor - int(first[producer])].name,
                bytes=size,
                kind=KINDS[which],
                made_by=maker.name,
                freed_after=None if released < 0 else ops[int(row[released])].name,
            )
        )
    return tuple(held), int(storages.bytes[live[MOST_LIVE:]].sum())
