"""`auto` beside every recipe and every algorithm: models, clusters and limits of many kinds.

As a user asks for it: `auto` with `microbatches="auto"` and nothing else. A cut or a pipeline is
the fastest that `auto` tried of it, and what it is when asked for alone, where `--algorithms` names
it. A limit is 1.1 or 2 times the smallest that a cut or a placement of whole ops is found to fit.

Each row is one algorithm in one case, kept beside the page: a run that was stopped goes on.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import math
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import pardnn
from bench.common.side_by_side import cores, measured
from bench.recipes.models import MODELS, bert, gpt2, llama, t5, vit
from pardnn import backends
from pardnn.cluster import Cluster, Device, Link
from pardnn.errors import InfeasibleError, UsageError
from pardnn.graph.ir import Graph
from pardnn.plan.plan import Tried
from pardnn.planner.algorithms import BEST, BEST_WHOLE, SHARDED
from pardnn.planner.costs import costs_for
from pardnn.planner.estimate import minimum_limit
from pardnn.planner.options import PlanOptions
from pardnn.planner.problem import Problem
from testbed.kept_graphs import GRAPHS, load

Row = dict[str, Any]

#: Devices of each, links and costs; of the last, machines of half the devices.
CLUSTERS = {
    "4 V100, NVLink": (4, 300e9, 25e-6, "v100"),
    "8 V100, PCIe": (8, 12e9, 25e-6, "v100"),
    "2 x 8 H100": (16, 450e9, 10e-6, "h100"),
}
#: Between the machines of the last: bytes per second, and seconds.
INFINIBAND = (50e9, 20e-6)
LIMITS = ("1.1", "2", "none")
#: Cuts whose peaks tell the smallest limit, beside placements.
SMALL = ("tofu", "zero-3")
#: Two simulations of one plan differ by less.
EQUAL = 1e-9
#: Steps that are captured for the page, beside those that are kept: of more layers, too; T5 has
#: half of them in its encoder.
STEPS: Mapping[str, Callable[[], Any]] = {
    **MODELS,
    "GPT-2, 12 layers": functools.partial(gpt2, 12),
    "Llama, 12 layers": functools.partial(llama, 12),
    "BERT, 12 layers": functools.partial(bert, 12),
    "ViT, 12 layers": functools.partial(vit, 12),
    "T5, 12 layers": functools.partial(t5, 6),
}


@functools.cache
def graph_of(model: str) -> Graph:
    """Return the step of a model, of `STEPS` or kept; no tensor data are allocated."""
    return load(model) if model in GRAPHS else backends.capture_factory(STEPS[model])


def cluster_of(name: str, limit: int | None) -> Cluster:
    """Return one of `CLUSTERS`.

    Args:
        name: Its key.
        limit: Bytes of each device; None if there is none.
    """
    count, bandwidth, latency, _ = CLUSTERS[name]
    if not name.startswith("2 x"):
        return Cluster.uniform(count, memory=limit, bandwidth=bandwidth, latency=latency)
    half, (slow, late) = count // 2, INFINIBAND
    links = tuple(
        Link(source=f"gpu:{i}", target=f"gpu:{j}",
             bandwidth=bandwidth if i // half == j // half else slow,
             latency=latency if i // half == j // half else late)
        for i in range(count) for j in range(i)
    )  # fmt: skip
    devices = tuple(Device(name=f"gpu:{i}", memory=limit) for i in range(count))
    return Cluster(devices=devices, links=links)


@functools.cache
def smallest_limit(model: str, cluster: str) -> int:
    """Return the smallest limit in bytes that a cut or a placement of whole ops is found to fit."""
    graph, devices, costs = graph_of(model), cluster_of(cluster, None), CLUSTERS[cluster][-1]
    options = PlanOptions(costs=costs, reserve=0.0)
    problem = Problem(graph, devices, costs_for(graph, devices, costs), options)
    found = [minimum_limit(problem)[0]]
    for name in SMALL:
        try:
            plan = pardnn.plan(graph, devices, name, reserve=0.0, costs=costs, objective="bytes")
        except (InfeasibleError, UsageError):
            continue
        assert plan.predicted is not None
        found.append(max(plan.predicted.peak_bytes))
    return min(found)


def measure(model: str, cluster: str, limit: str, algorithm: str) -> Row:
    """Return the step that an algorithm finds, simulated.

    Args:
        model: Of `STEPS`, or a kept graph.
        cluster: Of `CLUSTERS`.
        limit: Of `LIMITS`.
        algorithm: Any.
    """
    graph, costs = graph_of(model), CLUSTERS[cluster][-1]
    size = None if limit == "none" else int(float(limit) * smallest_limit(model, cluster))
    row: Row = {"model": model, "cluster": cluster, "limit": limit, "algorithm": algorithm}
    row |= {"ops": len(graph.ops), "limit_bytes": size, "seconds": None}
    pieces = None if algorithm in (*SHARDED, BEST_WHOLE) else "auto"
    begin = time.process_time()
    try:
        plan = pardnn.plan(
            graph, cluster_of(cluster, size), algorithm, reserve=0.0, costs=costs,
            microbatches=pieces,
        )  # fmt: skip
    except (InfeasibleError, UsageError) as error:
        return row | _spent(begin) | {"why": error.message.splitlines()[0]}
    assert plan.predicted is not None
    number = 1 if plan.pieces is None else len(plan.pieces.points) - 1
    if algorithm == BEST:
        row["tried"] = _fastest_of(plan.tried)
    return row | _spent(begin) | {
        "seconds": plan.predicted.makespan_s, "pieces": number, "taken": plan.algorithm,
        "peak_bytes": max(plan.predicted.peak_bytes),
    }  # fmt: skip


def _spent(begin: float) -> Row:
    return {"planning_cpu_s": time.process_time() - begin}


def _fastest_of(tried: Sequence[Tried]) -> dict[str, float]:
    """Return the seconds of the fastest try of each algorithm, of any number of pieces."""
    found: dict[str, float] = {}
    for each in tried:
        name = each.algorithm.rpartition(", ")[2].rpartition(": ")[2]
        if each.makespan_s is not None and each.makespan_s < found.get(name, math.inf):
            found[name] = each.makespan_s
    return found


def faster(auto: Row, alone: Iterable[Row]) -> dict[str, float]:
    """Return what is faster than `auto` in a case, and how many times as long `auto` takes.

    Args:
        auto: Its row.
        alone: Rows of other algorithms in that case.
    """
    others = dict(auto.get("tried", {}))
    for row in alone:
        if row["seconds"] is not None:
            known = others.get(row["algorithm"], math.inf)
            others[row["algorithm"]] = min(row["seconds"], known)
    mine = auto["seconds"] or math.inf
    return {n: mine / s for n, s in others.items() if s < mine * (1 - EQUAL)}


def page(report: Row) -> str:
    """Return the page, in Markdown.

    Args:
        report: From `main`: "rows", and how they were made.
    """
    cases = _cases(report["rows"])
    setting = (
        f"Simulated milliseconds of a step, costs by preset; `{report['command']}`, "
        f"{report['date']}, {report['cores']} cores under load, pardnn {report['version']}; "
        f"{len(cases)} of {report['total']} cases, {len(report['rows'])} rows. "
        "`auto` has `microbatches=auto` and no other option. Clusters: "
        + "; ".join(f"{name}, {_link(name)}" for name in CLUSTERS)
        + ". Limit: times the smallest that `zero-3`, `tofu` or a placement of whole ops was found "
        "to fit; no reserve. Baseline: the better of `tofu` and `auto-whole`. Best other: the "
        "fastest of what `auto` tried of each, before local search, and of what was asked for "
        "alone. CPU: seconds of planning by `auto`."
    )
    head = (
        "| model (ops) | cluster | limit | `auto` | taken | baseline | best other | CPU | faster "
        "than `auto` |"
    )
    lines = ["# `auto` beside every recipe and every algorithm", "", setting, "", head]
    lines += ["| --- " * 9 + "|", *(_line(auto, rest) for auto, rest in cases)]
    return "\n".join([*lines, "", *_findings(cases), ""])


def _link(name: str) -> str:
    _, bandwidth, latency, _ = CLUSTERS[name]
    text = f"{bandwidth / 1e9:.0f} GB/s and {latency * 1e6:.0f} us"
    if name.startswith("2 x"):
        text += (
            f", {INFINIBAND[0] / 1e9:.0f} GB/s and {INFINIBAND[1] * 1e6:.0f} us between machines"
        )
    return text


def _cases(rows: Iterable[Row]) -> list[tuple[Row, list[Row]]]:
    """Return the row of `auto` of each case, and the others of that case."""
    found: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(_task(row)[:3], []).append(row)
    split = [[[r for r in case if (r["algorithm"] == BEST) == is_auto] for is_auto in (True, False)]
             for case in found.values()]  # fmt: skip
    return [(auto[0], rest) for auto, rest in split if auto]


def _baseline(auto: Row, rest: Sequence[Row]) -> float | None:
    """Return the better of `tofu` and `auto-whole`, in seconds; None if neither fits, or is there.

    What `auto` has tried of `tofu` counts where that was not asked for alone.
    """
    alone = {row["algorithm"]: row["seconds"] for row in rest}
    if BEST_WHOLE not in alone:
        return None
    found = [alone[BEST_WHOLE], alone.get("tofu", auto.get("tried", {}).get("tofu"))]
    return min((each for each in found if each is not None), default=None)


def _line(auto: Row, rest: Sequence[Row]) -> str:
    others = auto.get("tried", {}) | {
        r["algorithm"]: r["seconds"] for r in rest if r["seconds"] is not None
    }
    best, baseline = min(others, key=lambda n: others[n], default=None), _baseline(auto, rest)
    limit = "none"
    if auto["limit_bytes"] is not None:
        limit = f"{auto['limit']} ({auto['limit_bytes'] / 2**20:.0f} MiB)"
    taken = f"`{auto['taken']}` ({auto['pieces']})" if auto["seconds"] else "-"
    lost = ", ".join(f"`{n}` ({r:.3f})" for n, r in faster(auto, rest).items())
    cells = (
        f"{auto['model']} ({auto['ops']})", auto["cluster"], limit, _ms(auto["seconds"]), taken,
        _ms(baseline), "-" if best is None else f"`{best}` {_ms(others[best])}",
        f"{auto['planning_cpu_s']:.0f}", lost or "-",
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.3f}"


def _findings(cases: Sequence[tuple[Row, list[Row]]]) -> Iterator[str]:
    """Yield what the rows say, counted."""
    lost = [faster(auto, rest) for auto, rest in cases]
    worst = max((r for each in lost for r in each.values()), default=1.0)
    count = sum(map(bool, lost))
    yield (
        f"- In {count} of {len(cases)} cases something is faster than `auto`, or fits where it "
        "finds nothing" + (f"; `auto` takes {worst:.3f} times as long at most." if count else ".")
    )
    pairs = [(auto["seconds"], _baseline(auto, rest)) for auto, rest in cases]
    ratios = [base / mine for mine, base in pairs if mine and base]
    none = sum(mine is not None and base is None for mine, base in pairs)
    if ratios:
        yield (
            "- Beside the better of `tofu` and `auto-whole`, `auto` is "
            f"{geometric_mean(ratios):.3f} times as fast (geometric mean of {len(ratios)} cases, "
            f"{min(ratios):.3f} to {max(ratios):.3f}); in {none} more neither fits, or was asked "
            "for."
        )
    spent = [auto["planning_cpu_s"] for auto, _ in cases]
    if spent:
        yield f"- Planning took `auto` {min(spent):.0f} to {max(spent):.0f} s of CPU time."


def main(arguments: Sequence[str]) -> None:
    """Measure what has no row yet, and write the page."""
    parser = argparse.ArgumentParser(prog="python -m bench zoo", description=__doc__)
    parser.add_argument("--models", default=";".join(MODELS), help="Separated by semicolons.")
    parser.add_argument("--clusters", default=";".join(CLUSTERS), help="Likewise.")
    parser.add_argument("--limits", default=",".join(LIMITS))
    parser.add_argument("--algorithms", default=f"{BEST},{BEST_WHOLE}")
    parser.add_argument("--again", default="", help="algorithms whose rows are measured again")
    parser.add_argument("--jobs", type=int, default=cores())
    parser.add_argument("--output", type=Path, required=True, help="File of the page.")
    options = parser.parse_args(arguments)
    kept = options.output.with_suffix(".json")
    rows = json.loads(kept.read_text())["rows"] if kept.exists() else []
    known = {_task(row): row for row in rows}
    tasks = [
        (model, cluster, limit, name)
        for model in options.models.split(";")
        for cluster in options.clusters.split(";")
        for limit in options.limits.split(",")
        for name in options.algorithms.split(",")
    ]
    again = options.again.split(",")
    rest = [task for task in tasks if task not in known or task[-1] in again]
    report = {
        "command": f"python -m bench zoo {shlex.join(arguments)}",
        "date": str(datetime.date.today()),
        "cores": cores(),
        "version": pardnn.__version__,
        "total": len({task[:3] for task in tasks}),
    }
    for row in measured(measure, rest, options.jobs):
        known[_task(row)] = row
        _write(report, known.values(), options.output)
    _write(report, known.values(), options.output)


def _task(row: Row) -> tuple[str, ...]:
    return row["model"], row["cluster"], row["limit"], row["algorithm"]


def _write(report: Row, rows: Iterable[Row], path: Path) -> None:
    """Write the JSON and the page that is made of it."""
    kept = path.with_suffix(".json")
    kept.write_text(json.dumps({**report, "rows": list(rows)}, indent=1) + "\n", encoding="utf-8")
    path.write_text(page(json.loads(kept.read_text())), encoding="utf-8")
