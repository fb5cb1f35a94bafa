"""`auto` beside every algorithm that `compare` lists: it should never be slower than any of them.

`python -m bench auto [NAMES] [--devices 2,4,8] [--seconds S]` writes
`bench/results/<date>_auto.{md,json}`. Models of many kinds are captured, and some graphs of
`testbed/graphs` loaded. Each is planned without a limit, and under one that forces it over the
devices. Cases are kept in `.auto` as they end, so a run that was cut goes on.
"""

from __future__ import annotations

import argparse
import datetime
import json
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pardnn
from bench.common import RESULTS
from bench.placement.auto_models import MODELS
from pardnn.cluster import Cluster
from pardnn.errors import PardnnError
from pardnn.graph.ir import Graph
from pardnn.planner.algorithms import ALGORITHMS, BEST, SHARDED
from pardnn.planner.compare import compare
from pardnn.planner.costs import costs_for
from pardnn.planner.make_plan import make_plan
from pardnn.planner.options import PlanOptions
from pardnn.planner.problem import Problem
from testbed.kept_graphs import load

COSTS = "v100"
#: The limit of a device, by the peak of one device without a limit, divided by their number.
ROOM = 1.6
#: Two simulations of one plan differ by less.
EQUAL = 1e-9
#: Of the graphs that are kept, one or two of each kind, the smallest first.
KEPT = (
    "wresnet_50_4", "wresnet_152_10", "wresnet_152_10_norm", "rnn_4_8k", "gpt2", "word_rnn",
    "char_crn", "e3d",
)  # fmt: skip

Case = dict[str, Any]


def graph_of(name: str) -> Graph:
    """Return the graph of a model, captured, or a kept one."""
    if name not in MODELS:
        return load(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the models' own code
        step, args = MODELS[name]()
        return pardnn.capture(step, *args)


def _problem(graph: Graph, devices: int, limit: int | None) -> Problem:
    cluster = Cluster.uniform(devices, memory=limit)
    costs = costs_for(graph, cluster, COSTS)
    return Problem(graph, cluster, costs, PlanOptions(costs=COSTS, reserve=0.0))


def limit_of(graph: Graph, devices: int) -> int:
    """Return a limit in bytes that no single device can keep, and most plans over all can."""
    _, alone = make_plan(_problem(graph, 1, None).with_options(algorithm="single"))
    return int(ROOM * max(alone.peak_bytes) / devices)


def case_of(name: str, devices: int, is_limited: bool) -> Case:
    """Return the steps (simulated) of `auto` and of every other algorithm on one graph."""
    graph = graph_of(name)
    limit = limit_of(graph, devices) if is_limited else None
    problem, begin = _problem(graph, devices, limit), time.process_time()
    found: dict[str, float | None] = {}
    try:
        plan, result = make_plan(problem)
        found[BEST], won = result.makespan_s, plan.algorithm
    except PardnnError as error:
        found[BEST], won = None, error.code
    spent = time.process_time() - begin
    rows = compare(problem, [*ALGORITHMS, *SHARDED])
    found |= {row.algorithm: row.makespan_s for row in rows}
    return {
        "graph": name, "ops": len(graph.ops), "devices": devices, "limit": limit, "won": won,
        "auto_cpu_s": round(spent, 2), "seconds": found,
    }  # fmt: skip


def beaten_by(case: Case) -> list[str]:
    """Return the algorithms that are faster than `auto`, or fit where it finds nothing."""
    auto = case["seconds"][BEST]
    return [
        name
        for name, seconds in case["seconds"].items()
        if seconds is not None and (auto is None or seconds < auto * (1 - EQUAL))
    ]


def cases(names: Sequence[str], devices: Sequence[int], parts: Path) -> Iterator[Case]:
    """Yield every case, those from `parts` that an earlier run finished."""
    lines = parts.read_text().splitlines() if parts.exists() else []
    known = {
        (case["graph"], case["devices"], case["limit"] is not None): case
        for case in map(json.loads, lines)
    }
    for name in names:
        for count in devices:
            for is_limited in (False, True):
                case = known.get((name, count, is_limited))
                if case is None:
                    case = case_of(name, count, is_limited)
                    parts.parent.mkdir(exist_ok=True)
                    with parts.open("a") as file:
                        file.write(json.dumps(case) + "\n")
                yield case


def main(arguments: list[str]) -> None:
    """Run the cases, for at most so many seconds, and write the page."""
    parser = argparse.ArgumentParser(prog="bench auto")
    parser.add_argument("names", nargs="*")
    parser.add_argument("--devices", default="2,4,8")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--date", default=datetime.date.today().isoformat())
    chosen = parser.parse_args(arguments)
    parts = Path(".auto") / f"{chosen.date}.jsonl"
    end, found = time.monotonic() + chosen.seconds, []
    names = chosen.names or [*MODELS, *KEPT]
    for case in cases(names, [int(k) for k in chosen.devices.split(",")], parts):
        found.append(case)
        lost = ", ".join(beaten_by(case)) or "nothing"
        limit = "limit" if case["limit"] else "no limit"
        print(f"{case['graph']} K={case['devices']} {limit}: faster than auto: {lost}", flush=True)
        if time.monotonic() > end:
            break
    _write(found, chosen.date)


def _write(found: list[Case], date: str) -> None:
    page = RESULTS / f"{date}_auto.md"
    page.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    lost = [case for case in found if beaten_by(case)]
    graphs = len({case["graph"] for case in found})
    how = f"Steps are simulated: costs of {COSTS}, links 300 GB/s + 25 us."
    limits = f"A limit is {ROOM:g} x the peak of one device / K."
    held = f"In {len(found) - len(lost)} no algorithm is faster than `auto`, nor fits where it"
    lines = [
        "# `auto` beside every algorithm that `compare` lists",
        "",
        f"`python -m bench auto`, {date}. {how} {limits}",
        "",
        f"{len(found)} cases on {graphs} captured graphs. {held} does not; in {len(lost)} one is.",
        "",
        "| graph | ops | K | limit | `auto` | won | best other | CPU s | faster than `auto` |",
        "| --- | ---: | ---: | ---: | ---: | --- | --- | ---: | --- |",
        *map(_row, found),
    ]
    page.write_text("\n".join(lines) + "\n")
    print(f"written: {page}")


def _row(case: Case) -> str:
    auto = case["seconds"][BEST]
    others = {n: s for n, s in case["seconds"].items() if s is not None and n != BEST}
    best = min(others, key=lambda name: others[name], default=None)
    limit = "-" if case["limit"] is None else f"{case['limit'] / 2**30:.3g} GiB"
    cells = (
        case["graph"], case["ops"], case["devices"], limit,
        "no plan" if auto is None else f"{auto * 1e3:.4g} ms", case["won"],
        "-" if best is None else f"{best} {others[best] * 1e3:.4g} ms", case["auto_cpu_s"],
        ", ".join(beaten_by(case)) or "-",
    )  # fmt: skip
    return "| " + " | ".join(map(str, cells)) + " |"
