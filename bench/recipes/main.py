"""Seconds of a step by every cut of experts, `tofu`, `auto-whole` and `auto`, simulated.

Eight models of two layers, on 2, 4 and 8 devices with fast and with slow links. `auto` tries the
cuts one after the other, so its plan's `tried` has their seconds; one is given up where what a
device computes alone takes as long as the best plan before it.
"""

from __future__ import annotations

import argparse
import datetime
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pardnn
from bench.common.side_by_side import cores, write_page
from bench.recipes.models import MODELS
from pardnn import backends
from pardnn.cluster import Cluster
from pardnn.graph.ir import Graph
from pardnn.planner.algorithms import CUTS

COSTS = "v100"
#: Bytes/s and latency in seconds, between each pair of devices.
LINKS = {"300 GB/s": (300e9, 1e-6), "12 GB/s": (12e9, 1e-5)}


@functools.cache
def captured(model: str) -> Graph:
    """Return the step of a model; no tensor data are allocated."""
    return backends.capture_factory(MODELS[model])


def measure(model: str, devices: str, links: str) -> dict[str, Any]:
    """Return the seconds of each plan.

    Args:
        model: A key of `MODELS`.
        devices: How many.
        links: A key of `LINKS`.
    """
    bandwidth, latency = LINKS[links]
    cluster = Cluster.uniform(int(devices), bandwidth=bandwidth, latency=latency)
    row: dict[str, Any] = {"model": model, "devices": devices, "links": links}
    row["ops"] = len(captured(model).ops)
    for name in ("auto-whole", "auto"):
        plan = pardnn.plan(captured(model), cluster, name, reserve=0.0, costs=COSTS)
        assert plan.predicted is not None
        row[name] = plan.predicted.makespan_s
        row |= {"taken": plan.algorithm} if name == "auto" else {}
        for tried in plan.tried:
            if tried.algorithm in (*CUTS, "tofu"):
                is_given_up = "computes for" in (tried.why or "")
                row[tried.algorithm] = tried.makespan_s or ("given up" if is_given_up else "-")
    return row


def page(rows: Sequence[dict[str, Any]], total: int, command: str) -> str:
    """Return the page, in Markdown.

    Args:
        rows: From `measure`.
        total: Rows that were asked for.
        command: That makes them.
    """
    names = [*CUTS, "tofu", "auto-whole", "auto"]
    setting = (
        f"Simulated milliseconds of a step, costs of `{COSTS}`, no memory limit; `{command}`, "
        f"{datetime.date.today()}, {cores()} cores under load, pardnn {pardnn.__version__}; "
        f"{len(rows)} of {total} rows. Eight models of two layers (`bench/recipes/models.py`). "
        '"given up": what one device computes takes as long as the best plan found before; "-": '
        "the cut is none of this step's, or of this number of devices. CPU: seconds of "
        "`auto-whole` and `auto` together. The optimizer is AdamW with `fused=True`."
    )
    lines = [
        "# Cuts of experts beside the planners",
        "",
        setting,
        "",
        f"| model (ops) | devices, links | {' | '.join(names)} | taken by `auto` | CPU |",
        f"| --- | --- |{' --- |' * (len(names) + 2)}",
    ]
    for row in rows:
        cells = [_cell(row.get(name, "-")) for name in names]
        lines.append(
            f"| {row['model']} ({row['ops']}) | {row['devices']}, {row['links']} | "
            f"{' | '.join(cells)} | `{row['taken']}` | {row['cpu_s']:.0f} |"
        )
    return "\n".join([*lines, "", *_findings(rows), ""])


def _cell(value: float | str) -> str:
    return value if isinstance(value, str) else f"{1e3 * value:.3f}"


def _findings(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return what the rows say, counted."""
    won = [row for row in rows if row["taken"] in CUTS]
    gains = [min(row["tofu"], row["auto-whole"]) / row["auto"] for row in won]
    slower = [
        (row["model"], name)
        for row in rows
        for name in CUTS
        if isinstance(row.get(name), float) and row[name] < row["auto"]
    ]
    most = f", at most {max(gains):.2f} times as fast as the better of both" if gains else ""
    taken = (
        f"- `auto` takes a cut of experts in {len(won)} of {len(rows)} rows, where it is faster "
        f"than `tofu` and placements{most}."
    )
    return [
        taken,
        f"- Rows in which a cut that was timed is faster than `auto`: {len(slower)}.",
    ]


def main(arguments: Sequence[str]) -> None:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(prog="python -m bench recipes", description=__doc__)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--devices", default="2,4,8")
    parser.add_argument("--links", default=",".join(LINKS))
    parser.add_argument("--jobs", type=int, default=cores())
    parser.add_argument("--output", type=Path, help="File of the page; printed without.")
    options = parser.parse_args(arguments)
    tasks = [
        (model, devices, links)
        for devices in options.devices.split(",")
        for model in options.models.split(",")
        for links in options.links.split(",")
    ]
    command = " ".join(["python -m bench recipes", *arguments])
    made = functools.partial(page, command=command)
    write_page(measure, tasks, made, options.jobs, options.output)
