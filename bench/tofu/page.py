"""The page of `python -m bench tofu`: tables, pictures, and why some figures differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bench.common import CHARTS
from bench.common.charts import Bar, bars_svg
from bench.tofu.figure_11 import picture, section
from bench.tofu.notes import PUBLISHED_RATE, notes

Row = Mapping[str, Any]

USABLE = 12 * 2**30
#: Steps up to this ratio count as equal in what is said of them.
EQUAL = 0.995
#: Seconds of the search that Table 1 of the paper prints, with recursion and without.
PUBLISHED_S = {"wresnet_152_10": (8.3, "8 hours"), "rnn_10_8k": (66.6, "over 24 hours")}
BARS = ("ideal", "small batch", "swapping", "tofu", "operator placement")

_HEAD = """\
Wang, Huang, Li, *Supporting Very Large Models using Automatic Dataflow Graph Partitioning*
(EuroSys 2019), section 7, on 8 K80s of 12 GiB with 21 GB/s between any two. **Simulated** with
roofline costs, all but the seconds of planning and search, which are CPU seconds measured here.
"""

_MODELS = """\
Samples/s, in brackets the share of *ideal* and the batch. *Ideal*: one device of
unlimited memory with the whole batch of 128 images or 512 sentences, times eight. *Small batch*:
replicas with an eighth of the batch, or what fits. *Swapping*: up to 8 devices share 10 GB/s to
the host. *Placement*: layers dealt out to devices. `bench/tofu/models.py` says the rest.
"""


def page(report: Row) -> str:
    """Return the results as Markdown."""
    lines = ["# Tofu's tables and figures, in simulation", ""]
    lines += [f"`{report['command']}`, {report['date']}; {report['machine']}.", "", _HEAD]
    lines += [report["note"], ""] if "note" in report else []
    models = list(report.get("models", {}).values())
    for number, kind in ((8, "wresnet"), (9, "rnn")):
        rows = [row for row in models if row["graph"].startswith(kind)]
        lines += _figure(number, rows, report["date"]) if rows else []
    lines += _rates(report.get("models", {}))
    for row in report.get("plans", {}).values():
        lines += _plans(row)
    for row in report.get("figure-11", {}).values():
        lines += section(row["rows"], f"{CHARTS}/{report['date']}_tofu_partition.svg")
    lines += _search(list(report.get("search", {}).values()))
    parts = [part for part in ("models", "plans", "figure-11", "search") if part in report]
    total = sum(row["cpu_s"] for part in parts for row in report[part].values())
    lines += ["", *(notes(report["models"]) if "models" in report else []), ""]
    lines += [f"All of it took {total / 60:.1f} CPU minutes."]
    return "\n".join(lines) + "\n"


def pictures(report: Row) -> dict[str, str]:
    """Return the pictures by name."""
    found: dict[str, str] = {}
    for kind, title, systems in (
        ("wresnet", "Figure 8: WResNet-depth-width", BARS[:-1]),
        ("rnn", "Figure 9: RNN-layers-hidden", BARS),
    ):
        rows = [row for row in report.get("models", {}).values() if row["graph"].startswith(kind)]
        if rows:
            note = "8 K80s, simulated; throughput relative to ideal, on the bars samples/s"
            bars = {system: [_bar(row, system) for row in rows] for system in systems}
            found[kind] = bars_svg(title, note, [row["graph"] for row in rows], bars)
    for row in report.get("figure-11", {}).values():
        found["partition"] = picture(row["rows"], tuple(row["mesh"]))
    return found


def _bar(row: Row, system: str) -> Bar:
    if "error" in row[system]:
        return Bar(0.0, "OOM")
    rate = row[system]["samples_per_s"]
    return Bar(rate / row["ideal"]["samples_per_s"], f"{rate:.3g}")


def _figure(number: int, rows: Sequence[Row], date: str) -> Iterator[str]:
    systems = [system for system in BARS if system in rows[0]]
    yield from (f"## Figure {number}: throughput (simulated)", "")
    if number == 8:
        yield _MODELS
    yield "| model | ops | " + " | ".join(systems) + " | Tofu / best other |"
    yield "| --- " * (len(systems) + 3) + "|"
    for row in rows:
        others = [
            row[system].get("samples_per_s", 0.0)
            for system in systems
            if system not in ("ideal", "tofu")
        ]
        ahead = row["tofu"].get("samples_per_s", 0.0) / max(others)
        cells = [_cell(row[system], row["ideal"]["samples_per_s"]) for system in systems]
        yield f"| {row['graph']} | {row['ops']} | {' | '.join(cells)} | {ahead:.2f} |"
    name = "wresnet" if number == 8 else "rnn"
    yield from ("", f"![Figure {number}]({CHARTS}/{date}_tofu_{name}.svg)", "")


def _cell(found: Row, ideal: float) -> str:
    if "error" in found:
        return "out of memory"
    devices = f" on {found['devices']}" if found.get("devices", 8) < 8 else ""
    share = found["samples_per_s"] / ideal
    return f"{found['samples_per_s']:.3g} ({share:.0%}, {found['batch']}{devices})"


def _rates(models: Mapping[str, Row]) -> Iterator[str]:
    there = [name for name in PUBLISHED_RATE if name in models]
    if not there:
        return
    yield "Samples/s of RNNs of 4K here (simulated) and in the paper's Table 3 (measured there):"
    yield from ("", "| model | Tofu | Tofu, paper | placement | placement, paper |")
    yield "| --- | --- | --- | --- | --- |"
    for name in there:
        ours = [models[name][system].get("samples_per_s", 0.0) for system in ("tofu", BARS[-1])]
        tofu, placed = PUBLISHED_RATE[name]
        yield f"| {name} | {ours[0]:.0f} | {tofu} | {ours[1]:.0f} | {placed} |"
    yield ""


def _plans(row: Row) -> Iterator[str]:
    yield f"## Figure 10: {row['graph']}, batch {row['batch']}, {row['ops']} ops (simulated)"
    columns = ("algorithm, objective", "step, s", "computing, s", "waiting, s", "of ideal",
               "GB sent", "peak, GiB", "all fetches kept, GiB", "plan, s")  # fmt: skip
    yield from ("", "| " + " | ".join(columns) + " |")
    yield "| --- " * len(columns) + "|"
    for found in row["rows"]:
        yield _line(found, row["ideal_s"])
    yield from ("", f"*Ideal*, an eighth of the ops' seconds in all: {row['ideal_s']:.3f} s.")
    yield "*Waiting*: what the step takes more than over links that cost nothing. *All fetches"
    yield "kept*: the peak, and an eighth of what is sent, as if nothing received were freed within"
    yield from ("the step.", "", *_figure_10(row), "")


def _line(found: Row, ideal: float) -> str:
    if "error" in found:
        return f"| {found['algorithm']} | {found['error'][:80]} | | | | | | | |"
    waiting = found["step_s"] - found["compute_s"]
    over = " (does not fit)" if found["peak_bytes"] > USABLE else ""
    return (
        f"| {found['algorithm']} | {found['step_s']:.3f} | {found['compute_s']:.3f} | "
        f"{waiting:.3f} | {ideal / found['step_s']:.0%} | {found['transfer_bytes'] / 1e9:.1f} | "
        f"{found['peak_bytes'] / 2**30:.1f}{over} | {_kept(found) / 2**30:.1f} | "
        f"{found['planning_s']:.1f} |"
    )


def _kept(found: Row) -> float:
    """Return the bytes of a device that frees nothing it receives within the step."""
    return found["peak_bytes"] + found["transfer_bytes"] / 8


def _figure_10(row: Row) -> Iterator[str]:
    """Yield where this differs from the paper's Fig. 10, from the figures."""
    rows = [found for found in row["rows"] if "error" not in found]
    cut = {f["algorithm"].removesuffix(", bytes"): f for f in rows if "bytes" in f["algorithm"]}
    tofu = cut.get("tofu")
    if tofu is None:
        return
    faster = [n for n, found in cut.items() if found["step_s"] < EQUAL * tofu["step_s"]]
    least = min(cut.values(), key=lambda found: found["transfer_bytes"])
    if faster and least is tofu:
        listed = "; ".join(
            f"`{name}` computes {cut[name]['compute_s'] - tofu['compute_s']:+.3f} s, waits "
            f"{_waits(cut[name]) - _waits(tofu):+.3f} s beside `tofu`"
            for name in faster
        )
        yield (
            "- All under one objective, `bytes`: `tofu` sends the least and is slower than "
            f"{', '.join(f'`{name}`' for name in faster)} all the same ({listed}). Bytes are no "
            "seconds: this objective counts neither what a cut op computes nor which message is "
            "waited for. Under `seconds`, the default, it counts both."
        )
    fit = [name for name in ("allrow-greedy", "icml18") if name in cut]
    if row["graph"].startswith("wresnet") and all(cut[n]["peak_bytes"] <= USABLE for n in fit):
        kept = ", ".join(f"`{name}` {_kept(cut[name]) / 2**30:.1f}" for name in ("tofu", *fit))
        yield (
            "- `allrow-greedy` and `icml18` run out of memory in the paper and fit here: plans "
            "fetch late and free what was fetched after its last use. An engine that kept all "
            f"fetches would need, in GiB of 12: {kept}. The paper says that MXNet's scheduler "
            "fetched much earlier than required (section 6); that this is the cause was not tested."
        )


