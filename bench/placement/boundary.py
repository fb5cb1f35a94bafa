"""The least limit at which each algorithm still finds a plan, beside what no plan can do without.

`python -m bench limits [--graphs 24]` bisects the limit of equal devices, for the random graphs of
the placement page's memory part and K from 2 to 4, and writes `bench/results/<date>_limits.md`
and `.json`. The placement page asks whether a plan is found where packing grants that there is
one; here is where each algorithm gives up, above or below that.

It takes for granted that an algorithm which finds a plan finds one with more memory, too.

- *Bound*: what errors say that no plan can do without (`place/infeasible.py`).
- *Packing*: the least limit that packing the residual groups, largest first, grants.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from bench.common import RESULTS
from bench.placement.memory import Case, memory_case, packs
from pardnn.cluster import Cluster
from pardnn.errors import InfeasibleError
from pardnn.place.colocation import closed_arrays
from pardnn.planner.make_plan import make_plan
from pardnn.planner.options import PlanOptions
from pardnn.planner.problem import Problem
from pardnn.sim.peak import least_bytes, one_device_peak, residual_bytes

ALGORITHMS = ("pardnn", "pardnn-thesis", "heft", "m-etf", "contiguous")
#: The limit is found to this share of itself.
CLOSE = 0.01

Row = dict[str, Any]

_HEAD = """\
`{command}`; {machine}. {graphs} random graphs of 20 to 100 ops, training steps and mixed ones in
turn, on 2 to 4 equal devices, no reserve; limits to {close:.0%}. *Over the bound*: the least limit
over what no plan can do without, which need not be enough for any plan. *Packing* is the least
limit that packing residual groups grants, what the placement page holds planners to.
"""
_COLUMNS = (
    "algorithm", "over the bound, geometric mean", "worst", "within 2 %",
    "less than packing grants", "none up to one device's peak",
)  # fmt: skip


def least(is_enough: Callable[[int], bool], low: int, high: int) -> int | None:
    """Return the least limit that is enough, to `CLOSE`; None if `high` is not.

    Args:
        is_enough: Asked for limits between the two.
        low: Not enough.
        high: The largest that is tried.
    """
    if not is_enough(high):
        return None
    while high - low > CLOSE * high:
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high


def boundary_row(case: Case, algorithms: Sequence[str] = ALGORITHMS) -> Row:
    """Return the bound, what packing grants, and the least limit of each algorithm, in bytes."""
    graph, k = case.graph, case.devices
    arrays = closed_arrays(graph)
    groups, peak = residual_bytes(arrays), one_device_peak(graph.arrays)
    bound = least_bytes(arrays, k)
    transient = peak - int(groups.sum())
    row: Row = {"graph": graph.name, "kind": case.kind, "devices": k, "bound": bound}
    row["packing"] = least(lambda limit: packs(groups, limit - transient, k), bound - 1, peak)
    for algorithm in algorithms:
        row[algorithm] = least(lambda limit, a=algorithm: _fits(case, a, limit), bound - 1, peak)
    return row


def _fits(case: Case, algorithm: str, limit: int) -> bool:
    cluster = Cluster.uniform(case.devices, memory=limit)
    options = PlanOptions(algorithm=algorithm, reserve=0.0)
    try:
        make_plan(Problem(case.graph, cluster, case.costs, options))
    except InfeasibleError:
        return False
    return True


def page(report: Row) -> str:
    """Return the results as Markdown; every figure comes from the JSON."""
    rows, names = report["rows"], ("packing", *report["algorithms"])
    lines = [f"# The least limits at which plans are found, {report['date']}\n"]
    lines += [_HEAD.format(**report, graphs=len(rows), close=CLOSE)]
    lines += ["| " + " | ".join(_COLUMNS) + " |", "| --- " * len(_COLUMNS) + "|"]
    for name in names:
        found = [row for row in rows if row[name] is not None]
        over = [row[name] / row["bound"] for row in found]
        below = sum(row[name] < row["packing"] * (1 - CLOSE) for row in found if row["packing"])
        lines.append(
            f"| {name} | {geometric_mean(over):.3f} | {max(over):.3f} | "
            f"{sum(ratio <= 1.02 for ratio in over)} | {below if name != 'packing' else ''} | "
            f"{len(rows) - len(found)} |"
        )
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write the page."""
    parser = argparse.ArgumentParser(prog="python -m bench limits", description=__doc__)
    parser.add_argument("--graphs", type=int, default=24)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    rows = [boundary_row(memory_case(number, seed=0)) for number in range(options.graphs)]
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    report: Row = {
        "date": today, "command": f"python -m bench limits --graphs {options.graphs}",
        "machine": f"{platform.machine()}, Python {platform.python_version()}",
        "algorithms": list(ALGORITHMS), "rows": rows,
    }  # fmt: skip
    path = options.output / f"{today}_limits.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    path.with_suffix(".md").write_text(page(report), encoding="utf-8")
    print(path.with_suffix(".md"))


if __name__ == "__main__":
    main()
