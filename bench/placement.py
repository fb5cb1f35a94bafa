"""Placement: quality, gaps and time of every algorithm, as one dated page of Markdown and JSON.

`python -m bench.placement [GRAPH.json ...] [--ops N] [--devices 4,16] [--ccr 0.1,1,10]` writes
`bench/results/<date>_placement.md` and `.json`. Makespans are those of the judge, gaps are
makespan / lower bound - 1, planning times are wall seconds on one core after the kernels are
compiled. `base` is plain HEFT under its own order.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import math
import platform
import sys
import time
from pathlib import Path
from typing import Any

from bench.families import FAMILIES, family_graph
from pardnn.api.algorithms import ALGORITHMS
from pardnn.api.planning import make_plan
from pardnn.cluster import Cluster
from pardnn.cost.costs import graph_costs
from pardnn.errors import PardnnError
from pardnn.graph.file import read_graph
from pardnn.graph.ir import Graph
from pardnn.sim.levels import bottom_levels
from pardnn.sim.machine import machine_of

RESULTS = Path(__file__).parent / "results"
#: Compared by default; those that need a solver are named on the command line.
COLUMNS = tuple(name for name in ALGORITHMS if name not in ("m-sct", "metis", "exact"))
BASE = "heft"


def measure(graph: Graph, num_devices: int, names: tuple[str, ...], seed: int) -> dict[str, Any]:
    """Plan one graph with every algorithm."""
    cluster, costs = Cluster.uniform(num_devices), graph_costs(graph)
    row: dict[str, Any] = {"graph": graph.name, "ops": len(graph.ops), "devices": num_devices}
    row["by"] = {}
    for name in names:
        try:
            _, result = make_plan(graph, cluster, costs, algorithm=name, reserve=0.0, seed=seed)
        except PardnnError as error:
            row["by"][name] = {"error": str(error)}
            continue
        row["lower_bound_s"], row["ccr"] = result.lower_bound_s, result.ccr
        row["by"][name] = {"makespan_s": result.makespan_s, "planning_s": result.planning_s}
    return row


def scale_curve(sizes: list[int], seed: int) -> list[dict[str, Any]]:
    """Plan layered graphs of growing size by `pardnn`, beside one bottom-level pass over each."""
    rows = []
    for size in sizes:
        graph = family_graph("layered", size, ccr=1.0, seed=seed)
        cluster, costs = Cluster.uniform(16), graph_costs(graph)
        machine = machine_of(costs, cluster)
        bottom_levels(graph.arrays, machine)
        started = time.perf_counter()
        for _ in range(5):
            bottom_levels(graph.arrays, machine)
        one_pass = (time.perf_counter() - started) / 5
        _, result = make_plan(graph, cluster, costs, algorithm="pardnn", reserve=0.0, seed=seed)
        rows.append({"ops": size, "planning_s": result.planning_s, "bottom_level_pass_s": one_pass})
    return rows


def mean_ratio(rows: list[dict[str, Any]], name: str, base: str | None) -> float | None:
    """Return the geometric mean of makespan / base, or / lower bound; None if a run is missing."""
    logs = []
    for row in rows:
        found = row["by"][name]
        below = row["by"][base]["makespan_s"] if base else row["lower_bound_s"]
        if "error" in found:
            return None
        logs.append(math.log(found["makespan_s"] / below))
    return math.exp(sum(logs) / len(logs)) if logs else None


def page(report: dict[str, Any]) -> str:
    """Return the results as Markdown."""
    rows, names = report["rows"], report["algorithms"]
    lines = [
        f"# Placement, {report['date']}",
        "",
        f"`{report['command']}`, seed {report['seed']}; {report['machine']}.",
        "",
        "Makespan / lower bound of each algorithm; the last row is the geometric mean of",
        f"makespan / that of plain `{BASE}` under its own order. An empty cell: no plan.",
        "",
        "| graph | ops | K | CCR | bound, s | " + " | ".join(names) + " |",
        "| --- | --- | --- | --- | --- |" + " --- |" * len(names),
    ]
    for row in rows:
        bound = row["lower_bound_s"]
        cells = [
            f"{found['makespan_s'] / bound:.3f}" if "makespan_s" in found else ""
            for found in (row["by"][name] for name in names)
        ]
        head = [row["graph"], row["ops"], row["devices"], f"{row['ccr']:.2f}", f"{bound:.4f}"]
        lines.append("| " + " | ".join(map(str, [*head, *cells])) + " |")
    for label, base in (("geometric mean", None), (f"/ {BASE}", BASE)):
        means = [mean_ratio(rows, name, base) for name in names]
        cells = ["" if mean is None else f"{mean:.3f}" for mean in means]
        lines.append(f"| {label} | | | | | " + " | ".join(cells) + " |")
    lines += ["", "Seconds of planning, the sum over the table:", ""]
    for name in names:
        spent = sum(row["by"][name].get("planning_s", 0.0) for row in rows)
        lines.append(f"- `{name}`: {spent:.2f}")
    lines += _where_baselines_win(rows, names)
    lines += ["", "Time of `pardnn` against size, layered graphs, K = 16:", ""]
    lines += [
        "| ops | planning, s | one bottom-level pass, s | ratio |",
        "| --- | --- | --- | --- |",
    ]
    lines += [
        f"| {r['ops']} | {r['planning_s']:.3f} | {r['bottom_level_pass_s']:.5f} | "
        f"{r['planning_s'] / r['bottom_level_pass_s']:.0f} |"
        for r in report["scale"]
    ]
    return "\n".join(lines) + "\n"


def _where_baselines_win(rows: list[dict[str, Any]], names: list[str]) -> list[str]:
    """List the graphs on which a baseline beats `pardnn` alone, and any that beats `auto`."""
    lines = []
    for ours in ("pardnn", "auto"):
        wins = []
        for row in rows:
            times = {
                name: row["by"][name]["makespan_s"]
                for name in names
                if name not in ("auto", "pardnn") and "makespan_s" in row["by"][name]
            }
            best = min(times, key=times.__getitem__)
            ratio = row["by"][ours].get("makespan_s", math.inf) / times[best]
            if ratio > 1 + 1e-9:
                wins.append(f"- {row['graph']}, K = {row['devices']}: `{best}`, by {ratio:.3f}")
        lines += ["", f"A baseline is faster than `{ours}` on {len(wins)} of {len(rows)}:", *wins]
    return lines


def main(arguments: list[str] | None = None) -> None:
    """Measure and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("graphs", nargs="*", type=Path, help="graph files, beside the families")
    parser.add_argument("--ops", type=int, default=2000)
    parser.add_argument("--devices", default="4,16")
    parser.add_argument("--ccr", default="0.1,1,10")
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--algorithms", default=",".join(["auto", *COLUMNS]))
    parser.add_argument("--scale", default="1000,10000,100000")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    names = options.algorithms.split(",")
    graphs = [
        family_graph(family, options.ops, ccr=float(ccr), seed=options.seed)
        for family in filter(None, options.families.split(","))
        for ccr in options.ccr.split(",")
    ]
    graphs += [read_graph(path) for path in options.graphs]
    report: dict[str, Any] = {
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "command": " ".join(["python -m bench.placement", *(arguments or sys.argv[1:])]),
        "seed": options.seed,
        "machine": f"{platform.machine()}, Python {platform.python_version()}, numba "
        f"{importlib.metadata.version('numba')}",
        "algorithms": names,
        "rows": [
            measure(graph, int(k), tuple(names), options.seed)
            for graph in graphs
            for k in options.devices.split(",")
        ],
        "scale": scale_curve([int(size) for size in options.scale.split(",")], options.seed),
    }
    RESULTS.mkdir(exist_ok=True)
    stem = RESULTS / f"{report['date']}_placement"
    stem.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    stem.with_suffix(".md").write_text(page(report), encoding="utf-8")
    print(page(report))


if __name__ == "__main__":
    main()
