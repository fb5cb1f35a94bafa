"""The timeline as columns: ops and messages, or runs of them if there are too many to draw.

Runs join neighbours of one track, phase and piece that start in the same slice of time, so that a
million ops become at most `MOST_BARS` bars and the picture stays the same to a pixel.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from jaxtyping import Bool, Float64, Int64
from numpy import ndarray

from pardnn.report.page.contents import Bars, LinkRow, Messages
from pardnn.report.page.simulated import Simulated
from pardnn.sim.waits import COMPUTE, MESSAGE, ORDER, Causes, Stretch

#: Ops, and messages, that are drawn one by one; above, runs.
MOST_BARS = 20_000
#: Runs per track at least, where there are many tracks.
LEAST_SLICES = 32


class Critical:
    """Which ops and messages fill the time of the critical path, and for how long."""

    def __init__(self, found: Simulated, stretches: Iterable[Stretch]) -> None:
        """Take the chain from the end of a step back to second 0."""
        self.op_s = np.zeros(len(found.graph.ops))
        self.message_s = np.zeros(len(found.arrays.message_tensor))
        self.order_s = 0.0
        for stretch in stretches:
            seconds = stretch.finish - stretch.start
            if stretch.what == COMPUTE:
                self.op_s[stretch.number] += seconds
            elif stretch.what == MESSAGE:
                self.message_s[stretch.number] += seconds
            else:
                self.order_s += seconds


def runs_of(
    track: Int64[ndarray, " n"],
    key: Int64[ndarray, " n"],
    start: Float64[ndarray, " n"],
    end: float,
    is_alone: Bool[ndarray, " n"],
) -> list[ndarray]:
    """Return groups that are drawn as one bar, each in order of time; of one item if there are few.

    Args:
        track: On which each is drawn.
        key: Only items with equal keys are joined.
        start: Seconds.
        end: Of the step, seconds.
        is_alone: Items that are never joined with others.
    """
    if len(track) <= MOST_BARS:
        return [np.array([i]) for i in range(len(track))]
    tracks = len(np.unique(track))
    slices = max(LEAST_SLICES, MOST_BARS // (2 * max(tracks, 1)))
    number = np.minimum((start / max(end, 1e-300) * slices).astype(np.int64), slices - 1)
    order = np.lexsort((start, is_alone, key, number, track))
    rows = np.stack([track, number, key, is_alone.astype(np.int64)])[:, order]
    changes = np.flatnonzero((np.diff(rows) != 0).any(axis=0)) + 1
    return np.split(order, changes)


def _texts(values: Sequence[str | None]) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return each text as a number, and the texts by number."""
    rows: dict[str, int] = {}
    numbers = tuple(rows.setdefault(value or "", len(rows)) for value in values)
    return numbers, tuple(rows)


def op_runs(found: Simulated, critical: Critical) -> list[ndarray]:
    """Return the ops of each bar.

    Args:
        found: The plan, timed.
        critical: Its critical path.
    """
    line, ops = found.timeline, found.graph.ops
    key = found.phase * (found.piece.max(initial=0) + 2) + found.piece + 1
    is_critical = critical.op_s > 0
    drawn = np.arange(len(ops)) if len(ops) <= MOST_BARS else np.flatnonzero(found.seconds > 0)
    runs = runs_of(
        found.arrays.place[drawn], key[drawn], line.start[drawn], line.makespan, is_critical[drawn]
    )
    return [drawn[run] for run in runs]


def bars_of(found: Simulated, critical: Critical, causes: Causes, runs: Sequence[ndarray]) -> Bars:
    """Return the ops as columns.

    Args:
        found: The plan, timed.
        critical: Its critical path.
        causes: Why ops start when they do.
        runs: From `op_runs`.
    """
    line, ops = found.timeline, found.graph.ops
    is_critical, seconds = critical.op_s > 0, found.seconds
    longest = np.array([run[seconds[run].argmax()] for run in runs], dtype=np.int64)
    start = np.array([line.start[run].min() for run in runs])
    finish = np.array([line.finish[run].max() for run in runs])
    shown = [ops[i] for i in longest.tolist()]
    kind, kinds = _texts([op.kind for op in shown])
    module, modules = _texts([op.module for op in shown])
    source, sources = _texts([op.source for op in shown])
    is_whole = len(runs) == len(ops)
    return Bars(
        name=tuple(op.name for op in shown),
        kind=kind, module=module, source=source,
        device=tuple(found.arrays.place[longest].tolist()),
        start_s=tuple(start.tolist()),
        seconds=tuple((finish - start).tolist()),
        phase=tuple(found.phase[longest].tolist()),
        piece=tuple(found.piece[longest].tolist()),
        count=tuple(len(run) for run in runs),
        critical=tuple(is_critical[longest].astype(int).tolist()),
        waits_for=_waits_for(causes) if is_whole else (None,) * len(runs),
        kinds=kinds, modules=modules, sources=sources,
    )  # fmt: skip


def _waits_for(causes: Causes) -> tuple[int | None, ...]:
    """Return what each op waits for; only useful if every op is a bar."""
    pairs = zip(causes.op_what.tolist(), causes.op_from.tolist(), strict=True)
    kept = len(causes.message_from) <= MOST_BARS
    return tuple(
        origin if what in (COMPUTE, ORDER) else -1 - origin if what == MESSAGE and kept else None
        for what, origin in pairs
    )


def messages_of(found: Simulated, critical: Critical) -> Messages:
    """Return the messages as columns.

    Args:
        found: The plan, timed.
        critical: Its critical path.
    """
    arrays, line, size = found.arrays, found.timeline, found.message_bytes
    track = arrays.message_source * arrays.num_devices + arrays.message_target
    is_critical = critical.message_s > 0
    runs = runs_of(track, track, line.message_start, line.makespan, is_critical)
    largest = np.array([run[size[run].argmax()] for run in runs], dtype=np.int64)
    start = np.array([line.message_start[run].min() for run in runs])
    finish = np.array([line.message_finish[run].max() for run in runs])
    name = [tensor.name for op in found.graph.ops for tensor in op.outputs]
    return Messages(
        tensor=tuple(name[i] for i in arrays.message_tensor[largest].tolist()),
        source=tuple(arrays.message_source[largest].tolist()),
        target=tuple(arrays.message_target[largest].tolist()),
        bytes=tuple(int(size[run].sum()) for run in runs),
        start_s=tuple(start.tolist()),
        seconds=tuple((finish - start).tolist()),
        count=tuple(len(run) for run in runs),
        critical=tuple(is_critical[largest].astype(int).tolist()),
    )


def links_of(found: Simulated, critical: Critical) -> tuple[LinkRow, ...]:
    """Return what each device sends to each other one, most bytes first."""
    arrays, line, k = found.arrays, found.timeline, found.arrays.num_devices
    pair = arrays.message_source * k + arrays.message_target
    seconds = line.message_finish - line.message_start
    used, number = np.unique(pair, return_inverse=True)
    sums = [
        np.bincount(number, weights=weights, minlength=len(used))
        for weights in (np.ones(len(pair)), found.message_bytes, seconds, critical.message_s)
    ]
    rows = [
        LinkRow(
            source=both // k, target=both % k, messages=int(count), bytes=int(size),
            seconds=took, critical_s=on_path,
        )
        for both, count, size, took, on_path in zip(
            used.tolist(), *(each.tolist() for each in sums), strict=True
        )
    ]  # fmt: skip
    return tuple(sorted(rows, key=lambda row: (-row.bytes, row.source, row.target)))
