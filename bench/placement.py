"""Placement: quality, steps, gaps, memory, topologies and time, as one dated page.

`python -m bench placement` takes about two minutes on an idle core; `--full` takes hours. Both
write `bench/results/<date>_placement.md`, `.json` and `.svg`; `--name` changes the last part.
Makespans are those of the judge, planning times are wall seconds after the kernels are compiled.
`base` is plain HEFT under its own order. A part is left out with `--parts`.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import platform
import sys
import time
from pathlib import Path
from typing import Any

from bench.families import FAMILIES, family_graph
from bench.placement_page import page, picture
from bench.placement_parts import ablation, gaps, memory_sweep, topologies
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
PARTS = ("ablation", "gaps", "memory", "topologies", "scale")
SHORT = {
    "ops": "300", "devices": "4,16", "ccr": "0.1,1,10", "scale": "1000,10000",
    "gaps": 14, "sweeps": 3, "sweep_steps": 8,
}  # fmt: skip
FULL = {
    "ops": "1000,5000,20000", "devices": "2,4,16,64", "ccr": "0.1,1,10",
    "scale": "1000,10000,100000,1000000", "gaps": 300, "sweeps": 500, "sweep_steps": 12,
}  # fmt: skip


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


def quality(options: argparse.Namespace, names: tuple[str, ...]) -> list[dict[str, Any]]:
    """Plan every family at every size, CCR and number of devices, and the graphs that are named."""
    rows = []
    for ops in options.ops.split(","):
        for family in filter(None, options.families.split(",")):
            for ccr in options.ccr.split(","):
                graph = family_graph(family, int(ops), ccr=float(ccr), seed=options.seed)
                more = {"family": family, "wished_ccr": float(ccr)}
                rows += [
                    measure(graph, int(k), names, options.seed) | more
                    for k in options.devices.split(",")
                ]
    for path in options.graphs:
        graph = read_graph(path)
        for k in options.devices.split(","):
            row = measure(graph, int(k), names, options.seed)
            rows.append(row | {"family": graph.name, "wished_ccr": round(row["ccr"], 2)})
    return rows


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


def parsed(arguments: list[str]) -> argparse.Namespace:
    """Return the options; those of the short or the full run where nothing is said."""
    parser = argparse.ArgumentParser(prog="python -m bench placement", description=__doc__)
    parser.add_argument("graphs", nargs="*", type=Path, help="graph files, beside the families")
    parser.add_argument("--full", action="store_true", help="the whole table: hours")
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


def measured(options: argparse.Namespace) -> dict[str, Any]:
    """Run all parts that are asked for."""
    names, parts = tuple(options.algorithms.split(",")), options.parts.split(",")
    seed, size = options.seed, int(options.ops.split(",")[0])
    steps = [family_graph(f, size, ccr=c, seed=seed) for f in FAMILIES for c in (1.0, 10.0)]
    unlike = ["auto", "pardnn", "heft", "m-etf", "contiguous", "linear-clustering", "metis"]
    return {
        "algorithms": list(names),
        "rows": quality(options, names),
        "ablation": ablation(steps, [8], seed) if "ablation" in parts else [],
        "gaps": gaps(options.gaps, seed) if "gaps" in parts else [],
        "memory": memory_sweep(options.sweeps, 120, options.sweep_steps, seed)
        if "memory" in parts
        else [],
        "topologies": topologies(size, unlike, seed) if "topologies" in parts else [],
        "scale": scale_curve([int(n) for n in options.scale.split(",")], seed)
        if "scale" in parts
        else [],
    }


def main(arguments: list[str] | None = None) -> None:
    """Measure and write the page."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parsed(arguments)
    started = time.perf_counter()
    date = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    stem = RESULTS / f"{date}_{options.name}"
    report: dict[str, Any] = {
        "date": date,
        "command": " ".join(["python -m bench placement", *arguments]),
        "seed": options.seed,
        "machine": f"{platform.machine()}, Python {platform.python_version()}, numba "
        f"{importlib.metadata.version('numba')}",
        "picture": f"{stem.name}.svg",
        **measured(options),
        "seconds": time.perf_counter() - started,
    }
    RESULTS.mkdir(exist_ok=True)
    stem.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    stem.with_suffix(".svg").write_text(picture(report), encoding="utf-8")
    stem.with_suffix(".md").write_text(page(report), encoding="utf-8")
    print(page(report))


if __name__ == "__main__":
    main()
