"""Placement: quality, steps, gaps, memory, topologies and time, as one dated page.

`python -m bench placement` takes about two minutes on an idle core, `--full` about twelve. Both
write `bench/results/<date>_placement.md`, `.json` and a chart; `--name` changes the last part.
Families, sizes, CCR and numbers of devices make too many rows to run them all: of each size
`--rows` are drawn by the seed, every family in turn, every CCR and number of devices as often as
the others; 0 is all of them. `--large` and `--large-rows` say the same of the part on recurrent
grids, wide branches and fork-join graphs, where `auto` is compared with plain HEFT. Makespans are
simulated, planning times are wall seconds after the kernels are compiled. With `--parts`
only these parts run, and the others are kept from the page of the same date and name: so a long run
can be done in pieces.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import itertools
import json
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bench.common import CHARTS, RESULTS, write_chart
from bench.placement.memory import captured_cases, feasibility, memory_case
from bench.placement.page import page, picture
from bench.placement.parts import ablation, gaps, memory_sweep, topologies
from pardnn.cluster import Cluster
from pardnn.cost.costs import graph_costs
from pardnn.errors import PardnnError
from pardnn.graph.file import read_graph
from pardnn.graph.ir import Graph
from pardnn.planner.algorithms import ALGORITHMS, algorithms_to_try
from pardnn.planner.make_plan import make_plan
from pardnn.planner.options import PlanOptions
from pardnn.planner.problem import Problem
from pardnn.planner.search.portfolio import decide, decide_best
from pardnn.sim.bounds import lower_bound_seconds
from pardnn.sim.levels import bottom_levels
from pardnn.sim.machine import machine_of
from testbed import GRAPHS
from testbed.families import FAMILIES, family_graph

#: Compared by default; those that need a solver are named on the command line.
COLUMNS = tuple(name for name in ALGORITHMS if name not in ("m-sct", "metis", "exact"))
#: What `measured` finds, by part.
PARTS = {
    "quality": ("rows",), "large": ("large",), "ablation": ("ablation",), "gaps": ("gaps",),
    "limits": ("limits",),
    "memory": ("memory",), "topologies": ("topologies",), "scale": ("scale",),
}  # fmt: skip
#: Of the part on large graphs.
LARGE = ("fork-join", "recurrent", "branches")
SHORT = {
    "ops": "300", "rows": "14", "devices": "4,16", "ccr": "0.1,1,10", "scale": "1000,10000",
    "gaps": 16, "graphs_with_limits": 50, "sweeps": 3, "sweep_steps": 8, "large": "300",
    "large_rows": "6",
}  # fmt: skip
FULL = {
    "ops": "1000,5000,20000", "rows": "14,7,3", "devices": "2,4,16,64", "ccr": "0.1,1,10",
    "scale": "1000,10000,100000", "gaps": 200, "graphs_with_limits": 500, "sweeps": 8,
    "sweep_steps": 12, "large": "5000,20000", "large_rows": "0,6",
}  # fmt: skip


def measure(graph: Graph, num_devices: int, names: tuple[str, ...], seed: int) -> dict[str, Any]:
    """Plan one graph with every algorithm.

    Args:
        graph: What is planned.
        num_devices: Equal ones, without limits.
        names: Of the algorithms.
        seed: Of the algorithms that draw.
    """
    cluster, costs = Cluster.uniform(num_devices), graph_costs(graph)
    row: dict[str, Any] = {"graph": graph.name, "ops": len(graph.ops), "devices": num_devices}
    row["by"] = {}
    for name in names:
        try:
            problem = Problem(
                graph, cluster, costs, PlanOptions(algorithm=name, reserve=0.0, seed=seed)
            )
            _, result = make_plan(problem)
        except PardnnError as error:
            row["by"][name] = {"error": str(error)}
            continue
        row["lower_bound_s"], row["ccr"] = result.lower_bound_s, result.ccr
        row["by"][name] = {"makespan_s": result.makespan_s, "planning_s": result.planning_s}
    return row


def sampled(options: argparse.Namespace) -> list[tuple[str, int, float, int]]:
    """Return the rows to run: family, ops, CCR, devices."""
    families = list(filter(None, options.families.split(",")))
    ccrs = [float(c) for c in options.ccr.split(",")]
    devices = [int(k) for k in options.devices.split(",")]
    found = []
    sizes, counts = options.ops.split(","), options.rows.split(",")
    for size, count in zip(sizes, counts * len(sizes), strict=False):
        pairs = list(itertools.product(ccrs, devices))
        if count == "0":
            found += [(family, int(size), *pair) for family in families for pair in pairs]
            continue
        turn = np.random.default_rng([options.seed, int(size)]).permutation(len(pairs))
        cycle = math.lcm(len(families), len(pairs))
        for i in range(int(count)):
            pair = pairs[turn[(i + i // cycle) % len(pairs)]]
            found.append((families[i % len(families)], int(size), *pair))
    return found


def quality(options: argparse.Namespace, names: tuple[str, ...]) -> list[dict[str, Any]]:
    """Plan the rows that were drawn, and the graphs that are named."""
    rows = []
    for family, ops, ccr, k in sampled(options):
        graph = family_graph(family, ops, ccr=ccr, seed=options.seed)
        row = measure(graph, k, names, options.seed)
        rows.append(row | {"family": family, "target_ccr": ccr})
        told(f"{graph.name}, K = {k}")
    for path in options.graphs:
        graph = read_graph(path)
        for k in map(int, options.devices.split(",")):
            row = measure(graph, k, names, options.seed)
            rows.append(row | {"family": graph.name, "target_ccr": round(row["ccr"], 2)})
    return rows


def large(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Plan graphs of the families in `LARGE` by `auto` and by plain HEFT.

    Their plans are simulated, and not verified: at 64 devices that takes longer than planning. The
    solvers that `auto` asks last are left out.
    """
    chosen = vars(options) | {
        "families": ",".join(LARGE), "ops": options.large, "rows": options.large_rows
    }  # fmt: skip
    rows = []
    for family, ops, ccr, k in sampled(argparse.Namespace(**chosen)):
        graph = family_graph(family, ops, ccr=ccr, seed=options.seed)
        cluster, costs = Cluster.uniform(k), graph_costs(graph)
        bound = lower_bound_seconds(graph.arrays, machine_of(costs, cluster))
        problem = Problem(graph, cluster, costs, PlanOptions(reserve=0.0, seed=options.seed))
        heft = decide(problem, "heft")
        names = algorithms_to_try("auto", len(graph.ops))
        auto = decide_best(problem, names, polish=True)
        rows.append({
            "graph": graph.name, "ops": len(graph.ops), "devices": k, "lower_bound_s": bound,
            "family": family, "target_ccr": ccr,
            "by": {name: {"makespan_s": found.makespan_s, "planning_s": found.planning_s}
                   for name, found in (("auto", auto), ("heft", heft))},
        })  # fmt: skip
        told(f"{graph.name}, K = {k}: {auto.makespan_s / heft.makespan_s:.3f}")
    return rows


