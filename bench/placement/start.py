"""Planning from an earlier plan beside planning anew: how fast, how good, how much is kept.

`python -m bench start [NAMES]` writes `bench/results/<date>_start.md`. Each graph is planned for
four devices; then, from that plan and anew, for the same, a tighter limit, a device less and twice
as many devices.
"""

from __future__ import annotations

import argparse
import datetime
import time
from collections.abc import Iterator, Sequence
from statistics import geometric_mean
from typing import NamedTuple

import numpy as np

from bench.common import RESULTS
from pardnn.cluster import Cluster
from pardnn.errors import InfeasibleError
from pardnn.graph.ir import Graph
from pardnn.plan.plan import Plan
from pardnn.planner.costs import costs_for
from pardnn.planner.make_plan import make_plan
from pardnn.planner.options import PlanOptions
from pardnn.planner.problem import Problem
from testbed.kept_graphs import load

NAMES = ("wresnet_152_10", "rnn_4_8k", "word_rnn_2", "char_crn", "gpt2")
DEVICES, COSTS = 4, "v100"
COLUMNS = (
    "graph", "case", "step: started", "anew", "started / anew", "planning: started", "anew",
    "kept: started", "anew",
)  # fmt: skip
#: Of the largest peak of the earlier plan.
TIGHTER = 0.9


class Row(NamedTuple):
    """One case: makespans and CPU times in seconds; parts of the ops known before that stay."""

    name: str
    case: str
    started_s: float
    anew_s: float
    started_cpu_s: float
    anew_cpu_s: float
    started_kept: float
    anew_kept: float


def _planned(graph: Graph, cluster: Cluster, start: Plan | None) -> tuple[Plan, float, float]:
    """Return a plan, its makespan, and the CPU seconds that it took."""
    begin = time.process_time()
    algorithm = "auto-whole" if start is None else "auto"
    options = PlanOptions(algorithm=algorithm, costs=COSTS, reserve=0.0)
    costs = costs_for(graph, cluster, COSTS)
    problem = Problem(graph, cluster, costs, options, start=start)
    plan, result = make_plan(problem)
    return plan, result.makespan_s, time.process_time() - begin


def _kept(plan: Plan, start: Plan, devices: int) -> float:
    """Return the part of the ops that both plans have, on devices that both have, that stay."""
    there = {op: at for op, at in start.placement.items() if at < devices}
    pairs = [(at, plan.placement[op]) for op, at in there.items() if op in plan.placement]
    return float(np.mean([a == b for a, b in pairs])) if pairs else 1.0


def rows_of(name: str) -> Iterator[Row]:
    """Yield the cases of a graph."""
    graph, cluster = load(name), Cluster.uniform(DEVICES)
    start = _planned(graph, cluster, None)[0]
    assert start.predicted is not None
    limit = int(TIGHTER * max(start.predicted.peak_bytes))
    cases = {
        "the same": cluster,
        f"a limit of {TIGHTER:g} of its peak": Cluster.uniform(DEVICES, memory=limit),
        "a device less": Cluster.uniform(DEVICES - 1),
        "twice the devices": Cluster.uniform(2 * DEVICES),
    }
    for case, now in cases.items():
        try:
            found = [_planned(graph, now, start), _planned(graph, now, None)]
        except InfeasibleError:
            continue
        (first, started_s, started_cpu_s), (second, anew_s, anew_cpu_s) = found
        kept = [_kept(plan, start, now.num_devices) for plan in (first, second)]
        yield Row(name, case, started_s, anew_s, started_cpu_s, anew_cpu_s, kept[0], kept[1])


def page(rows: Sequence[Row], date: str, names: Sequence[str]) -> str:
    """Return the page.

    Args:
        rows: All cases.
        date: Of the run.
        names: Of the graphs, as given.
    """
    lines = [
        f"# Planning from an earlier plan, {date}",
        "",
        f"`python -m bench start {' '.join(names)}`; costs of {COSTS}.",
        "",
        f"Each graph has a plan by `auto-whole` for {DEVICES} devices without limits. From it,",
        "`--start` plans for other devices or limits, beside `auto-whole` from nothing. Steps are",
        "simulated, in s; planning is processor time in s, after a first plan that loads the",
        "kernels. Kept is the part of the ops, of those on devices that are still there, that stay",
        "where the earlier plan had them.",
        "",
        f"| {' | '.join(COLUMNS)} |",
        "| --- " * len(COLUMNS) + "|",
    ]
    lines += [
        f"| {row.name} | {row.case} | {row.started_s:.6g} | {row.anew_s:.6g} "
        f"| {row.started_s / row.anew_s:.4f} | {row.started_cpu_s:.2f} | {row.anew_cpu_s:.2f} "
        f"| {row.started_kept:.1%} | {row.anew_kept:.1%} |"
        for row in rows
    ]
    lines += [
        "", "| case | step: geometric mean | worst | planning: geometric mean | graphs |",
        "| --- " * 5 + "|",
    ]  # fmt: skip
    for case in dict.fromkeys(row.case for row in rows):
        here = [row for row in rows if row.case == case]
        steps = [row.started_s / row.anew_s for row in here]
        spent = [row.started_cpu_s / row.anew_cpu_s for row in here]
        means = [geometric_mean(each) for each in (steps, spent)]
        lines.append(
            f"| {case} | {means[0]:.4f} | {max(steps):.4f} | {means[1]:.2f} | {len(here)} |"
        )
    return "\n".join([*lines, ""])


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(prog="python -m bench start")
    parser.add_argument("names", nargs="*", default=NAMES, help="of kept graphs")
    names = parser.parse_args(arguments).names
    rows: list[Row] = []
    for name in names:
        for row in rows_of(name):
            print(row, flush=True)
            rows.append(row)
    date = datetime.date.today().isoformat()
    (RESULTS / f"{date}_start.md").write_text(page(rows, date, names))


if __name__ == "__main__":
    main()
