"""The tables of the page, as HTML: they need no script, and can be printed and read aloud."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from pardnn.report.page.contents import KINDS, PHASES, Report
from pardnn.report.text import escaped, percent_text, seconds_text
from pardnn.units import bytes_text

#: Devices up to which the matrix of messages is shown.
MOST_COLUMNS = 16
#: Rows of what is listed by size.
MOST_ROWS = 10
#: Without scripts: modules down to this depth.
SHOWN_DEPTH = 3


def html_table(caption: str, head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table; its first column is text, the others are numbers.

    Args:
        caption: What it shows.
        head: Of the columns.
        rows: A cell per column.
    """
    top = "".join(f'<th scope="col">{escaped(each)}</th>' for each in head)
    body = "\n".join(
        f'<tr><th scope="row">{escaped(str(row[0]))}</th>'
        + "".join(f"<td>{escaped(str(cell))}</td>" for cell in row[1:])
        + "</tr>"
        for row in rows
    )
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escaped(caption)}">'
        f"<table><caption>{escaped(caption)}</caption><thead><tr>{top}</tr></thead>\n"
        f"<tbody>\n{body}\n</tbody></table></div>"
    )


def figures(report: Report) -> str:
    """Return the few numbers that readers look for first."""
    times = report.times
    most = max(report.devices, key=lambda row: row.peak_bytes / (row.limit_bytes or 1 << 62))
    sent = sum(link.bytes for link in report.links)
    shown = [("step, simulated", seconds_text(times.makespan_s))]
    if times.serial_s and times.makespan_s:
        shown.append(("faster than one device", f"{times.serial_s / times.makespan_s:.2f} x"))
    peak = bytes_text(most.peak_bytes)
    limit = "" if most.limit_bytes is None else f" of {bytes_text(most.limit_bytes)}"
    shown += [(f"peak of {most.name}{limit}", peak), ("sent between devices", bytes_text(sent))]
    if times.lower_bound_s > 0:
        gap = percent_text(times.makespan_s / times.lower_bound_s - 1)
        shown.append(("above the lower bound", gap))
    cells = "".join(f"<div><dd>{escaped(v)}</dd><dt>{escaped(k)}</dt></div>" for k, v in shown)
    return f'<dl class="figures">{cells}</dl>'


def devices_table(report: Report) -> str:
    """Return what each device does, and what it waits for."""
    step = report.times.makespan_s or 1.0
    rows = [
        (
            row.name,
            f"{row.ops:,}",
            bytes_text(row.peak_bytes),
            bytes_text(row.usable_bytes),
            seconds_text(row.busy_s),
            percent_text(1 - row.busy_s / step),
            "; ".join(f"{seconds_text(seconds)} {what}" for what, seconds in row.waits) or "-",
        )
        for row in report.devices
    ]
    head = ("device", "ops", "peak", "usable", "busy", "idle", "waits for")
    return html_table("What each device does, and why it idles", head, rows)


def longest_ops(report: Report) -> str:
    """Return the ops that take longest."""
    bars = report.bars
    longest = sorted(range(len(bars.name)), key=lambda i: (-bars.seconds[i], i))[: 2 * MOST_ROWS]
    rows = [
        (
            bars.name[i],
            report.devices[bars.device[i]].name,
            PHASES[bars.phase[i]],
            seconds_text(bars.start_s[i]),
            seconds_text(bars.seconds[i]),
        )
        for i in longest
    ]
    return html_table("The longest ops", ("op", "device", "phase", "start", "time"), rows)


def peaks_table(report: Report) -> str:
    """Return what each device holds at its peak, by kind."""
    rows = [
        (
            row.name,
            *(bytes_text(held[chart.peak_at]) for held in chart.held or ((0,),) * len(KINDS)),
            bytes_text(row.peak_bytes),
            bytes_text(row.limit_bytes),
        )
        for row, chart in zip(report.devices, report.memory, strict=True)
    ]
    return html_table("What is held at each peak", ("device", *KINDS, "peak", "limit"), rows)


def modules_table(report: Report) -> str:
    """Return the upper part of the tree of modules."""
    rows = [
        (
            row.path or "the step",
            seconds_text(sum(row.phase_s)),
            bytes_text(row.state_bytes),
            bytes_text(row.made_bytes),
            ", ".join(report.devices[device].name for device in row.device_s),
            row.layout or "whole",
        )
        for row in report.modules
        if row.depth <= SHOWN_DEPTH
    ]
    head = ("module", "time", "weights and states", "activations", "devices", "layout")
    return html_table("Modules", head, rows)