def told(what: str) -> None:
    """Say on stderr how far the run is, with the CPU seconds so far, of solvers too."""
    print(f"{cpu_seconds():7.0f} s  {what}", file=sys.stderr, flush=True)


def cpu_seconds() -> float:
    """Return the user seconds of this process and of the solvers it has asked."""
    times = os.times()
    return times.user + times.children_user


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
        problem = Problem(
            graph, cluster, costs, PlanOptions(algorithm="pardnn", reserve=0.0, seed=seed)
        )
        _, result = make_plan(problem)
        rows.append({"ops": size, "planning_s": result.planning_s, "bottom_level_pass_s": one_pass})
    return rows


def parsed(arguments: list[str]) -> argparse.Namespace:
    """Return the options; those of the short or the full run where nothing is said."""
    parser = argparse.ArgumentParser(prog="python -m bench placement", description=__doc__)
    parser.add_argument("graphs", nargs="*", type=Path, help="graph files, beside the families")
    parser.add_argument(
        "--full", action="store_true", help="larger graphs, more devices, more of everything"
    )
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--algorithms", default=",".join(["auto", *COLUMNS]))
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--name", default="placement")
    parser.add_argument("--seed", type=int, default=0)
    for name, value in SHORT.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=None)
    options = parser.parse_args(arguments)
    for name, value in (FULL if options.full else SHORT).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    return options


