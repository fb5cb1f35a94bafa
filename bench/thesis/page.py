"""The page of the thesis's tables: Markdown from the day's JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import geometric_mean
from typing import Any

from bench.common import CHARTS
from bench.common.charts import Line, lines_svg
from bench.thesis import published
from bench.thesis.notes import HEAD, disagreements
from bench.thesis.page_baselines import baselines_section, cut_section
from bench.thesis.published import DEVICES, MODELS
from bench.thesis.table import ALONE, Report, table


def _cell(row: dict[str, Any], k: int) -> dict[str, Any]:
    return row["cells"][str(k)]


def _alone(row: dict[str, Any], figure: str, form: str) -> str:
    """Return a figure of the thesis's steps alone, for each number of devices."""
    cells = row.get("thesis_cells", {}).values()
    return " ".join(form.format(cell[figure]) if figure in cell else "-" for cell in cells) or "-"


def _ideal(row: dict[str, Any]) -> tuple[int, int] | None:
    """Return the fewest devices on which the model fits, and the batch there."""
    found = [(k, _cell(row, k)["batch"]) for k in DEVICES]
    return next(((k, batch) for k, batch in found if batch), None)


def _largest(report: Report) -> Iterator[str]:
    yield "## Table 6.1: the largest batch (simulated)\n"
    yield (
        "Powers of two; in brackets the thesis's number (V100 32 GB, TensorFlow 1.14). *Over DP*: "
        "on 16 devices, how many times the batch of ideal data parallelism, which multiplies the "
        "batch of the fewest devices on which the model fits at all; in brackets the thesis's.\n"
    )
    rows = []
    for name, row in report["search"].items():
        theirs, first = MODELS[name].batch, _ideal(row)
        alone = [str(cell["batch"] or "none") for cell in row.get("thesis_cells", {}).values()]
        cells = [f"{_cell(row, k)['batch'] or 'none'} ({theirs.get(k, '-')})" for k in DEVICES]
        over = (
            "" if first is None else f"{_cell(row, 16)['batch'] / (first[1] * 16 / first[0]):.2g}"
        )
        least = min(theirs)
        theirs_over = theirs[16] / (theirs[least] * 16 / least)
        over = f"{over} ({theirs_over:.2g})"
        rows.append([name, row["ops"], *cells, over, " ".join(alone) or "-"])
    head = ["model", "ops", *(f"K = {k}" for k in DEVICES), "over DP", ALONE]
    yield from table(head, rows)
    yield from _alone_batches(report)


def _alone_batches(report: Report) -> Iterator[str]:
    """Say how the batches of the thesis's steps alone compare, from the figures."""
    pairs = [
        (f"{name} on {k}", _cell(row, int(k))["batch"], cell["batch"])
        for name, row in report["search"].items()
        for k, cell in row.get("thesis_cells", {}).items()
    ]
    if not pairs:
        return
    same = sum(ours == alone for _, ours, alone in pairs)
    text = f"The thesis's steps alone ({ALONE}) fit the same batch in {same} of {len(pairs)} cells"
    for word, is_it in (("a smaller", lambda a, b: b < a), ("a larger", lambda a, b: b > a)):
        found = [
            f"{where} ({b or 'none'} of {a or 'none'})" for where, a, b in pairs if is_it(a, b)
        ]
        text += f"; {word} one in {len(found)}" + (f": {', '.join(found)}" if found else "")
    yield text + ".\n"


def _speedups(row: dict[str, Any]) -> dict[int, float]:
    first = _ideal(row)
    if first is None:
        return {}
    base = _cell(row, first[0])["samples_per_s"]
    return {
        k: _cell(row, k)["samples_per_s"] / base
        for k in DEVICES
        if "samples_per_s" in _cell(row, k)
    }


def _throughput(report: Report) -> Iterator[str]:
    yield "## Fig. 6.1: throughput at those batches (simulated)\n"
    yield (
        "Samples per second, in brackets the speed-up over the fewest devices that train the "
        "model. The thesis draws its speed-ups and prints no numbers.\n"
    )
    rows = []
    for name, row in report["search"].items():
        ups = _speedups(row)
        rates = [
            f"{_cell(row, k)['samples_per_s']:.1f} ({ups[k]:.2f})" if k in ups else "-"
            for k in DEVICES
        ]
        rows.append([name, *rates, _alone(row, "samples_per_s", "{:.1f}")])
    yield from table(["model", *(f"K = {k}" for k in DEVICES), ALONE], rows)
    yield f"![Speed-up]({CHARTS}/{report['date']}_thesis_speedup.svg)\n"
    yield f"![Largest batch]({CHARTS}/{report['date']}_thesis_batch.svg)\n"


