"""Tofu's figures again, in simulation: ways to cut a step over 8 K80s, and to place it instead.

`python -m bench tofu [GRAPH ...]` plans the captured steps of `bench/graphs/` on 8 K80s of 12 GiB
(21 GB/s between any two, roofline costs, memory not enforced but reported) and writes
`bench/results/<date>_tofu.md` and `.json`. Search seconds are measured here; all else is simulated.

- Figure 10: time of a step and the part of it that is communication: what the same plan takes more
  than over links that cost nothing.
- Figures 8 and 9, in part: throughput relative to *ideal*, one device of unlimited memory that is
  eight times as fast on the same batch. (The paper's ideal uses a larger batch where it helps.)
- Table 1: seconds of the search.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.zoo_graphs import GRAPHS, load
from pardnn.api.algorithms import ALGORITHMS, SHARDED
from pardnn.api.planning import decide
from pardnn.api.sharding import decide_sharded
from pardnn.cluster import Cluster, Rate
from pardnn.cost.costs import Costs, preset_costs
from pardnn.errors import PardnnError
from pardnn.graph.ir import Graph
from pardnn.plan.plan import PlanArrays
from pardnn.shard.search import find_sharding
from pardnn.sim.engine import simulate
from pardnn.sim.machine import machine_of
from pardnn.sim.peak import peaks

RESULTS = Path(__file__).parent / "results"
MODELS = ("rnn_4_8k", "wresnet_152_10")
#: Placements of whole ops, for comparison.
PLACED = ("layer-round-robin", "pardnn")
USABLE = 12 * 2**30


def k80s(*, free: bool = False) -> Cluster:
    """Return 8 K80s without memory limits; `free`: links that cost nothing."""
    given = Cluster.preset("p2-k80")
    devices = tuple(dataclasses.replace(device, memory=None) for device in given.devices)
    rate = Rate(bandwidth=1e30, latency=0.0) if free else given.default_link
    return dataclasses.replace(given, devices=devices, default_link=rate)


def measure(name: str) -> dict[str, Any]:
    """Plan one graph in every way."""
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
    ways = [*((name, "bytes") for name in SHARDED), ("tofu", "seconds")]
    for algorithm, objective in ways:
        label = f"{algorithm}, {objective}"
        row["rows"].append(_tried(label, _sharded, graph, costs, algorithm, objective))
    for algorithm in PLACED:
        if algorithm in ALGORITHMS:
            row["rows"].append(_tried(f"{algorithm} (placement)", _placed, graph, costs, algorithm))
    return row


def _tried(label: str, way: Callable[..., dict[str, Any]], *given: Any) -> dict[str, Any]:
    try:
        return {"way": label} | way(*given)
    except PardnnError as error:
        return {"way": label, "error": str(error).splitlines()[0]}


def _sharded(graph: Graph, costs: Costs, algorithm: str, objective: str) -> dict[str, Any]:
    spread = decide_sharded(
        graph, k80s(), costs, algorithm=algorithm, objective=objective, reserve=0.0
    )
    return _judged(spread.graph, spread.costs, spread.arrays) | {"planning_s": spread.planning_s}


def _placed(graph: Graph, costs: Costs, algorithm: str) -> dict[str, Any]:
    found = decide(graph, k80s(), costs, algorithm=algorithm, reserve=0.0, seed=0)
    return _judged(graph, costs, found.plan) | {"planning_s": found.planning_s}


def _judged(graph: Graph, costs: Costs, plan: PlanArrays) -> dict[str, Any]:
    timeline = simulate(graph, machine_of(costs, k80s()), plan)
    compute = simulate(graph, machine_of(costs, k80s(free=True)), plan)
    return {
        "step_s": timeline.makespan,
        "compute_s": compute.makespan,
        "transfer_bytes": timeline.transfer_bytes(graph),
        "peak_bytes": int(peaks(graph.arrays, plan).max()),
    }


def search_times(names: Sequence[str]) -> list[dict[str, Any]]:
    """Search each graph on 8 devices, first with nothing known of its calls, then again."""
    rows = []
    for name in names:
        graph = load(name)
        taken = []
        for _ in range(3):
            started = time.perf_counter()
            found = find_sharding(graph, k80s(), "bytes")
            taken.append(time.perf_counter() - started)
        rows.append(
            {"graph": name, "ops": len(graph.ops), "first_s": taken[0], "best_s": min(taken)}
            | {"GB": found.cost / 1e9, "terms": found.num_terms}
        )
    return rows


def page(results: Sequence[dict[str, Any]], times: Sequence[dict[str, Any]]) -> str:
    """Return the results as Markdown."""
    lines = [
        "# Tofu's figures again, in simulation",
        "",
        (
            f"`python -m bench tofu`, {datetime.date.today()}, {platform.machine()}; 8 K80s of "
            "12 GiB, 21 GB/s between any two. Step times, communication and peaks are simulated "
            "with roofline costs; planning seconds are measured here."
        ),
    ]
    for row in results:
        lines += ["", f"## {row['graph']}, batch {row['batch']}, {row['ops']} ops", ""]
        lines += [
            "| way | step, s | communication | of ideal | GB sent | peak, GiB | plan, s |",
            "| --- | --- | --- | --- | --- | --- | --- |",
        ]
        lines += [_line(way, row["ideal_s"]) for way in row["rows"]]
        lines += ["", f"*Ideal*: {row['ideal_s']:.3f} s."]
    lines += [
        "",
        "## Search on 8 devices (measured)",
        "",
        "| graph | ops | first, s | again, s | GB |",
    ]
    lines += ["| --- | --- | --- | --- | --- |"]
    lines += [
        f"| {t['graph']} | {t['ops']} | {t['first_s']:.2f} | {t['best_s']:.2f} | {t['GB']:.2f} |"
        for t in times
    ]
    return "\n".join(lines) + "\n"


def _line(way: dict[str, Any], ideal: float) -> str:
    if "error" in way:
        return f"| {way['way']} | {way['error'][:80]} | | | | | |"
    share = 1 - way["compute_s"] / way["step_s"]
    peak = way["peak_bytes"] / 2**30
    over = " (does not fit)" if way["peak_bytes"] > USABLE else ""
    return (
        f"| {way['way']} | {way['step_s']:.3f} | {share:.0%} | {ideal / way['step_s']:.0%} | "
        f"{way['transfer_bytes'] / 1e9:.1f} | {peak:.1f}{over} | {way['planning_s']:.1f} |"
    )


def main(arguments: Sequence[str]) -> None:
    """Measure and write the page."""
    parser = argparse.ArgumentParser(prog="python -m bench tofu")
    parser.add_argument("graphs", nargs="*", metavar="GRAPH", help=", ".join(GRAPHS))
    names = parser.parse_args(arguments).graphs or list(MODELS)
    times = search_times([*names, "rnn_10_8k", "gpt2"])
    stem = RESULTS / f"{datetime.date.today()}_tofu"
    results: list[dict[str, Any]] = []
    for name in names:
        results.append(measure(name))
        stem.with_suffix(".md").write_text(page(results, times))
        both = {"results": results, "search": times}
        stem.with_suffix(".json").write_text(json.dumps(both, indent=1))
    print(page(results, times))