def _waits(found: Row) -> float:
    return found["step_s"] - found["compute_s"]


def _search(rows: Sequence[Row]) -> Iterator[str]:
    if not rows:
        return
    yield "## Table 1: seconds of the search on 8 devices (measured)"
    yield from (
        "",
        "*First*: nothing is known of the graph's calls; *again*: that is kept. *Recursion alone*:",
        "one mesh axis after the other, as in the paper, nothing else. *Without recursion*: all",
        "three axes in one dynamic program over the coarse graph, in a process that is ended at a",
        "limit; *inexact*: a table would have had over 2 million entries, so a variable was fixed.",
        "In brackets GB that are moved.",
    )
    head = ["graph", "ops", "first, s", "again, s", "GB", "recursion alone, s"]
    head += ["without recursion, s", "paper, s", "paper, without recursion"]
    yield from ("", "| " + " | ".join(head) + " |")
    yield "| --- " * len(head) + "|"
    for row in rows:
        paper, without = PUBLISHED_S.get(row["graph"], ("", ""))
        found = [_of_search(row.get(kind)) for kind in ("recursion", "together")]
        cells = [row["graph"], row["ops"], f"{row['first_s']:.2f}", f"{row['best_s']:.2f}"]
        cells += [f"{row['GB']:.2f}", *found, paper, without]
        yield "| " + " | ".join(map(str, cells)) + " |"


def _of_search(found: Row | None) -> str:
    if found is None:
        return ""
    if "error" in found:
        return found["error"]
    return f"{found['s']:.2f} ({found['GB']:.2f}{'' if found['is_exact'] else ', inexact'})"
