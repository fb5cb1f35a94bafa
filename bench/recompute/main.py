"""Second calls of ops under a limit, beside CP-SAT: `python -m bench recompute [FOLDER]`.

Of each graph of a folder, or of made-up ones, steps on one device under 0.9 and 0.8 of the bytes
that their own order takes: seconds of second calls as a part of the step, by our search and by
CP-SAT within a time of its own (`--seconds`), started from our answer. Then a sweep: 50 limits from
that peak down to the smallest one that is reached; no answer may exceed its limit, and none may be
slower than one under a smaller limit. Prints a page, or writes it (`-o`).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bench.recompute.cp_sat import solved
from pardnn.graph.file import read_graph
from pardnn.graph.ir import Graph
from pardnn.place.ordering.least_peak import least_peak_positions
from pardnn.place.ordering.low_memory_orders import eager_free_positions, file_positions
from pardnn.place.recompute.problem import Nodes, nodes_of
from pardnn.place.recompute.retention import cost_of, empty_schedule
from pardnn.place.recompute.search import retention
from testbed.recompute_graphs import random_layers, unet_step

#: Parts of the peak of the given order that the step is to fit.
PARTS = (0.9, 0.8)
#: Limits of a sweep.
LIMITS = 50


class Case(NamedTuple):
    """A graph in its own order, in one that frees early and in one of least peak."""

    name: str
    orders: list[Nodes]
    peak: int  # of its own order, without second calls
    total: float  # seconds of one call of each op


def case_of(graph: Graph) -> Case:
    """Return what a graph is on one device."""
    seconds = np.array([(op.seconds or {}).get("accelerator", 0.0) for op in graph.ops])
    of = (file_positions, eager_free_positions, least_peak_positions)
    positions = {each.tobytes(): each for each in (order(graph.arrays) for order in of)}
    orders = [nodes_of(graph, np.argsort(each), seconds) for each in positions.values()]
    n = len(graph.ops)
    peak = cost_of(orders[0], np.full(n, n), 0, empty_schedule(orders[0])).peak
    return Case(graph.name, orders, peak, float(seconds.sum()))


def ours(case: Case, limit: int) -> tuple[float, int] | None:
    """Return seconds of second calls and peak of our best answer over all orders."""
    found = [cost for nodes in case.orders if (cost := retention(nodes, limit)[1]).peak <= limit]
    return min(((cost.seconds, cost.peak) for cost in found), default=None)


def swept(case: Case) -> str:
    """Return how many limits of a sweep are reached; how many answers exceed them or are slower."""
    reached, over, slower, before = 0, 0, 0, float("inf")
    for limit in np.linspace(0.3 * case.peak, case.peak, LIMITS).astype(int).tolist():
        found = ours(case, limit)
        if found is None:
            slower += before < float("inf")
            continue
        reached += 1
        over += found[1] > limit
        slower += found[0] > before
        before = found[0]
    return f"{reached} of {LIMITS} | {over} | {slower}"


def rows_of(case: Case, seconds: float, workers: int) -> Iterator[str]:
    """Yield a row for each limit.

    Args:
        case: The graph.
        seconds: For CP-SAT; 0 for none.
        workers: Threads of CP-SAT.
    """
    for part in PARTS:
        limit, nodes = int(part * case.peak), case.orders[0]
        begin = time.process_time()
        nearest, best = retention(nodes, limit), ours(case, limit)
        own = nearest if nearest[1].peak <= limit else None
        taken = time.process_time() - begin
        cells = [case.name, f"{len(nodes.seconds):,}", f"{part:g}"]
        cells += [_percent(own and own[1].seconds, case), _percent(best and best[0], case)]
        cells += [f"{taken:.1f}"]
        if seconds:
            schedule = empty_schedule(nodes)
            if own is not None:
                cost_of(nodes, own[0], limit, schedule)
            start = None if own is None else (own[0], schedule.stage)
            found = solved(nodes, limit, start=start, seconds=seconds, workers=workers)
            cells += [_percent(found.seconds, case), _percent(found.bound, case)]
            above = ""
            if own is not None and found.seconds is not None:
                more = (case.total + own[1].seconds) / (case.total + found.seconds) - 1
                above = f"{more:+.2%}"
            cells.append(above)
        yield "| " + " | ".join(cells) + " |"


def _percent(seconds: float | None, case: Case) -> str:
    return "none" if seconds is None else f"{seconds / case.total:.3%}"


def main(arguments: list[str] | None = None) -> None:
    """Print or write the page."""
    parser = argparse.ArgumentParser(prog="python -m bench recompute", description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, help="of graph files; else made-up ones")
    parser.add_argument("--seconds", type=float, default=60.0, help="for CP-SAT, per row; 0: none")
    parser.add_argument("--workers", type=int, default=4, help="threads of CP-SAT")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args(sys.argv[2:] if arguments is None else arguments)
    if options.folder:
        graphs = [read_graph(path) for path in sorted(options.folder.glob("*.json*"))]
    else:
        graphs = [unet_step(4), unet_step(6), random_layers(100), random_layers(400)]
    retention(case_of(unet_step(2)).orders[0], 1, work=1)  # compiles the kernels
    columns = ["graph", "ops", "limit", "its order", "best order", "CPU s"]
    columns += ["CP-SAT", "its bound", "above it"] if options.seconds else []
    lines = [f"| {' | '.join(columns)} |", "| --- " * len(columns) + "|"]
    sweep = ["| graph | limits reached | over the limit | slower than a smaller one |",
             "| --- | --- | --- | --- |"]  # fmt: skip
    for graph in graphs:
        case = case_of(graph)
        for row in rows_of(case, options.seconds, options.workers):
            lines.append(row)
            print(row, flush=True)
        sweep.append(f"| {case.name} | {swept(case)} |")
        print(sweep[-1], flush=True)
    if options.output:
        options.output.write_text("\n".join([*lines, "", *sweep, ""]), encoding="utf-8")


if __name__ == "__main__":
    main()
