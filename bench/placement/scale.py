"""Scale: time of ParDNN against the size of the graph, step by step, as one dated page.

`python -m bench scale [--quick]` writes `bench/results/<date>_scale.md` and its chart. Graphs
are arrays, made here: no file is read and no name is looked at. Kernels are compiled by a small
graph of the same kind first. Seconds are processor time of one thread, so that other work on the
machine counts little; ratios are to one bottom-level pass over the same graph in the same process.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import os
import platform
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from bench.common import CHARTS, RESULTS, write_chart
from bench.common.charts import Line, lines_svg
from bench.placement import scale_files
from pardnn.errors import InfeasibleError
from pardnn.graph.csr import GraphArrays
from pardnn.place.pardnn.pardnn import place_arrays
from pardnn.sim.bounds import lower_bound_seconds
from pardnn.sim.engine import run_lists
from pardnn.sim.levels import bottom_levels
from pardnn.sim.machine import Machine
from pardnn.sim.peak import peaks
from testbed.large_graphs import DEVICES, Shape, chain, fan_in, fan_out, isolated, layered, problem

#: Share of the ops that a limit is to move, and by how much it may miss that.
MOVED, WITHIN = 0.08, 0.005
#: What every other device may hold, of the peak without limits: tried first, and the change of it
#: per change of the share that moves, as measured at 100,000 ops. Then at most so many more tries.
TIGHTNESS, STEP, MOST_TRIES = 0.33, 5.0, 4


#: Of the picture: name, and key of a row.
LINES = (("planning", "seconds"), ("planning under a limit", "tight"), ("one pass", "pass"))

#: Name, shape, ops, edges at most.
CASES: tuple[tuple[str, Callable[..., Shape], int, int], ...] = (
    ("layered", layered, 100_000, 200_000),
    ("layered", layered, 200_000, 309_000),
    ("layered", layered, 1_000_000, 2_000_000),
    ("chain", chain, 1_000_000, 0),
    ("fan-out", fan_out, 100_000, 0),
    ("fan-in", fan_in, 100_000, 0),
    ("isolated", isolated, 100_000, 0),
)


def timed(function: Callable[..., Any], *arguments: Any) -> tuple[Any, float]:
    """Return a result and its seconds of processor time."""
    begin = time.process_time()
    result = function(*arguments)
    return result, time.process_time() - begin


def measure(name: str, shape: Shape, seed: int, *, limited: bool) -> dict[str, Any]:
    """Plan one graph without limits, and under one that makes ops move if `limited`.

    Args:
        name: Of the row.
        shape: Ops and edges of the graph.
        seed: Of durations and bytes.
        limited: Whether to plan under a limit too.
    """
    arrays, machine = problem(shape, np.random.default_rng(seed))
    none = np.empty((0, 2), dtype=np.int64)
    free: list[int | None] = [None] * DEVICES
    decision, seconds = timed(place_arrays, arrays, machine, free, none)
    one_pass = min(timed(bottom_levels, arrays, machine)[1] for _ in range(5))
    bound, bound_s = timed(lower_bound_seconds, arrays, machine)
    row: dict[str, Any] = {
        "graph": name,
        "ops": arrays.num_ops,
        "edges": len(arrays.input_tensor),
        "seconds": seconds,
        "pass": one_pass,
        "steps": dict(decision.seconds_by_step),
        "gap": run_lists(arrays, machine, decision.plan).makespan / bound,
        "bound_s": bound_s,
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }
    if limited:
        row |= measure_limited(arrays, machine, int(peaks(arrays, decision.plan).max()))
    return row


def measure_limited(arrays: GraphArrays, machine: Machine, peak: int) -> dict[str, Any]:
    """Plan under the limit on every other device that moves `MOVED` of the ops, or nearly so.

    Args:
        arrays: The graph.
        machine: Its devices.
        peak: Bytes of a plan without limits.
    """
    row: dict[str, Any] = {}
    low, high, tightness = 0.0, 1.0, TIGHTNESS  # too tight, too loose, next
    for _ in range(1 + MOST_TRIES):
        limit = int(peak * tightness)
        limits = [limit if device % 2 else None for device in range(DEVICES)]
        none = np.empty((0, 2), dtype=np.int64)
        try:
            tight, seconds = timed(place_arrays, arrays, machine, limits, none)
        except InfeasibleError:
            low, tightness = tightness, (tightness + high) / 2
            continue
        off = tight.moved_ops / arrays.num_ops - MOVED
        if not row or abs(off) < abs(row["moved"] - MOVED):
            row = {"tight": seconds, "moved": off + MOVED, "tightness": tightness}
        if abs(off) <= WITHIN:
            break
        low, high = (tightness, high) if off > 0 else (low, tightness)
        target = tightness + STEP * off
        tightness = target if low < target < high else (low + high) / 2
    return row


STEPS = (
    "problem", "single", "heft", "slicing", "mapping", "refinement", "list_scheduling", "order",
)  # fmt: skip


def page(rows: list[dict[str, Any]], command: str) -> str:
    """Return the results as Markdown."""
    date = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    versions = f"Python {platform.python_version()}, numba {importlib.metadata.version('numba')}"
    head = (
        "graph | ops | edges | plan | one pass | ratio | limited | / plan | moved | limit | bound"
    )
    lines = [
        f"# Scale, {date}",
        "",
        f"`{command}`; {platform.machine()}, {versions}, {DEVICES} equal devices.",
        "",
        "Measured, kernels compiled: seconds of processor time on one thread, while other work",
        "shares the machine. `ratio` is to one bottom-level pass over the same graph in the same",
        "run; `memory` is the process's peak so far, in GiB; `gap` is makespan / lower bound, and",
        "`bound` the seconds that the bound itself takes. `limited` is the time of the whole plan",
        "when every other device may hold only `limit` of the peak without limits, `moved` the",
        f"share of ops that are then elsewhere: the limit is sought that moves {100 * MOVED:g} %.",
        f"Load average at the end: {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors.",
        "",
        f"| {head} | gap | memory |",
        "| --- |" + " --- |" * 12,
    ]
    for r in rows:
        tight = "" if "tight" not in r else f"{r['tight']:.2f}"
        times = "" if not tight else f"{r['tight'] / r['seconds']:.2f}"
        moved = " | " if not tight else f"{100 * r['moved']:.1f} % | {r['tightness']:.3f}"
        lines.append(
            f"| {r['graph']} | {r['ops']} | {r['edges']} | {r['seconds']:.2f} | {r['pass']:.4f} | "
            f"{r['seconds'] / r['pass']:.0f} | {tight} | {times} | {moved} | "
            f"{r['bound_s']:.2f} | {r['gap']:.3f} | {r['peak']:.2f} |"
        )
    lines += ["", "Seconds of each step, without limits (wall time, as the planner counts it):", ""]
    lines += [
        "| graph | ops | " + " | ".join(STEPS) + " |",
        "| --- | --- |" + " --- |" * len(STEPS),
    ]
    for r in rows:
        cells = " | ".join(f"{r['steps'].get(step, 0.0):.3f}" for step in STEPS)
        lines.append(f"| {r['graph']} | {r['ops']} | {cells} |")
    return "\n".join(lines) + "\n"


def picture(rows: list[dict[str, Any]]) -> str:
    """Return an SVG of the layered graphs' seconds against their ops."""
    shown = [row for row in rows if row["graph"] == "layered"]
    lines = [
        Line(name, {row["ops"]: row[key] for row in shown if key in row}, colour)
        for colour, (name, key) in enumerate(LINES)
    ]
    return lines_svg(
        "Time of ParDNN against the size of the graph",
        "layered graphs, processor seconds, measured",
        [line for line in lines if line.points],
        axes=("ops", "seconds"),
        base=10,
    )


def main(arguments: list[str] | None = None) -> None:
    """Measure and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tenth of the ops; prints alone")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--files", action="store_true", help="the whole command, from a file")
    options = parser.parse_args(arguments)
    if options.files:
        scale_files.main(quick=options.quick)
        return
    rng = np.random.default_rng(options.seed)
    for warm_up in (3_000, 60_000):  # below and above the sizes that change the algorithm
        measure("warm-up", layered(warm_up, 2 * warm_up, rng), options.seed, limited=True)
    rows = []
    for name, shape, ops, edges in CASES:
        scale = 10 if options.quick else 1
        made = shape(ops // scale, edges // scale, rng)
        rows.append(measure(name, made, options.seed, limited=name == "layered"))
        sys.stderr.write(f"{name} {ops // scale}: {rows[-1]['seconds']:.2f} s\n")
    text = page(rows, " ".join(["python -m bench scale", *(arguments or [])]))
    if not options.quick:
        date = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
        text += f"\n![seconds against ops]({CHARTS}/{date}_scale.svg)\n"
        (RESULTS / f"{date}_scale.md").write_text(text, encoding="utf-8")
        write_chart(picture(rows), RESULTS, f"{date}_scale")
    print(text)


if __name__ == "__main__":
    main()
