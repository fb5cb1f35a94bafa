"""The placement page as Markdown, and its picture."""

from __future__ import annotations

import math
from statistics import geometric_mean
from typing import Any

import numpy as np

from bench.common.charts import dots_svg
from bench.placement.memory import feasibility_summary
from bench.placement.parts import memory_summary

Report = dict[str, Any]


def mean_ratio(rows: list[dict[str, Any]], name: str, base: str | None) -> float | None:
    """Return the geometric mean of makespan / base, or / lower bound; None if a run is missing.

    Args:
        rows: Of the report.
        name: Of the algorithm.
        base: Algorithm to divide by; the lower bound if None.
    """
    values = []
    for row in rows:
        found = row["by"][name]
        if "error" in found or (base and "error" in row["by"][base]):
            return None
        below = row["by"][base]["makespan_s"] if base else row["lower_bound_s"]
        values.append(found["makespan_s"] / below)
    return geometric_mean(values) if values else None


def table(head: list[str], rows: list[list[Any]]) -> list[str]:
    """Return a table of Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(map(str, line)) + " |" for line in lines]


def page(report: Report) -> str:
    """Return the results as Markdown."""
    lines = [
        f"# Placement, {report['date']}",
        "",
        f"Seed {report['seed']}; {report['machine']}; cores may have been shared.",
        "",
        *table(
            ["command", "revision", "parts that are below", "CPU seconds"],
            [
                [
                    f"`{run['command']}`",
                    run["revision"],
                    ", ".join(run["parts"]),
                    f"{run['cpu_seconds']:.0f}",
                ]
                for run in report["runs"]
            ],
        ),
        "",
        f"![makespan / bound of each algorithm]({report['picture']})",
    ]
    for part in (
        _quality,
        _families,
        _where_baselines_win,
        large_section,
        _ablation,
        _gaps,
        limits_section,
        _memory,
        _topologies,
        _scale,
    ):
        lines += part(report)
    return "\n".join(lines) + "\n"


def _number(value: float | None) -> str:
    return "" if value is None or not math.isfinite(value) else f"{value:.3f}"


def _quality(report: Report) -> list[str]:
    rows, names = report["rows"], report["algorithms"]
    if not rows:
        return []
    body = []
    for row in rows:
        bound = row["lower_bound_s"]
        cells = [_number(row["by"][name].get("makespan_s", math.nan) / bound) for name in names]
        body.append([row["graph"], row["ops"], row["devices"], f"{row['ccr']:.2f}",
                     f"{bound:.4f}", *cells])  # fmt: skip
    for label, base in (("geometric mean", None), ("/ heft", "heft")):
        cells = [_number(mean_ratio(rows, name, base)) for name in names]
        body.append([label, "", "", "", "", *cells])
    spent = {name: sum(row["by"][name].get("planning_s", 0.0) for row in rows) for name in names}
    return [
        "",
        "## Quality",
        "",
        "Makespan / lower bound; the last row is the geometric mean of makespan / that of plain",
        "`heft` under its own order. An empty cell: no plan.",
        "",
        *table(["graph", "ops", "K", "CCR", "bound, s", *names], body),
        "",
        "Seconds of planning, the sum over the table: "
        + ", ".join(f"`{name}` {spent[name]:.1f}" for name in names)
        + ".",
    ]


def _families(report: Report) -> list[str]:
    names = report["algorithms"]
    if not report["rows"]:
        return []
    families = list(dict.fromkeys(row["family"] for row in report["rows"]))
    body = []
    for family in families:
        rows = [row for row in report["rows"] if row["family"] == family]
        body.append([family, *(_number(mean_ratio(rows, name, "heft")) for name in names)])
    return ["", "Geometric mean of makespan / that of `heft`, by family:", "",
            *table(["family", *names], body)]  # fmt: skip


def _where_baselines_win(report: Report) -> list[str]:
    """List the graphs on which a baseline beats `pardnn` alone, and any that beats `auto`."""
    rows, names, lines = report["rows"], report["algorithms"], []
    for ours in ("pardnn", "auto") if rows else ():
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


def large_section(report: Report) -> list[str]:
    rows = report.get("large")
    if not rows:
        return []
    families = list(dict.fromkeys(row["family"] for row in rows))
    ccrs = sorted({row["target_ccr"] for row in rows})
    body = []
    for family in [*families, "all"]:
        mine = [row for row in rows if family in (row["family"], "all")]
        by_ccr = [[row for row in mine if row["target_ccr"] == ccr] for ccr in ccrs]
        body.append([family, len(mine), *(_number(mean_ratio(some, "auto", "heft"))
                     for some in [*by_ccr, mine])])  # fmt: skip
    each = []
    for row in sorted(rows, key=lambda row: (row["ops"], row["graph"], row["devices"])):
        auto, heft = (row["by"][name]["makespan_s"] for name in ("auto", "heft"))
        each.append([row["graph"], row["devices"], _number(row["lower_bound_s"] / heft),
                     _number(auto / heft), f"{row['by']['auto']['planning_s']:.1f}"])  # fmt: skip
    return ["", "## Recurrent grids, wide branches, fork-join graphs", "",
            "Makespan of `auto` / that of plain `heft` under its own order, geometric means:", "",
            *table(["family", "rows", *(f"CCR {ccr:g}" for ccr in ccrs), "all"], body), "",
            "Row by row; no plan is better than the bound:", "",
            *table(["graph", "K", "bound / heft", "auto / heft", "planning of auto, s"],
                   each)]  # fmt: skip


def _ablation(report: Report) -> list[str]:
    rows = report["ablation"]
    if not rows:
        return []
    steps = list(rows[0]["steps"])
    body = [
        [row["graph"], row["devices"], *(_number(row["steps"][s] / row["bound_s"]) for s in steps)]
        for row in rows
    ]
    means = [geometric_mean([row["steps"][s] / row["bound_s"] for row in rows]) for s in steps]
    body.append(["geometric mean", "", *map(_number, means)])
    return ["", "## Steps", "", "Makespan / lower bound after each of the thesis's steps, beside",
            "clustering and mapping by others:", "",
            *table(["graph", "K", *steps], body)]  # fmt: skip


def _gaps(report: Report) -> list[str]:
    rows = report["gaps"]
    if rows is None:
        return ["", "## Gaps", "", "OR-Tools is not installed: no optima."]
    proven = [row for row in rows if row["proven"]]
    if not proven:
        return []
    body = []
    for label, chosen in (
        ("equal devices", [row for row in proven if not row["unlike"]]),
        ("unlike devices", [row for row in proven if row["unlike"]]),
        ("all", proven),
    ):
        if not chosen:
            continue
        gap = np.array([row["gap"] for row in chosen])
        tight = np.array([row["optimum_over_bound"] for row in chosen])
        body.append([label, len(gap), f"{(gap < 1e-6).mean():.0%}", f"{gap.mean():.2%}",
                     *(f"{q:.2%}" for q in np.quantile(gap, [0.9, 0.95, 0.99])),
                     f"{gap.max():.2%}", f"{tight.mean():.1%}",
                     f"{max(0.0, tight.min()):.2%}"])  # fmt: skip
    head = ["", "graphs", "optimal", "mean gap", "90 %", "95 %", "99 %", "worst",
            "optimum above the bound, mean", "least"]  # fmt: skip
    return ["", "## Gaps", "",
            "`auto` against proven optima (CP-SAT): 8 to 20 ops of all families and at random, K 2",
            "to 4, CCR 0.1 to 10, links and speeds alike or not; on",
            f"{len(rows) - len(proven)} of {len(rows)} nothing was proven in time.", "",
            *table(head, body)]  # fmt: skip


def limits_section(report: Report) -> list[str]:
    if not report["limits"]:
        return []
    body = [
        [row["kind"], row["graphs"], row["plans"], row["over"], row["infeasible"], row["missed"],
         row["no_witness"]]
        for row in feasibility_summary(report["limits"])
    ]  # fmt: skip
    head = ["graphs", "number", "plans", "over their limit", "no plan", "of these packable",
            "of these without a witness"]  # fmt: skip
    return ["", "## Limits", "",
            "`pardnn`, which `auto` tries first, under two of six limits per graph, 0.9 / K to 1.1",
            "of the peak of one device. Mixed: views, in-place writes, workspace and co-located",
            "ops at random. Packable: the residual groups, largest first, fit into the limit less",
            "the transient peak of one device. A witness names the device, the op and what no plan",
            "can do without.",
            "", *table(head, body)]  # fmt: skip


def _memory(report: Report) -> list[str]:
    rows = report["memory"]
    if not rows:
        return []
    found = memory_summary(rows)
    body = [
        [row["graph"], row["devices"],
         *(_number(t["makespan_s"] and t["makespan_s"] * 1e3) for t in row["tried"])]
        for row in rows
    ]  # fmt: skip
    head = ["graph", "K", *(f"limit {i + 1}" for i in range(len(rows[0]["tried"])))]
    return ["", "## More memory", "",
            "Makespan of `auto`, ms, under limits rising geometrically from 0.9 / K to 1.1 of the",
            f"peak of one device. {found['plans']} plans, {found['over_limit']} over their limit;",
            f"more memory was slower in {found['slower']} of {found['steps']} steps, by at most",
            f"{found['most']:.2%}.", "", *table(head, body)]  # fmt: skip


def _topologies(report: Report) -> list[str]:
    rows = report["topologies"]
    if not rows:
        return []
    names = list(rows[0]["by"])
    body = [
        [row["cluster"], row["graph"],
         *(_number(row["by"][name].get("over_bound", math.nan)) for name in names)]
        for row in rows
    ]  # fmt: skip
    return ["", "## Unlike links and devices", "",
            "Makespan / lower bound. Islands: 300 GB/s, 10 us within, 25 GB/s, 50 us between;",
            "with a cpu, it alone runs every 50th op.", "",
            *table(["cluster", "graph", *names], body)]  # fmt: skip


def _scale(report: Report) -> list[str]:
    rows = report["scale"]
    body = [
        [row["ops"], f"{row['planning_s']:.3f}", f"{row['bottom_level_pass_s']:.5f}",
         f"{row['planning_s'] / row['bottom_level_pass_s']:.0f}"]
        for row in rows
    ]  # fmt: skip
    return ["", "## Time of `pardnn` against size, layered graphs, K = 16", "",
            *table(["ops", "planning, s", "one bottom-level pass, s", "ratio"], body)]  # fmt: skip


def picture(report: Report) -> str:
    """Return an SVG: a row per algorithm, a dot per CCR at the mean of makespan / bound."""
    rows: dict[str, dict[str, float]] = {name: {} for name in report["algorithms"]}
    for ccr in sorted({row["target_ccr"] for row in report["rows"]}):
        those = [row for row in report["rows"] if row["target_ccr"] == ccr]
        for name, dots in rows.items():
            mean = mean_ratio(those, name, None)
            if mean is not None:
                dots[f"CCR {ccr:g}"] = mean
    return dots_svg(
        "Makespan of each algorithm", "geometric means, simulated", rows,
        axis="makespan / lower bound",
    )  # fmt: skip
