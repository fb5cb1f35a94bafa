"""Rows of a benchmark, measured side by side: a process for each core.

A row's seconds of processor time are its own; what the cores share, such as memory bandwidth and
the last cache, makes them some percent longer than alone.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def measured(
    measure: Callable[..., Row], tasks: Sequence[tuple[str, ...]], jobs: int
) -> Iterator[Row]:
    """Yield the row of each task, in the order of the tasks, with the seconds that it took.

    Args:
        measure: A function of a module, called with the strings of a task. What it finds loaded,
            such as kernels, is loaded once: processes are forked.
        tasks: Of the rows.
        jobs: Processes; 1 measures in this one.
    """
    if jobs == 1:
        yield from (_timed(measure, task) for task in tasks)
        return
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("fork")) as pool:
        yield from pool.map(_timed, [measure] * len(tasks), tasks)


def write_page(
    measure: Callable[..., Row],
    tasks: Sequence[tuple[str, ...]],
    page: Callable[[Sequence[Row], int], str],
    jobs: int,
    output: Path | None,
) -> None:
    """Measure rows, and write or print their page; a run that is stopped leaves what it has.

    Args:
        measure: See `measured`.
        tasks: Of the rows.
        page: Makes the page of the rows that there are, and the number of all.
        jobs: Processes.
        output: File of the page; None prints it.
    """
    rows: list[Row] = []
    for row in measured(measure, tasks, jobs):
        rows.append(row)
        if output is not None:
            output.write_text(page(rows, len(tasks)))
    if output is None:
        print(page(rows, len(tasks)))


def _timed(measure: Callable[..., Row], task: tuple[str, ...]) -> Row:
    wall, cpu = time.perf_counter(), time.process_time()
    row = measure(*task)
    return row | {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}


def cores() -> int:
    """Return the number of this machine's cores."""
    return os.cpu_count() or 1
