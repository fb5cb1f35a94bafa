"""The page of the fidelity bench."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]


#: Errors of a step time that are explained one by one.
FAR = 0.2
_EXPLAINED = """\
**Measured** step times and peaks beside the **simulated** ones. Step: the fastest of {steps} after
the first. *Predicted*: calls timed by as many processes side by side as compute at once, the cores
shared by the ranks, messages at what they take their ends (`pardnn.sim.shared_cores`); *simulator*:
the same costs simulated with a core for each rank and an idle link for each message.
*CPU*: processor time of all ranks together, which a busy machine changes little. Error:
predicted / measured - 1; of memory, on the rank where they differ most.
"""


def step_error(row: Row) -> float:
    """Return predicted / measured step time - 1."""
    return row["predicted_s"] / row["measured_s"] - 1


def simulator_error(row: Row) -> float:
    """Return the simulator's / measured step time - 1."""
    return row["simulated_s"] / row["measured_s"] - 1


def cpu_error(row: Row) -> float:
    """Return predicted / measured processor time of all ranks - 1."""
    return row["predicted_cpu_s"] / row["measured_cpu_s"] - 1


def peak_error(row: Row) -> float:
    """Return predicted / measured peak - 1 of the rank where they differ most."""
    pairs = zip(row["predicted_bytes"], row["measured_bytes"], strict=True)
    errors = [predicted / measured - 1 for predicted, measured in pairs if measured]
    return max(errors, key=abs, default=0.0)


def page(report: Row) -> str:
    """Return the results as Markdown."""
    rows, cores = report["rows"], report["cores"]
    lines = [f"# Fidelity, {report['date']}", "", f"`{report['command']}`;"]
    lines += [f"{report['machine']}, {cores} cores, links {report['link']}.", ""]
    lines += [_EXPLAINED.format(steps=report["steps"] - 1), *_load(report), "## Summary", ""]
    titles = ["runs", "number", "step, mean error", "worst", "simulator, mean", "CPU, mean"]
    titles += ["peak, mean", "worst"]
    lines += ["| " + " | ".join(titles) + " |", "| --- " * len(titles) + "|"]
    for ranks in sorted({row["ranks"] for row in rows}):
        lines += _summary([row for row in rows if row["ranks"] == ranks], _ranks(ranks))
    lines += _summary([row for row in rows if row["ranks"] <= cores], "a core for each rank")
    lines += _summary(rows, "all")
    lines += _worst(rows)
    columns = ["model", "ranks", "algorithm", "ops", "messages", "predicted, ms", "simulator, ms"]
    columns += ["measured, ms", "step error", "CPU predicted, ms", "measured, ms", "peak error"]
    lines += ["", "## Runs", "", "| " + " | ".join(columns) + " |", "| --- " * len(columns) + "|"]
    lines += [_line(row) for row in rows]
    lines += ["", f"All of it took {report['wall_s'] / 60:.1f} minutes."]
    return "\n".join(lines) + "\n"


def _ranks(count: int) -> str:
    return f"{count} rank" + "s" * (count > 1)


def _load(report: Row) -> Iterator[str]:
    if report["load_before"] > 1.0:  # what ended a minute ago still counts half
        yield (
            f"**The machine was busy**: its load was {report['load_before']:.1f} before anything "
            "ran here, so the step errors below tell little of the predictions. Peaks do not "
            "depend on the load."
        )
        yield ""


def _summary(rows: Sequence[Row], label: str) -> Iterator[str]:
    good = [row for row in rows if "error" not in row]
    if not good:
        return

    def mean(error: Callable[[Row], float]) -> str:
        return f"{sum(abs(error(row)) for row in good) / len(good):.1%}"

    def worst(error: Callable[[Row], float]) -> str:
        row = max(good, key=lambda row: abs(error(row)))
        return f"{error(row):+.1%} ({row['model']}, {row['ranks']}, {row['algorithm']})"

    yield (
        f"| {label} | {len(good)} | {mean(step_error)} | {worst(step_error)} | "
        f"{mean(simulator_error)} | {mean(cpu_error)} | {mean(peak_error)} | {worst(peak_error)} |"
    )


def _worst(rows: Sequence[Row]) -> Iterator[str]:
    """Say of the runs that are off most whether work or waiting was foretold wrongly."""
    far = [row for row in rows if "error" not in row and abs(step_error(row)) > FAR]
    if not far:
        return
    yield f"\n## Off by more than {FAR:.0%}\n"
    yield (
        "*Work*: the ranks' processor time is off by at least half as much, so messages or calls "
        "took other times than measured apart; *waits*: it is not, so the ranks waited longer or "
        "shorter for each other and for a core: the simulation shares cores evenly at every "
        "moment, the system in slices, after switches that it does not count.\n"
    )
    yield "| model, ranks, algorithm | step error | CPU error | what |\n| --- | --- | --- | --- |"
    for row in sorted(far, key=lambda row: -abs(step_error(row))):
        works = cpu_error(row) / step_error(row) >= 0.5
        yield (
            f"| {row['model']}, {row['ranks']}, {row['algorithm']} | {step_error(row):+.1%} | "
            f"{cpu_error(row):+.1%} | {'work' if works else 'waits'} |"
        )


def _line(row: Row) -> str:
    head = f"| {row['model']} | {row['ranks']} | {row['algorithm']} |"
    if "error" in row:
        return f"{head} {row['error']} | | | | | | | | |"
    times = (row["predicted_s"], row["simulated_s"], row["measured_s"])
    return (
        f"{head} {row['ops']} | {row['messages']} | "
        + " | ".join(f"{1e3 * seconds:.1f}" for seconds in times)
        + f" | {step_error(row):+.1%} | {1e3 * row['predicted_cpu_s']:.1f} | "
        f"{1e3 * row['measured_cpu_s']:.1f} | {peak_error(row):+.2%} |"
    )
