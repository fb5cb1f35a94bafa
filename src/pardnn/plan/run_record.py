"""The run record, `pardnn.run/1`: what ranks measured of a plan's ops and messages.

Times are medians over the latest steps, the first one left out, as seconds from the start of a
rank's own step: clocks of ranks are not compared. On a CPU an op takes what its call takes; on a
GPU a call returns before its kernel has run, so that sums tell more than single ops.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from pardnn import files
from pardnn.cluster import STRICT
from pardnn.errors import MismatchError
from pardnn.plan.plan import Plan

#: Of a clock; at most 30 years, so that counts of nanoseconds and sums are finite.
Seconds = Annotated[float, Field(ge=0, le=1e9)]


@dataclass(frozen=True, kw_only=True)
class RankTimes:
    """What one rank measured.

    Attributes:
        step_s: Seconds of each step that the medians are of.
        peak_bytes: Largest number of live tensor bytes in the first step.
        op: Names of its ops, in the order in which it runs them.
        start_s: When each begins.
        seconds: How long each takes.
        tensor: What it waits for, in that order: to come, or, of what it sends, to have left.
        wait_start_s: When it begins to wait for each.
        wait_s: How long it waits.
    """

    __pydantic_config__ = STRICT

    step_s: tuple[Seconds, ...]
    peak_bytes: int
    op: tuple[str, ...]
    start_s: tuple[Seconds, ...]
    seconds: tuple[Seconds, ...]
    tensor: tuple[str, ...] = ()
    wait_start_s: tuple[Seconds, ...] = ()
    wait_s: tuple[Seconds, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """What all ranks of a run measured.

    Attributes:
        graph_fingerprint: Of the graph that ran.
        ranks: By number.
    """

    __pydantic_config__ = STRICT

    format: Literal["pardnn.run/1"] = "pardnn.run/1"
    graph_fingerprint: str | None = None
    ranks: tuple[RankTimes, ...]


def run_record(fingerprint: str | None, ranks: Sequence[Mapping[str, Any]]) -> RunRecord:
    """Return the record of what ranks have written as JSON.

    Args:
        fingerprint: Of the graph that ran.
        ranks: Fields of `RankTimes`, by rank.
    """
    data = {"format": RunRecord.format, "graph_fingerprint": fingerprint, "ranks": list(ranks)}
    return files.parse_as(RunRecord, files.dump_json(data), "what ranks measured")


def write_run(record: RunRecord, path: str | Path) -> None:
    """Write a run record."""
    files.write_bytes(path, files.dump_json(dataclasses.asdict(record)))


def read_run(path: str | Path, plan: Plan) -> RunRecord:
    """Read the record of a run of a plan.

    Args:
        path: Of the file.
        plan: What must have run.

    Raises:
        FileError: E403 to E407.
        MismatchError: E503, if another plan ran.
    """
    found = files.parse_as(RunRecord, files.read_bytes(path), f"run record {str(path)!r}")
    for rank in found.ranks:
        columns = (
            (rank.op, rank.start_s, rank.seconds),
            (rank.tensor, rank.wait_start_s, rank.wait_s),
        )
        if any(len({len(column) for column in group}) > 1 for group in columns):
            raise MismatchError(
                f"run record {str(path)!r}: columns of a rank have different lengths", code="E503"
            )
    if tuple(rank.op for rank in found.ranks) != plan.order:
        raise MismatchError(
            f"run record {str(path)!r} is not of this plan: ranks ran other ops.\n"
            "Give the plan that ran: pardnn run --plan plan.json --record run.json.",
            code="E503",
        )
    return found