def matrix_table(report: Report) -> str:
    """Return the bytes that each device sends to each other one."""
    if not report.links:
        return "<p>No messages: devices exchange nothing.</p>"
    if len(report.devices) > MOST_COLUMNS:
        rows = [
            (
                f"{report.devices[row.source].name} to {report.devices[row.target].name}",
                f"{row.messages:,}",
                bytes_text(row.bytes),
                seconds_text(row.critical_s),
            )
            for row in report.links[: 2 * MOST_ROWS]
        ]
        head = ("link", "messages", "bytes", "on the critical path")
        return html_table("The links that carry the most", head, rows)
    sent = {(row.source, row.target): row for row in report.links}
    names = [device.name for device in report.devices]
    rows = [
        (
            name,
            *(
                f"{bytes_text(sent[i, j].bytes)} ({sent[i, j].messages:,})"
                if (i, j) in sent
                else "-"
                for j in range(len(names))
            ),
        )
        for i, name in enumerate(names)
    ]
    head = ("from", *(f"to {name}" for name in names))
    return html_table("Bytes sent (and messages), from row to column", head, rows)


def largest_messages(report: Report) -> str:
    """Return the ten largest messages."""
    sent, names = report.messages, [device.name for device in report.devices]
    largest = sorted(range(len(sent.tensor)), key=lambda i: (-sent.bytes[i], i))[:MOST_ROWS]
    if not largest:
        return ""
    rows = [
        (
            sent.tensor[i],
            f"{names[sent.source[i]]} to {names[sent.target[i]]}",
            bytes_text(sent.bytes[i]),
            seconds_text(sent.start_s[i]),
            seconds_text(sent.seconds[i]),
            "yes" if sent.critical[i] else "no",
        )
        for i in largest
    ]
    head = ("tensor", "link", "bytes", "leaves at", "time", "critical")
    return html_table("The ten largest messages", head, rows)


def measured_tables(report: Report) -> Iterator[str]:
    """Yield measurements next to predictions: per device, and per call."""
    if report.measured is None:
        return
    rows = [
        (
            device.name,
            seconds_text(report.times.makespan_s),
            seconds_text(rank.step_s),
            seconds_text(device.busy_s),
            seconds_text(rank.busy_s),
            seconds_text(rank.waited_s),
            bytes_text(device.peak_bytes),
            bytes_text(rank.peak_bytes),
        )
        for device, rank in zip(report.devices, report.measured.ranks, strict=True)
    ]
    head = (
        "device", "step, simulated", "measured", "ops, simulated", "measured",
        "waits, measured", "peak, proven", "measured",
    )  # fmt: skip
    caption = f"Measured next to predicted: medians of {report.measured.steps} steps"
    yield html_table(caption, head, rows)
    calls = [
        (
            row.kind,
            f"{row.ops:,}",
            seconds_text(row.simulated_s),
            seconds_text(row.measured_s),
            f"{row.measured_s / row.simulated_s:.2f} x" if row.simulated_s else "-",
        )
        for row in report.measured.kinds
    ]
    head = ("call", "ops", "simulated", "measured", "ratio")
    yield html_table("The longest calls", head, calls)


def bounds_table(report: Report) -> str:
    """Return the bounds beside the plan."""
    times = report.times
    rows = [
        ("this plan", times.makespan_s),
        ("a step of many in a row (period)", times.period_s),
        ("no plan is faster than", times.lower_bound_s),
        ("one device", times.serial_s),
        ("ops on the critical path", times.critical_compute_s),
        ("messages on the critical path", times.critical_messages_s),
    ]
    shown = [
        (
            what,
            seconds_text(seconds),
            "-"
            if seconds is None or not times.makespan_s
            else percent_text(seconds / times.makespan_s),
        )
        for what, seconds in rows
    ]
    return html_table("Times", ("what", "seconds", "of the step"), shown)


def tried_table(report: Report) -> str:
    """Return how each algorithm fared; nothing if only one was asked for."""
    if not report.tried:
        return ""
    best = min((each.makespan_s for each in report.tried if each.makespan_s), default=None)
    rows = [
        (each.algorithm, each.why or "does not fit", "-")
        if each.makespan_s is None
        else (
            each.algorithm,
            seconds_text(each.makespan_s),
            f"{each.makespan_s / best:.3f} x" if best else "-",
        )
        for each in report.tried
    ]
    caption = "What was tried, simulated, before local search improved the best"
    return html_table(caption, ("algorithm", "step", "of the best"), rows)