def _given(report: Report) -> Iterator[str]:
    yield "## Fig. 6.1 again, at the thesis's own batches (simulated)\n"
    yield (
        "Speed-up in samples per second over the fewest devices of the thesis's table, at its "
        "batch there: what of its speed-up is utilisation, as a larger batch fills each device.\n"
    )
    rows, shares = [], []
    for name, row in report["given"].items():
        cells = {int(k): cell for k, cell in row["cells"].items()}
        base = cells[min(cells)].get("samples_per_s")
        ups = [
            f"{cells[k]['samples_per_s'] / base:.2f} (batch {cells[k]['batch']})"
            if k in cells and base and "samples_per_s" in cells[k]
            else "-"
            for k in DEVICES
        ]
        moved = [c["moved"] / row["ops"] for k, c in cells.items() if k > 1 and "moved" in c]
        shares += moved
        shown = " ".join(f"{share:.0%}" for share in moved)
        rows.append([name, *ups, shown, _alone(row, "samples_per_s", "{:.1f}")])
    head = ["model", *(f"K = {k}" for k in DEVICES), "moved ops, K from 2", ALONE + ", samples/s"]
    yield from table(head, rows)
    mean = sum(shares) / max(len(shares), 1)
    yield f"At these batches the memory step moves {mean:.1%} of the ops on average.\n"


def _shapes(report: Report) -> Iterator[str]:
    yield "## Fig. 6.2: degree of parallelism, and CCR (simulated)\n"
    yield (
        "At the thesis's 4-GPU batch sizes. CCR counts every edge over NVSwitch, before placement. "
        f"The thesis states a CCR of {published.CCR['TRN']} for TRN and {published.CCR['WRN']} for "
        "WRN, and for Word-RNN "
        f"{published.CCR_WORD_RNN[256]} at a batch of 256 and {published.CCR_WORD_RNN[2048]} at "
        "2048.\n"
    )
    rows = [
        [key.split(",")[0], row["batch"], row["ops"], f"{row['dop']:.2f}", f"{row['ccr']:.2f}"]
        for key, row in report["shapes"].items()
    ]
    yield from table(["model", "batch", "ops", "parallelism", "CCR"], rows)


def _steps(report: Report) -> Iterator[str]:
    rows = report["steps"].values()
    yield "## Fig. 6.6: the steps of the algorithm against round robin (simulated)\n"
    yield (
        "Without memory limits, at the thesis's batch for K. Makespans over the lower bound. "
        "*Mapped*: slicing and mapping; *refined*: with the thesis's swaps and switches; "
        f"*{ALONE}*: the same, every swap and switch kept, ops run first come, first served, as in "
        "TensorFlow; *ParDNN*: with the list scheduling that this implementation adds.\n"
    )
    found = [
        [
            key, f"{row['bound_s']:.3f}",
            *(f"{row[part] / row['bound_s']:.3f}" for part in
              ("serial_s", "round_robin_s", "mapped_s", "refined_s")),
            f"{row['thesis_s'] / row['bound_s']:.3f}" if "thesis_s" in row else "-",
            f"{row['pardnn_s'] / row['bound_s']:.3f}",
        ]
        for key, row in report["steps"].items()
    ]  # fmt: skip
    columns = ["model, K", "bound, s", "one device", "round robin", "mapped", "refined"]
    columns += [ALONE, "ParDNN"]
    yield from table(columns, found)
    over = geometric_mean(row["round_robin_s"] / row["pardnn_s"] for row in rows)
    refined = geometric_mean(row["round_robin_s"] / row["refined_s"] for row in rows)
    gains = sorted(row["mapped_s"] / row["refined_s"] - 1 for row in rows)
    low, high = published.REFINEMENT
    yield (
        f"Round robin takes {over:.2f} times as long as ParDNN in the geometric mean, "
        f"{refined:.2f} times as long as *refined* (thesis: {published.OVER_ROUND_ROBIN:g}). The "
        f"thesis's refinement is worth {gains[0]:.1%} to {gains[-1]:.1%} here (thesis: {low:.0%} "
        f"to {high:.0%}).\n"
    )


