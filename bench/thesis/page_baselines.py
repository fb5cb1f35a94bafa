"""The page of the thesis's tables: what ParDNN is compared with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bench.thesis.table import ALONE, Report, table


def baselines_section(report: Report) -> Iterator[str]:
    """Yield Figs. 6.3 to 6.5."""
    yield "## Figs. 6.3 to 6.5: against baselines (simulated)\n"
    yield (
        "ParDNN's samples/s over the baseline's at the thesis's batch for K; *OOM*: the baseline "
        "does not fit. `bench/thesis/baselines.py` says how each is modelled.\n"
    )
    yield from _replicas(report)
    kinds = ("tensor-parallel", "checkpointing", "data-parallel", "unified-memory")
    state = report.get("replicas", {})
    rows = [
        [key, row["batch"], f"{row['pardnn'].get('samples_per_s', 0):.1f}",
         f"{row.get('pardnn-thesis', {}).get('samples_per_s', 0):.1f}",
         *(_over(row, kind, state.get(key.split(",")[0])) for kind in kinds)]
        for key, row in report["baselines"].items()
    ]  # fmt: skip
    head = ["model, K", "batch", "ParDNN, samples/s", ALONE + ", samples/s"]
    head += ["tensor parallel by hand"]
    head += ["checkpointing + DP", "DP alone", "unified memory"]
    yield from table(head, rows)


def _replicas(report: Report) -> Iterator[str]:
    """Say which models no checkpointing fits into a replica: their state alone is too large."""
    rows = report.get("replicas", {})
    if not rows:
        return
    full = [
        f"{name} ({row['bytes'] / 2**30:.1f} GiB)"
        for name, row in rows.items()
        if row["bytes"] > row["usable_bytes"]
    ]
    usable = next(iter(rows.values()))["usable_bytes"] / 2**30
    kept = [n for n in rows if any("checkpointing" in r for k, r in report["baselines"].items()
                                   if k.split(",")[0] == n)]  # fmt: skip
    others = [n for n in rows if n not in kept and rows[n]["bytes"] <= rows[n]["usable_bytes"]]
    yield (
        "Fig. 6.4, and its claim that checkpointing runs out of memory with one sample: it holds "
        f"where a replica's parameters and optimizer state alone exceed {usable:.1f} GiB, whatever "
        f"is computed twice (*OOM (state)*): {', '.join(full) or 'no model'}. Checkpointed steps "
        f"were captured of {', '.join(kept) or 'none'}; of {', '.join(others) or 'none'}, whose "
        "state fits, they were not, so that nothing is said of them (*-*).\n"
    )


def _over(row: dict[str, Any], kind: str, state: dict[str, Any] | None) -> str:
    baseline = row.get(kind)
    if baseline is None:
        is_full = kind == "checkpointing" and state and state["bytes"] > state["usable_bytes"]
        return "OOM (state)" if is_full else "-"
    if "error" in baseline:
        return "OOM"
    ours = baseline.get("pardnn", row["pardnn"])
    if "error" in ours:
        return "ParDNN: none"
    batch = f" (batch {baseline['batch']})" if "batch" in baseline else ""
    return f"{ours['samples_per_s'] / baseline['samples_per_s']:.2f}{batch}"


def cut_section(report: Report) -> Iterator[str]:
    """Yield the comparison of placed with cut plans."""
    yield "## Beyond the thesis: every op cut instead of placed (simulated)\n"
    yield (
        "At the thesis's batch for K, under the same limits. *Cut*: `tofu` by seconds, the other "
        "half of this tool, which `auto` takes where it is faster, up to 200,000 parts.\n"
    )
    rows = []
    for key, row in report["cut"].items():
        if "error" in row:
            cut = [row["error"][:60], "", "", "", ""]
        else:
            cut = [f"{row['cut']:.1f}", f"{row['cut'] / row['placed']:.2f}"]
            cut += [f"{row[name] / 2**30:.1f}" for name in ("placed_peak", "cut_peak")]
            cut += [f"{row['planning_cpu_s']:.0f}"]
        alone = f"{row['thesis']:.1f}" if row.get("thesis") else "-"
        rows.append([key, row["batch"], alone, f"{row['placed']:.1f}", *cut])
    head = [
        "model, K",
        "batch",
        ALONE + ", samples/s",
        "placed, samples/s",
        "cut, samples/s",
        "cut / placed",
    ]
    head += ["placed, GiB", "cut, GiB", "planning a cut, CPU s"]
    yield from table(head, rows)
