"""Fidelity: predicted step time and peak memory beside measured ones, on this machine.

    python -m bench fidelity [--models trn,hf_gpt2] [--ranks 1,2,4] [--algorithms pardnn,tofu]

Op times are measured here (`--costs measured`, cached), links by `measure_links`; each plan is run
on gloo ranks of one thread, and its fastest step counts, as whatever else runs here only adds. More
ranks than cores share them, which no prediction knows: those runs are reported apart. The page
states the load of the machine. Needs torch and transformers.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench.fidelity_models import MODELS
from pardnn.api.costing import costs_for
from pardnn.api.planning import make_plan
from pardnn.api.running import run_checked
from pardnn.api.targets import captured
from pardnn.backends.torch.links import measure_links
from pardnn.cluster import Cluster
from pardnn.errors import PardnnError

RESULTS = Path(__file__).parent / "results"
STEPS = 8
Row = dict[str, Any]


def measure(name: str, num_ranks: int, algorithm: str, link: dict[str, float]) -> Row:
    """Plan and run one model; an error is a row that says so."""
    row: Row = {"model": name, "ranks": num_ranks, "algorithm": algorithm, "load": os.getloadavg()}
    target = f"{Path(__file__).parent / 'fidelity_models.py'}:{name}"
    try:
        graph, _ = captured(target)
        cluster = Cluster.uniform(num_ranks, **link)
        costs = costs_for(graph, cluster, "measured")
        plan, result = make_plan(graph, cluster, costs, algorithm=algorithm, reserve=0.0)
        run = run_checked(target, graph, plan, None, steps=STEPS)
    except PardnnError as error:
        return row | {"error": f"{error.code} {error.message.splitlines()[0]}"}
    used = sum(1 for peak in run.peak_bytes_measured if peak)
    return row | {
        "ops": len(graph.ops),
        "devices_used": used,
        "predicted_s": result.makespan_s,
        "measured_s": min(run.step_s[1:]),
        "median_s": sorted(run.step_s[1:])[(len(run.step_s) - 1) // 2],
        "predicted_bytes": list(run.peak_bytes_predicted),
        "measured_bytes": list(run.peak_bytes_measured),
    }


def step_error(row: Row) -> float:
    """Return predicted / measured step time - 1."""
    return row["predicted_s"] / row["measured_s"] - 1


def peak_error(row: Row) -> float:
    """Return predicted / measured peak - 1 of the rank where they differ most."""
    pairs = zip(row["predicted_bytes"], row["measured_bytes"], strict=True)
    errors = [predicted / measured - 1 for predicted, measured in pairs if measured]
    return max(errors, key=abs, default=0.0)


def _summary(rows: Sequence[Row], label: str) -> list[str]:
    good = [row for row in rows if "error" not in row]
    if not good:
        return []
    lines = []
    for what, error in (("step time", step_error), ("peak memory", peak_error)):
        mean = sum(abs(error(row)) for row in good) / len(good)
        worst = max(good, key=lambda row: abs(error(row)))
        lines.append(
            f"- {label}, {what}: mean absolute error {mean:.1%} over {len(good)} runs; the worst "
            f"is {worst['model']}, {worst['ranks']} ranks, {worst['algorithm']}: "
            f"{error(worst):+.1%}."
        )
    return lines


_EXPLAINED = f"""**Measured** step times and peaks beside the **simulated** ones. Step: the fastest
of {STEPS - 1} after the first. Error: predicted / measured - 1; of memory, on the rank where they
differ most. Load: running processes of the machine in the last minute, this bench included.
"""


def _load_note(rows: Sequence[Row], cores: int) -> str:
    loads = [row["load"][0] for row in rows]
    if min(loads) <= cores:
        return ""
    return (
        f"The machine was busy: the load was {min(loads):.0f} to {max(loads):.0f} on {cores} "
        "cores, so steps waited for processors most of the time, and the step errors below tell "
        "nothing of the predictions. Peaks do not depend on the load."
    )


def page(report: Row) -> str:
    """Return the results as Markdown."""
    rows, cores = report["rows"], report["cores"]
    columns = ["model", "ranks", "algorithm", "ops", "predicted, ms", "measured, ms"]
    columns += ["step error", "peak error", "load"]
    lines = [f"# Fidelity, {report['date']}", "", f"`{report['command']}`;"]
    lines += [f"{report['machine']}, {cores} cores, links {report['link']}.", "", _EXPLAINED]
    lines += [_load_note(rows, cores), "", "| " + " | ".join(columns) + " |", "|" + " --- |" * 9]
    for row in rows:
        head = f"| {row['model']} | {row['ranks']} | {row['algorithm']} |"
        if "error" in row:
            lines.append(f"{head} {row['error']} | | | | | {row['load'][0]:.1f} |")
            continue
        lines.append(
            f"{head} {row['ops']} | {row['predicted_s'] * 1e3:.1f} | {row['measured_s'] * 1e3:.1f} "
            f"| {step_error(row):+.1%} | {peak_error(row):+.2%} | {row['load'][0]:.1f} |"
        )
    few = [row for row in rows if row["ranks"] <= cores]
    lines += ["", *_summary(few, f"up to {cores} ranks, one per core")]
    lines += _summary([row for row in rows if row["ranks"] > cores], "more ranks than cores")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write the page."""
    parser = argparse.ArgumentParser(prog="python -m bench fidelity", description=__doc__)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--ranks", default="1,2,4")
    parser.add_argument("--algorithms", default="pardnn,tofu")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    fit = measure_links()
    link = {"bandwidth": fit.bandwidth, "latency": fit.latency}
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    report: Row = {
        "date": today,
        "command": f"python -m bench fidelity --models {options.models} --ranks {options.ranks} "
        f"--algorithms {options.algorithms}",
        "machine": f"{platform.machine()}, Python {platform.python_version()}, torch "
        f"{torch.__version__}, gloo",
        "cores": os.cpu_count(),
        "link": f"{fit.bandwidth / 1e9:.2f} GB/s and {fit.latency * 1e6:.0f} us",
        "rows": [],
    }
    path = options.output / f"{today}_fidelity.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    for name in options.models.split(","):
        for ranks in map(int, options.ranks.split(",")):
            for algorithm in options.algorithms.split(",") if ranks > 1 else ("single",):
                report["rows"].append(measure(name, ranks, algorithm, link))
                print(json.dumps(report["rows"][-1]), flush=True)
                path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
                path.with_suffix(".md").write_text(page(report), encoding="utf-8")


if __name__ == "__main__":
    main()