def _clustering(report: Report) -> Iterator[str]:
    yield "## Fig. 6.7: against linear clustering (simulated makespans, measured CPU seconds)\n"
    yield (
        "Both without memory limits; ParDNN's order is that of the largest bottom level, linear "
        "clustering's that of the earliest estimated start. Linear clustering is this "
        "repository's, which repairs levels instead of computing them anew: it is far faster than "
        "the published one. The thesis: "
        + "; ".join(
            f"{name} {ours:g} s against {theirs:g} s"
            for name, (ours, theirs) in published.CLUSTERING_S.items()
        )
        + f", makespan at most {published.OVER_CLUSTERING} of linear clustering's.\n"
    )
    rows = [
        [
            key, row["ops"], f"{row['pardnn_s'] / row['clustering_s']:.4f}",
            f"{row['refined_s'] / row['clustering_s']:.4f}",
            f"{row['thesis_s'] / row['clustering_s']:.4f}" if "thesis_s" in row else "-",
            f"{row['pardnn_cpu_s']:.2f}", f"{row['clustering_cpu_s']:.2f}",
        ]
        for key, row in report["steps"].items()
    ]  # fmt: skip
    columns = ["model, K", "ops", "ParDNN / LC", "refined / LC", f"{ALONE} / LC"]
    yield from table([*columns, "ParDNN, s", "LC, s"], rows)
    yield from _losses(report)


#: Ratio up to which two makespans count as equal on the page.
EQUAL = 1.0005


def _losses(report: Report) -> Iterator[str]:
    """Say where the thesis's steps are slower than linear clustering, from the figures."""
    rows = {key: row for key, row in report["steps"].items() if "thesis_s" in row}
    if not rows:
        return
    means = {}
    labels = {
        "refined_s": "The thesis's partition, ordered by bottom levels (*refined*)",
        "thesis_s": f"The same first come, first served, all swaps and switches kept ({ALONE})",
        "pardnn_s": "ParDNN",
    }
    for part, label in labels.items():
        over = {key: row[part] / row["clustering_s"] for key, row in rows.items()}
        means[part] = geometric_mean(over.values())
        slower = [f"{key} ({ratio:.3f})" for key, ratio in over.items() if ratio > EQUAL]
        where = f": {'; '.join(slower)}" if slower else ""
        yield (
            f"- {label} takes {means[part]:.3f} times what linear clustering takes in the "
            f"geometric mean, and is slower in {len(slower)} of {len(rows)} rows{where}."
        )
    yield (
        f"\nSo of ParDNN's lead the thesis's clusters have {1 - means['refined_s']:.1%}; list "
        "scheduling from them and from other starts, which is this implementation's, has "
        f"{1 - means['pardnn_s'] / means['refined_s']:.1%} of what is left. First come, first "
        f"served costs {means['thesis_s'] / means['refined_s'] - 1:.1%}.\n"
    )


def _planning(report: Report) -> Iterator[str]:
    yield "## Planning time and moved ops (measured CPU seconds, one core)\n"
    yield (
        "Of the plans of Table 6.1, memory step included. The thesis: "
        + ", ".join(f"{seconds:g} s ({what})" for what, seconds in published.PLANNING_S.items())
        + f", and {published.MOVED:.0%} of the ops moved on average.\n"
    )
    rows, shares = [], []
    for name, row in report.get("search", {}).items():
        cells = [_cell(row, k) for k in DEVICES]
        times = [f"{c['cpu_s']:.1f}" if "cpu_s" in c else "-" for c in cells]
        moved = [c["moved"] / row["ops"] for c in cells[1:] if "moved" in c]
        shares += moved
        shown = " ".join(f"{share:.1%}" for share in moved)
        alone = _alone(row, "cpu_s", "{:.1f}")
        rows.append([name, f"{row['ops']} ({MODELS[name].ops})", *times, shown, alone])
    head = ["model", "ops (thesis)", *(f"K = {k}" for k in DEVICES), "moved ops, K from 2"]
    head += [ALONE + ", s"]
    yield from table(head, rows)
    if shares:
        yield f"Moved by the memory step on average: {sum(shares) / len(shares):.1%} of the ops.\n"


