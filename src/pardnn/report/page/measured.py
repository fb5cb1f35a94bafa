"""Measurements next to predictions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy import ndarray

from pardnn.plan.run_record import RankTimes, RunRecord
from pardnn.report.page.contents import KindTimes, Measured, MeasuredRank
from pardnn.report.page.simulated import Simulated

#: Calls that are listed.
MOST_KINDS = 15


def measured_of(found: Simulated, record: RunRecord, runs: Sequence[ndarray]) -> Measured:
    """Return a run of a plan by bars, ranks and calls.

    Args:
        found: The plan, timed.
        record: Of this plan.
        runs: The ops of each bar.
    """
    number = {op.name: i for i, op in enumerate(found.graph.ops)}
    start, seconds = np.zeros(len(number)), np.zeros(len(number))
    for rank in record.ranks:
        ops = [number[name] for name in rank.op]
        start[ops], seconds[ops] = rank.start_s, rank.seconds
    finish = start + seconds
    begins = [float(start[run].min()) for run in runs]
    return Measured(
        ranks=tuple(map(_rank, record.ranks)),
        steps=min((len(rank.step_s) for rank in record.ranks), default=0),
        start_s=tuple(begins),
        seconds=tuple(
            float(finish[run].max()) - begin for run, begin in zip(runs, begins, strict=True)
        ),
        kinds=_kinds(found, seconds),
    )


def _rank(rank: RankTimes) -> MeasuredRank:
    return MeasuredRank(
        step_s=float(np.median(rank.step_s)) if rank.step_s else 0.0,
        busy_s=float(sum(rank.seconds)),
        waited_s=float(sum(rank.wait_s)),
        peak_bytes=rank.peak_bytes,
    )


def _kinds(found: Simulated, measured: ndarray) -> tuple[KindTimes, ...]:
    names: dict[str, int] = {}
    kind = np.array([names.setdefault(op.kind, len(names)) for op in found.graph.ops])
    columns = [
        np.bincount(kind, weights=weights).tolist()
        for weights in (np.ones(len(kind)), found.seconds, measured)
    ]
    rows = [
        KindTimes(kind=name, ops=int(ops), simulated_s=simulated, measured_s=real)
        for name, ops, simulated, real in zip(names, *columns, strict=True)
    ]
    longest = sorted(rows, key=lambda row: (-max(row.simulated_s, row.measured_s), row.kind))
    return tuple(longest[:MOST_KINDS])
