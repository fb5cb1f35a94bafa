"""`auto` beside every recipe alone: GPT-2 of eight layers, three links, four memory limits.

As a user asks for it: `auto` with `microbatches="auto"` and nothing else. A recipe is what `auto`
has tried of it, with the number of pieces that suits it best; or, with `--algorithms`, what it is
when asked for alone. Each row is one algorithm in one corner, kept in a JSON file beside the page:
a run that was stopped goes on.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pardnn
from bench.common.side_by_side import cores, measured
from bench.recipes.bounds import most_in_pieces
from bench.recipes.models import gpt2
from pardnn import backends
from pardnn.cluster import Cluster
from pardnn.errors import InfeasibleError
from pardnn.graph.ir import Graph
from pardnn.plan.plan import Tried
from pardnn.planner.algorithms import CUTS, RECIPES
from pardnn.planner.costs import costs_for
from pardnn.sim.machine import machine_of, serial_seconds

Row = dict[str, Any]

COSTS, LAYERS, DEVICES = "v100", 8, 4
LINKS = ("5 GB/s", "25 GB/s", "300 GB/s")
LIMITS = ("640 MiB", "720 MiB", "900 MiB", "none")
ALONE = ("auto-whole", "pardnn", "tofu", *CUTS, *RECIPES)
#: Those whose batch is in pieces.
IN_PIECES = ("auto", "pardnn", *RECIPES)
#: What was asked of `auto`, times as fast as one device.
ASKED = {("5 GB/s", "720 MiB"): 2.6, ("25 GB/s", "720 MiB"): 3.2, ("300 GB/s", "none"): 3.95}


@functools.cache
def captured(update: str) -> Graph:
    """Return the step; no tensor data are allocated.

    Args:
        update: "plain" or "fused": how AdamW is called.
    """
    return backends.capture_factory(lambda: gpt2(LAYERS, is_fused=update == "fused"))


def cluster_of(links: str, limit: str) -> Cluster:
    """Return the devices of a corner."""
    memory = None if limit == "none" else limit.replace(" ", "")
    return Cluster.uniform(DEVICES, bandwidth=links.replace(" ", ""), memory=memory)


def whole_seconds(graph: Graph) -> float:
    """Return the seconds of a step on one device without a limit."""
    cluster = Cluster.uniform(1)
    return serial_seconds(machine_of(costs_for(graph, cluster, COSTS), cluster))


def measure(update: str, links: str, limit: str, algorithm: str) -> Row:
    """Return how many times as fast as one device a step is.

    Args:
        update: As for `captured`.
        links: Of `LINKS`.
        limit: Of `LIMITS`.
        algorithm: `auto` or one of `ALONE`.
    """
    graph = captured(update)
    pieces = "auto" if algorithm in IN_PIECES else None
    row: Row = {"update": update, "links": links, "limit": limit, "algorithm": algorithm}
    try:
        plan = pardnn.plan(
            graph, cluster_of(links, limit), algorithm, reserve=0.0, costs=COSTS,
            microbatches=pieces,
        )  # fmt: skip
    except InfeasibleError as error:
        return row | {"speedup": None, "why": error.message.splitlines()[0]}
    assert plan.predicted is not None
    whole = whole_seconds(graph)
    if algorithm == "auto":
        row["tried"] = _fastest_of(plan.tried, whole)
    number = 1 if plan.pieces is None else len(plan.pieces.points) - 1
    seconds = plan.predicted.makespan_s
    return row | {
        "speedup": whole / seconds, "seconds": seconds, "pieces": number,
        "taken": plan.algorithm, "peak_bytes": max(plan.predicted.peak_bytes),
    }  # fmt: skip


def _fastest_of(tried: Sequence[Tried], whole: float) -> dict[str, Row]:
    """Return the fastest try of each algorithm.

    Args:
        tried: By `auto`, "8 pieces, gpipe" or "tofu" each.
        whole: Seconds of one device.
    """
    found: dict[str, Row] = {}
    for each in tried:
        part, _, name = each.algorithm.rpartition(", ")
        pieces = int(part.split()[0]) if part else 1
        row: Row = {"speedup": None, "pieces": pieces, "why": each.why}
        if each.makespan_s is not None:
            row["speedup"] = whole / each.makespan_s
        known = found.setdefault(name, row)
        if (row["speedup"] or 0.0) > (known["speedup"] or 0.0):
            found[name] = row
    return found


def page(report: Row) -> str:
    """Return the page, in Markdown.

    Args:
        report: From `main`: "rows", and how they were made.
    """
    update = "`AdamW`" if report["update"] == "plain" else "`AdamW(fused=True)`"
    setting = (
        f"Times as fast as one device without a limit ({1e3 * report['whole_s']:.1f} ms), "
        f"simulated; `{report['command']}`, {report['date']}, {report['cores']} cores under load, "
        f"pardnn {report['version']}; {len(report['rows'])} of {report['total']} rows. GPT-2 of "
        f"{LAYERS} layers, width 512, 8 heads, 4,096 words, batch 32 x 256, {update}, "
        f"{report['ops']:,} ops; {DEVICES} devices of `{COSTS}`, links of 25 us, reserve 0. The "
        "user's step has no microbatches, and is planned with `microbatches=auto`; the number of "
        "pieces is in brackets where it is not 1. Other algorithms: the fastest that `auto` tried "
        'of each, or it alone, marked with a star. "-": does not fit, in any number of pieces that '
        'can be faster than `auto`; "slower": given up, as a device computes for longer than the '
        "best step takes. CPU: seconds of planning."
    )
    tables, findings = _tables(report["rows"]), _findings(report)
    lines = ["# `auto` and every recipe: GPT-2 in twelve corners", "", setting, ""]
    lines += [*tables, *findings]
    return "\n".join([*lines, ""])


def _tables(rows: Sequence[Row]) -> Iterator[str]:
    """Yield a table for each kind of link."""
    for links in LINKS:
        here = {(r["limit"], r["algorithm"]): r for r in rows if r["links"] == links}
        if not here:
            continue
        yield from (f"## {links}", "")
        yield f"| | {' | '.join(_limit(limit) for limit in LIMITS)} |"
        yield f"| --- |{' --- |' * len(LIMITS)}"
        for name in ("auto", *ALONE):
            cells = [_cell(_row(here, limit, name)) for limit in LIMITS]
            yield f"| `{name}` | {' | '.join(cells)} |"
        taken = [here.get((limit, "auto")) for limit in LIMITS]
        took = [f"`{row['taken']}`" if row and row["speedup"] else "" for row in taken]
        spent = [f"{row['cpu_s']:.0f} s" if row else "" for row in taken]
        yield f"| taken by `auto` | {' | '.join(took)} |"
        yield f"| CPU of `auto` | {' | '.join(spent)} |"
        yield ""


def _row(here: Mapping[tuple[str, str], Row], limit: str, name: str) -> Row | None:
    """Return the row of an algorithm alone, or as `auto` tried it; None if there is neither."""
    alone, auto = here.get((limit, name)), here.get((limit, "auto"))
    return alone or (auto and auto.get("tried", {}).get(name))


def _limit(limit: str) -> str:
    return "no limit" if limit == "none" else limit


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    star = "*" if row.get("algorithm", "auto") != "auto" else ""
    if row["speedup"] is None:
        return "slower" if "computes for" in (row.get("why") or "") else f"-{star}"
    pieces = f" ({row['pieces']})" if row["pieces"] > 1 else ""
    return f"{row['speedup']:.3f}{star}{pieces}"


def _findings(report: Row) -> Iterator[str]:
    """Yield what the rows say, counted."""
    rows = report["rows"]
    auto = {(r["links"], r["limit"]): r for r in rows if r["algorithm"] == "auto"}
    faster, count = [], 0
    for (links, limit), mine in auto.items():
        here = {(r["limit"], r["algorithm"]): r for r in rows if r["links"] == links}
        for name in ALONE:
            if (other := _row(here, limit, name)) and other["speedup"]:
                count += 1
                if other["speedup"] > (mine["speedup"] or 0.0) * (1 + 1e-9):
                    faster.append(f"`{name}` at {links}, {_limit(limit)}")
    compared = (
        f"{count} plans of other algorithms in {len(auto)} corner{'s' if len(auto) != 1 else ''}"
    )
    yield f"- Beside {compared}, a plan faster than that of `auto`: {', '.join(faster) or 'none'}."
    for corner, asked in ASKED.items():
        if (row := auto.get(corner)) and row["speedup"]:
            is_met = "met" if row["speedup"] > asked else "not met"
            links, limit = corner
            yield (
                f"- {links}, {_limit(limit)}: {row['speedup']:.3f} of more than {asked:g} asked, "
                f"{is_met}."
            )
    yield from _bound(report)


def _bound(report: Row) -> Iterator[str]:
    """Yield what no plan in pieces of the batch can be better than."""
    limit, whole = report["bound"], report["whole_s"]
    yield (
        f"- Whatever the number of pieces of each op, links and memory: on {DEVICES} devices no "
        f"plan in pieces of the batch is more than {limit:.3f} times as fast as one device with "
        "the batch whole, since smaller calls cost more (`bench/recipes/bounds.py`)."
    )
    alone = report["serial_of_pieces"]
    for row in report["rows"]:
        corner = (row["links"], row["limit"])
        if row["algorithm"] == "auto" and corner == ("300 GB/s", "none") and row["pieces"] > 1:
            serial = alone[str(row["pieces"])]
            yield (
                f"- Its plan at 300 GB/s without a limit is {serial / row['seconds']:.3f} times as "
                f"fast as one device that does the same {row['pieces']} pieces, which takes "
                f"{serial / whole:.3f} times as long as the batch whole."
            )


def main(arguments: Sequence[str]) -> None:
    """Measure what has no row yet, and write the page."""
    parser = argparse.ArgumentParser(prog="python -m bench corners", description=__doc__)
    parser.add_argument("--links", default=",".join(LINKS))
    parser.add_argument("--limits", default=",".join(LIMITS))
    parser.add_argument("--algorithms", default="auto,auto-whole")
    parser.add_argument("--update", choices=("plain", "fused"), default="plain")
    parser.add_argument("--again", default="", help="algorithms whose rows are measured again")
    parser.add_argument("--jobs", type=int, default=cores())
    parser.add_argument("--output", type=Path, required=True, help="File of the page.")
    options = parser.parse_args(arguments)
    kept = options.output.with_suffix(".json")
    rows = json.loads(kept.read_text())["rows"] if kept.exists() else []
    again = options.again.split(",")
    known = {_task(r): r for r in rows if r["algorithm"] not in again}
    names = options.algorithms.split(",")
    tasks = [
        (options.update, links, limit, name)
        for links in options.links.split(",")
        for limit in options.limits.split(",")
        for name in names
    ]
    report = _begin(options.update, arguments, names)
    rest = [task for task in tasks if task not in known]
    for row in measured(measure, rest, options.jobs):
        known[_task(row)] = row
        _write(report, known.values(), options.output)
    _write(report, known.values(), options.output)


def _task(row: Row) -> tuple[str, ...]:
    return row["update"], row["links"], row["limit"], row["algorithm"]


def _begin(update: str, arguments: Sequence[str], names: Sequence[str]) -> Row:
    """Return a report without rows."""
    graph = captured(update)
    bound, serial = most_in_pieces(graph, COSTS, DEVICES)
    return {
        "update": update,
        "ops": len(graph.ops),
        "command": " ".join(["python -m bench corners", *arguments]),
        "date": str(datetime.date.today()),
        "cores": cores(),
        "version": pardnn.__version__,
        "total": len(LINKS) * len(LIMITS) * len(names),
        "whole_s": whole_seconds(graph),
        "bound": bound,
        "serial_of_pieces": {str(number): seconds for number, seconds in serial.items()},
    }


def _write(report: Row, rows: Iterable[Row], path: Path) -> None:
    """Write the JSON and the page that is made of it."""
    place = {(a, b, c): i for i, (a, b, c) in enumerate(
        (a, b, c) for a in LINKS for b in LIMITS for c in ("auto", *ALONE)
    )}  # fmt: skip
    ordered = sorted(rows, key=lambda r: place[r["links"], r["limit"], r["algorithm"]])
    text = json.dumps({**report, "rows": ordered}, indent=1)
    path.with_suffix(".json").write_text(text + "\n", encoding="utf-8")
    path.write_text(page(json.loads(text)), encoding="utf-8")