def _unrolled(report: Report) -> Iterator[str]:
    yield "## Planning time at the thesis's number of ops (measured CPU seconds, one core)\n"
    yield (
        "ATen makes fewer ops of a model than TensorFlow 1.14; here several training steps in a "
        "row are planned as one graph. *Limited*: with the memory step.\n"
    )
    rows = []
    for key, row in report["unrolled"].items():
        kinds = (row["free"], row["limited"], row["clustering"], row.get("thesis"))
        times = [
            f"{kind['cpu_s']:.1f}" + (" (no plan)" if "error" in kind else "") if kind else "-"
            for kind in kinds
        ]
        rows.append(
            [key, row["batch"], row["steps"], f"{row['ops']} ({row['thesis_ops']})", *times]
        )
    head = ["model, K", "batch", "steps", "ops (thesis)", "free, s", "limited, s", "LC, s"]
    head += [ALONE + ", limited, s"]
    yield from table(head, rows)


SECTIONS: tuple[tuple[str, Callable[[Report], Iterator[str]]], ...] = (
    ("search", _largest),
    ("search", _throughput),
    ("given", _given),
    ("shapes", _shapes),
    ("steps", _steps),
    ("steps", _clustering),
    ("search", _planning),
    ("unrolled", _unrolled),
    ("baselines", baselines_section),
    ("cut", cut_section),
)


def _in_order(rows: dict[str, Any]) -> dict[str, Any]:
    """Sort rows by model and what follows its name: they may have been measured in any order."""
    names = list(MODELS)

    def place(key: str) -> tuple[int, int]:
        name, _, number = key.partition(", ")
        return names.index(name), int(number or 0)

    return {key: rows[key] for key in sorted(rows, key=place)}


def _missing(report: Report) -> str:
    gaps = [
        f"{part}: {', '.join(left) if len(left) < len(MODELS) else 'all'}"
        for part in ("search", "given", "shapes", "steps", "baselines")
        if (left := [n for n in MODELS if n not in {k.split(",")[0] for k in report.get(part, {})}])
    ]
    return f"Not measured on this page: {'; '.join(gaps)}.\n" if gaps else ""


def page(report: Report) -> str:
    """Return the page of what has been measured."""
    report = report | {part: _in_order(report[part]) for part, _ in SECTIONS if part in report}
    lines = [f"# The ParDNN thesis, regenerated, {report['date']}", ""]
    lines += [f"`{report['command']}`; {report['machine']}.", "", HEAD, _missing(report)]
    lines += [report["note"] + "\n"] if "note" in report else []
    for part, section in SECTIONS:
        if part in report:
            lines += section(report)
    spent = sum(row["cpu_s"] for part in report.values() if isinstance(part, dict)
                for row in part.values())  # fmt: skip
    lines += [disagreements(report), f"All of it took {spent / 60:.1f} CPU minutes."]
    return "\n".join(lines) + "\n"


def pictures(report: Report) -> dict[str, str]:
    """Return the pictures by name: the largest batch, and the speed-up, of use case 1."""
    rows = [(name, row) for name, row in report.get("search", {}).items() if "-2" not in name]
    if not rows:
        return {}
    batch, speed = [], []
    for i, (name, row) in enumerate(rows):
        ours = {k: _cell(row, k)["batch"] for k in DEVICES if _cell(row, k)["batch"]}
        batch += [Line(name, ours, i), Line(name, MODELS[name].batch, i, dashed=True, named=False)]
        speed.append(Line(name, _speedups(row), i))
    speed.append(Line("ideal", {k: float(k) for k in DEVICES}, 6, dashed=True))
    simulated = "V100 32 GB, simulated; "
    return {
        "batch": lines_svg(
            "Largest batch that fits", f"{simulated}dashed: ParDNN thesis, Table 6.1",
            [line for line in batch if line.points], axes=("devices", "samples"), base=2,
        ),
        "speedup": lines_svg(
            "Throughput over the fewest devices that train the model",
            f"{simulated}at the largest batch that fits; dashed: as many times as devices",
            [line for line in speed if line.points], axes=("devices", "speed-up"), base=2,
        ),
    }  # fmt: skip