def limits_kept(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Plan random graphs and captured ones under rising limits."""
    cases = [memory_case(i, options.seed) for i in range(options.graphs_with_limits)]
    cases += captured_cases(GRAPHS)
    return [feasibility(case, turn) for turn, case in enumerate(cases)]


def measured(options: argparse.Namespace) -> dict[str, Any]:
    """Run all parts that are asked for."""
    names, parts = tuple(options.algorithms.split(",")), options.parts.split(",")
    seed, size = options.seed, int(options.ops.split(",")[0])
    unlike = ["auto", "pardnn", "heft", "m-etf", "contiguous", "linear-clustering", "metis"]

    def part(name: str, run: Callable[[], Any]) -> Any:
        found = run() if name in parts else []
        told(name)
        return found

    def steps() -> list[dict[str, Any]]:
        ratios = itertools.product(FAMILIES, (1.0, 10.0))
        graphs = [family_graph(family, size, ccr=ccr, seed=seed) for family, ccr in ratios]
        return ablation(graphs, [8], seed)

    return {
        "algorithms": list(names),
        "rows": part("quality", lambda: quality(options, names)),
        "large": part("large", lambda: large(options)),
        "ablation": part("ablation", steps),
        "gaps": part("gaps", lambda: gaps(options.gaps, seed)),
        "limits": part("limits", lambda: limits_kept(options)),
        "memory": part(
            "memory", lambda: memory_sweep(options.sweeps, 120, options.sweep_steps, seed)
        ),
        "topologies": part("topologies", lambda: topologies(size, unlike, seed)),
        "scale": part("scale", lambda: scale_curve([*map(int, options.scale.split(","))], seed)),
    }


def revision() -> str:
    """Return the revision of the code that runs; nothing outside a repository."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, cwd=RESULTS.parent, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def merged(report: dict[str, Any], run: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return the report with the parts that did not run now, and the runs that made them.

    Args:
        report: What was measured now.
        run: Command, revision, parts and CPU seconds of this run.
        path: Of the day's JSON; it need not exist.
    """
    old = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    missing = set(PARTS) - set(run["parts"])
    kept = [old_run | {"parts": [part for part in old_run["parts"] if part in missing]}
            for old_run in old.get("runs", [])]  # fmt: skip
    kept = [old_run for old_run in kept if old_run["parts"]]
    for part in (part for old_run in kept for part in old_run["parts"]):
        report |= {key: old[key] for key in PARTS[part]}
        if part == "quality":
            report["algorithms"] = old["algorithms"]
    return report | {"runs": [*kept, run]}


def main(arguments: list[str] | None = None) -> None:
    """Measure and write the page."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parsed(arguments)
    started = cpu_seconds()
    date = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    stem = RESULTS / f"{date}_{options.name}"
    report: dict[str, Any] = {
        "date": date,
        "seed": options.seed,
        "machine": f"{platform.machine()}, Python {platform.python_version()}, numba "
        f"{importlib.metadata.version('numba')}",
        "picture": f"{CHARTS}/{stem.name}.svg",
        **measured(options),
    }
    run = {"command": " ".join(["python -m bench placement", *arguments]), "revision": revision(),
           "parts": options.parts.split(","), "cpu_seconds": cpu_seconds() - started}  # fmt: skip
    report = merged(report, run, stem.with_suffix(".json"))
    RESULTS.mkdir(exist_ok=True)
    stem.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    write_chart(picture(report), RESULTS, stem.name)
    stem.with_suffix(".md").write_text(page(report), encoding="utf-8")
    print(page(report))


if __name__ == "__main__":
    main()
