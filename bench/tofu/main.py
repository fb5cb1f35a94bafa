"""Tofu's tables and figures again, in simulation: steps cut over 8 K80s, or placed on them.

`python -m bench tofu` reads the captured steps of `testbed/graphs/`, needs no framework, and writes
`bench/results/<date>_tofu.md`, `.json` and two pictures. 8 K80s of 12 GiB, 21 GB/s between any two,
roofline costs. Search seconds are measured here, in CPU seconds; all else is simulated.

- Figures 8 and 9: throughput relative to ideal, see `bench/tofu/models.py`.
- Figure 10: time of a step and the part of it that is communication: what the same plan takes more
  than over links that cost nothing. Memory is not enforced there, but reported.
- Figure 11: how the convolutions of WResNet-152-10 are cut, see `bench/tofu/figure_11.py`.
- Table 1: seconds of the search, without recursion up to a limit, see `bench/tofu/table_1.py`.

`--parts models,plans,figure-11,search` runs some parts only; what the day's JSON has of the others
stays. As many rows are measured side by side as there are cores, or `--jobs`; Table 1 after the
others, alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.common import RESULTS, write_chart
from bench.common.side_by_side import cores, measured
from bench.tofu import models
from bench.tofu.figure_11 import partition_rows
from bench.tofu.page import page, pictures
from bench.tofu.table_1 import search_row
from pardnn.cluster import Cluster, Rate
from pardnn.cost.costs import Costs, preset_costs
from pardnn.errors import PardnnError
from pardnn.graph.ir import Graph
from pardnn.plan.plan import PlanArrays
from pardnn.planner.algorithms import ALGORITHMS, SHARDED
from pardnn.planner.options import Objective, PlanOptions
from pardnn.planner.problem import Problem
from pardnn.planner.search.portfolio import decide
from pardnn.planner.sharded.decide import decide_sharded
from pardnn.planner.warm_up import warm_up
from pardnn.shard.search.tofu import find_sharding
from pardnn.sim.engine import simulate
from pardnn.sim.machine import machine_of
from pardnn.sim.peak import peaks
from testbed.kept_graphs import GRAPHS, TOFU_SIZES, load

PLANNED = ("rnn_4_8k", "wresnet_152_10")
#: Placements of whole ops, for comparison.
PLACED = ("layer-round-robin", "pardnn")
#: Of table 1, and two more.
SEARCHED = ("wresnet_152_10", "rnn_10_8k", "rnn_4_8k", "gpt2")
#: CPU seconds that the search without recursion gets.
LIMIT_S = 30
#: Of Fig. 11.
DRAWN = "wresnet_152_10"


def k80s(*, free: bool = False) -> Cluster:
    """Return 8 K80s without memory limits; `free`: links that cost nothing."""
    given = Cluster.preset("p2-k80")
    devices = tuple(dataclasses.replace(device, memory=None) for device in given.devices)
    rate = Rate(bandwidth=1e30, latency=0.0) if free else given.default_link
    return dataclasses.replace(given, devices=devices, default_link=rate)


def measure(name: str) -> dict[str, Any]:
    """Plan one graph by every algorithm."""
    graph = load(name)
    costs = preset_costs(graph, "k80")
    ideal = float(costs.seconds["accelerator"].sum()) / k80s().num_devices
    row: dict[str, Any] = {
        "graph": name,
        "ops": len(graph.ops),
        "batch": GRAPHS[name].batch_size,
        "ideal_s": ideal,
        "rows": [],
    }
    searches = [*((name, "bytes") for name in SHARDED), ("tofu", "seconds")]
    for algorithm, objective in searches:
        label = f"{algorithm}, {objective}"
        row["rows"].append(_tried(label, _sharded, graph, costs, algorithm, objective))
    for algorithm in PLACED:
        if algorithm in ALGORITHMS:
            row["rows"].append(_tried(f"{algorithm} (placement)", _placed, graph, costs, algorithm))
    return row


def _tried(label: str, plan: Callable[..., dict[str, Any]], *given: Any) -> dict[str, Any]:
    try:
        return {"algorithm": label} | plan(*given)
    except PardnnError as error:
        return {"algorithm": label, "error": str(error).splitlines()[0]}


def _sharded(graph: Graph, costs: Costs, algorithm: str, objective: Objective) -> dict[str, Any]:
    problem = Problem(graph, k80s(), costs, PlanOptions(objective=objective, reserve=0.0))
    spread = decide_sharded(problem, algorithm)
    return _simulated(spread.graph, spread.costs, spread.arrays) | {"planning_s": spread.planning_s}


def _placed(graph: Graph, costs: Costs, algorithm: str) -> dict[str, Any]:
    found = decide(Problem(graph, k80s(), costs, PlanOptions(reserve=0.0)), algorithm)
    return _simulated(graph, costs, found.plan) | {"planning_s": found.planning_s}


def _simulated(graph: Graph, costs: Costs, plan: PlanArrays) -> dict[str, Any]:
    timeline = simulate(graph, machine_of(costs, k80s()), plan)
    compute = simulate(graph, machine_of(costs, k80s(free=True)), plan)
    return {
        "step_s": timeline.makespan,
        "compute_s": compute.makespan,
        "transfer_bytes": timeline.transfer_bytes(graph),
        "peak_bytes": int(peaks(graph.arrays, plan).max()),
    }


def figure_11(name: str) -> dict[str, Any]:
    """Return how the convolutions of a model are cut, objective `bytes`."""
    graph = load(name)
    sharding = find_sharding(graph, k80s(), "bytes").sharding
    return {"mesh": sharding.mesh.shape, "rows": partition_rows(graph, sharding)}


PARTS: dict[str, tuple[Callable[[str], dict[str, Any]], Sequence[str]]] = {
    "models": (models.measure, TOFU_SIZES),
    "plans": (measure, PLANNED),
    "figure-11": (figure_11, (DRAWN,)),
    "search": (lambda name: search_row(name, k80s(), LIMIT_S), SEARCHED),
}


def _row(part: str, name: str) -> dict[str, Any]:
    return PARTS[part][0](name)


def main(arguments: Sequence[str]) -> None:
    """Measure and write the page."""
    parser = argparse.ArgumentParser(prog="python -m bench tofu", description=__doc__)
    parser.add_argument("graphs", nargs="*", metavar="GRAPH", help="only these")
    parser.add_argument("--parts", default=",".join(PARTS), help="of " + ", ".join(PARTS))
    parser.add_argument("--jobs", type=int, default=cores(), help="rows side by side")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    path = options.output / f"{today}_tofu.json"
    report: dict[str, Any] = {}
    if path.is_file():
        report = json.loads(path.read_text(encoding="utf-8"))
    machine = f"{platform.machine()}, {cores()} cores, Python {platform.python_version()}"
    report |= {"date": today, "command": "python -m bench tofu", "machine": machine}
    warm_up((*PLACED, "single"))
    path.parent.mkdir(parents=True, exist_ok=True)
    for part in options.parts.split(","):
        tasks = [(part, name) for name in PARTS[part][1] if name in (options.graphs or [name])]
        jobs = 1 if part == "search" else options.jobs
        for (_, name), row in zip(tasks, measured(_row, tasks, jobs), strict=True):
            report.setdefault(part, {})[name] = row
            print(f"{part}: {name}: {row['cpu_s']:.1f} CPU s", flush=True)
            path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    path.with_suffix(".md").write_text(page(report), encoding="utf-8")
    for name, text in pictures(report).items():
        write_chart(text, path.parent, f"{path.stem}_{name}")
    print(path.with_suffix(".md"))
