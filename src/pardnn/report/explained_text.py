"""Explanations as text."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Group, RenderableType

from pardnn import errors
from pardnn.report import explained as values
from pardnn.report.text import percent_text, seconds_text, table
from pardnn.units import bytes_text

#: Rows of a table that are shown; `--json` has all.
ROWS = 12
#: When most of a device's idle time is: its column does not say so.
USUAL = "between its ops"
#: Causes that a line names.
CAUSES = 5
#: Links of a chain that are shown.
LINKS = 8


def explained_text(result: values.Explained) -> RenderableType:
    """Return what `explain` found, as text."""
    result = printable(result)
    lines = _LINES[type(result)](result)
    return Group(*lines, *(f"note: {note}" for note in result.notes))


def printable(value: Any) -> Any:
    """Return a result whose names cannot act on a terminal: escapes and breaks are written out."""
    if isinstance(value, str):
        return errors.printable(value)
    if isinstance(value, tuple):
        return tuple(map(printable, value))
    if isinstance(value, dict):
        return {printable(key): printable(each) for key, each in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = (field.name for field in dataclasses.fields(value) if field.init)
        return dataclasses.replace(value, **{n: printable(getattr(value, n)) for n in fields})
    return value


def change_text(seconds: float | None, of: float) -> str:
    """Return a change such as "+1.2 ms (+3.4 %)".

    Args:
        seconds: The change.
        of: What changes, seconds.
    """
    if seconds is None:
        return "-"
    if seconds == 0:
        return "no change"
    sign = "+" if seconds > 0 else "-"
    share = f" ({sign}{percent_text(abs(seconds) / of)})" if of > 0 else ""
    return f"{sign}{seconds_text(abs(seconds))}{share}"


def bytes_change_text(num_bytes: int) -> str:
    """Return a change such as "-1.50 MiB"."""
    if num_bytes == 0:
        return "no change"
    return f"{'+' if num_bytes > 0 else '-'}{bytes_text(abs(num_bytes))}"


def alternatives_table(
    title: str, found: Sequence[values.Alternative], makespan: float
) -> Iterator[RenderableType]:
    """Yield what other decisions cost, and why some are not possible.

    Args:
        title: Stands above.
        found: The other decisions.
        makespan: Of the plan, seconds.
    """
    if not found:
        return
    rows = [
        (
            each.what,
            "not judged" if not each.judged else seconds_text(each.makespan_s),
            change_text(each.change_s, makespan),
            "-" if each.peak_bytes is None else bytes_text(max(each.peak_bytes)),
            "-" if each.transfer_bytes is None else bytes_text(each.transfer_bytes),
            "yes" if each.fits else "-" if not each.judged else "no",
        )
        for each in found
    ]
    yield table(title, ("", "step", "change", "largest peak", "sent", "fits"), rows)
    yield from (f"{each.what}: {each.why}" for each in found if each.why)


def _where(layer: str, source: str | None) -> str:
    """Return layer and line of the user's code, as far as they are known."""
    return ", ".join(text for text in (layer, source) if text) or "-"


def _line(source: str | None) -> str:
    """Return a line of the user's code for a narrow column: "gpt2.py:12"."""
    return (source or "-").rpartition("/")[2]


def _what(each: values.Wait | values.PathShare | values.Link) -> str:
    if each.what == "message":
        return f"message {each.device} to {each.target}"
    return f"{each.device} computes" if each.what == "compute" else f"order after {each.device}"


def _op(result: values.OpExplained) -> Iterator[RenderableType]:
    where = _where(result.layer, result.source)
    yield f"op {result.name}: {result.kind}, {where}"
    for call in result.calls:
        yield (
            f"{call.op} runs on {call.device} from {seconds_text(call.start_s)} to "
            f"{seconds_text(call.finish_s)} of {seconds_text(result.makespan_s)}"
        )
        yield from _chain(call)
    if result.num_calls > len(result.calls):
        yield f"and {result.num_calls - len(result.calls)} more calls of it"
    if result.moves_with:
        count, listed = len(result.moves_with), ", ".join(result.moves_with[:4])
        ops, more = "op" if count == 1 else "ops", ", ..." if count > 4 else ""
        yield f"moves with {count} other {ops}: {listed}{more}"[:200]
    yield from (f"constraint: {each}" for each in result.constraints)
    for name, words in result.layouts.items():
        yield f"{name} has the layout ({', '.join(words)})"
    yield from _held(result.memory, "what it makes, in memory")
    title = "otherwise" if result.layouts else "elsewhere"
    yield from alternatives_table(title, result.alternatives, result.makespan_s)


def _chain(call: values.Call) -> Iterator[RenderableType]:
    if not call.chain:
        yield "  it waits for nothing"
        return
    rows = [
        (
            f"  {_what(link)}",
            seconds_text(link.finish_s - link.start_s),
            f"until {seconds_text(link.finish_s)}",
            f"{link.op}{f' and {link.ops - 1} before it' if link.ops > 1 else ''}",
            link.why or _where(link.layer, link.source),
        )
        for link in call.chain[:LINKS]
    ]
    yield table("  it starts when the last of these has finished (latest first):", ("",) * 5, rows)
    if len(call.chain) > LINKS:
        yield f"  and {len(call.chain) - LINKS} more links, back to second 0"


def _held(found: Sequence[values.Held], title: str) -> Iterator[RenderableType]:
    if not found:
        return
    rows = [
        (
            each.tensor,
            each.device,
            bytes_text(each.bytes),
            each.kind,
            each.from_op or "before the step",
            each.last_reader or "it stays",
            "yes" if each.at_peak else "no",
        )
        for each in found[:ROWS]
    ]
    columns = ("tensor", "device", "bytes", "kind", "from", "until after", "in the peak")
    yield table(title, columns, rows)


def _tensor(result: values.TensorExplained) -> Iterator[RenderableType]:
    shape = "" if result.shape is None else f"{list(result.shape)} "
    dtype = "" if result.dtype is None else f"{result.dtype} "
    where = _where(result.layer, result.source)
    yield (
        f"tensor {result.name}: {dtype}{shape}{bytes_text(result.bytes)}, made by "
        f"{result.made_by}, {where}"
    )
    if result.layout:
        yield f"its layout is ({', '.join(result.layout)})"
    yield from _held(result.memory, "its memory")
    if result.messages:
        rows = [
            (
                f"{each.tensor} from {each.source} to {each.target}",
                bytes_text(each.bytes),
                f"{seconds_text(each.start_s)} to {seconds_text(each.finish_s)}",
                f"leaves {each.why}",
            )
            for each in result.messages[:ROWS]
        ]
        yield table("sent", ("", "", "", ""), rows)
    title = f"{result.made_by} elsewhere" if result.layout is None else "otherwise"
    yield from alternatives_table(title, result.alternatives, result.makespan_s)


def _device(result: values.DeviceExplained) -> Iterator[RenderableType]:
    share = result.idle_s / result.makespan_s if result.makespan_s else 0.0
    yield (
        f"device {result.name}: {result.ops} ops, busy {seconds_text(result.busy_s)}, idle "
        f"{seconds_text(result.idle_s)} ({percent_text(share)}) of "
        f"{seconds_text(result.makespan_s)} a step"
    )
    yield from _causes(result)
    waits = [
        (
            _what(each) if each.when == USUAL else f"{_what(each)}, {each.when}",
            seconds_text(each.seconds),
            percent_text(each.seconds / result.idle_s),
            each.op,
            each.layer,
            _line(each.source),
        )
        for each in result.waits[:ROWS]
    ]
    if waits:
        columns = ("it waits while", "seconds", "of idle", "most of it: op", "layer", "line")
        yield table("", columns, waits)
        rest = result.waits[ROWS:]
        if rest:
            yield f"and {len(rest)} more: {seconds_text(sum(each.seconds for each in rest))}"
    busy = [(each.layer or "-", seconds_text(each.seconds)) for each in result.layers[:ROWS]]
    if busy:
        yield table("it computes", ("layer", "seconds"), busy)
    yield from _device_memory(result.memory)


def _causes(result: values.DeviceExplained) -> Iterator[RenderableType]:
    """Yield in one line what it waits for, whatever the layer."""
    sums: dict[str, float] = {}
    for each in result.waits:
        sums[_what(each)] = sums.get(_what(each), 0.0) + each.seconds
    largest = sorted(sums, key=lambda what: -sums[what])[:CAUSES]
    said = [f"{what} {percent_text(sums[what] / result.idle_s)}" for what in largest]
    if said:
        yield f"it idles while: {', '.join(said)}"


def _device_memory(found: values.DeviceMemory) -> Iterator[RenderableType]:
    at = f", while {found.at_op} runs ({_where(found.layer, found.source)})" if found.at_op else ""
    yield (
        f"{found.device}: peak {bytes_text(found.peak_bytes)}, usable "
        f"{bytes_text(found.usable_bytes)}{at}"
    )
    held = [
        (f"  {each.layer or '-'}", each.kind, bytes_text(each.bytes), percent_text(
            each.bytes / found.peak_bytes))
        for each in found.held[:ROWS]
    ]  # fmt: skip
    if held:
        yield table("", ("  layer", "kind", "bytes", "of the peak"), held)
    rest = found.held[ROWS:]
    if rest:
        yield f"  and {len(rest)} more: {bytes_text(sum(each.bytes for each in rest))}"


def _layers(result: values.LayersExplained) -> Iterator[RenderableType]:
    worst = max(result.peak_bytes, default=0)
    yield (
        f"step {seconds_text(result.makespan_s)} simulated, largest peak {bytes_text(worst)}; "
        "half: the same plan with that layer's seconds and bytes halved (predicted)"
    )
    if result.subject != "layer":
        yield from _to_make_smaller(result, worst)
    rows = [
        (
            row.name,
            seconds_text(sum(row.seconds)),
            bytes_text(sum(row.held_bytes)),
            bytes_text(row.state_bytes),
            bytes_text(row.sent_bytes),
            change_text(row.half_change_s, result.makespan_s),
            bytes_change_text(max(row.half_peak_bytes, default=0) - worst),
        )
        for row in (result.rows if result.subject == "layer" else result.rows[: 2 * ROWS])
    ]
    columns = (
        "layer", "computes", "at peaks", "its state", "sends", "half: step", "half: largest peak"
    )  # fmt: skip
    yield table("", columns, rows)
    if result.subject == "layer":
        yield from _by_device(result)


def _to_make_smaller(result: values.LayersExplained, worst: int) -> Iterator[RenderableType]:
    """Yield which layer saves most time, and which most memory, when it is halved."""
    faster = min(result.rows, key=lambda row: row.half_change_s, default=None)
    smaller = min(result.rows, key=lambda row: max(row.half_peak_bytes, default=0), default=None)
    if faster is not None and faster.half_change_s < 0:
        change = change_text(faster.half_change_s, result.makespan_s)
        yield f"for time, make {faster.name} smaller: halving it changes the step by {change}"
    saved = 0 if smaller is None else max(smaller.half_peak_bytes, default=0) - worst
    if smaller is not None and saved < 0:
        change = bytes_change_text(saved)
        yield f"for memory, {smaller.name}: halving it changes the largest peak by {change}"


def _by_device(result: values.LayersExplained) -> Iterator[RenderableType]:
    row = result.rows[0]
    rows = [
        (
            device,
            seconds_text(row.seconds[i]),
            bytes_text(row.held_bytes[i]),
            f"{bytes_text(result.peak_bytes[i])} of {bytes_text(result.usable_bytes[i])}",
            bytes_change_text(row.half_peak_bytes[i] - result.peak_bytes[i]),
        )
        for i, device in enumerate(result.devices)
    ]
    yield table("", ("device", "computes", "at the peak", "peak", "half: peak"), rows)


def _memory(result: values.MemoryExplained) -> Iterator[RenderableType]:
    yield from _answer(result.anew)
    yield f"step {seconds_text(result.makespan_s)} simulated"
    for device in result.devices:
        yield from _device_memory(device)
    yield from alternatives_table("", result.anew, result.makespan_s)


def _answer(found: Sequence[values.Alternative]) -> Iterator[str]:
    """Say first what a change gains: a plan without it against one with it."""
    if len(found) != 2:
        return
    now, then = found
    before = seconds_text(now.makespan_s)
    change = then.what.removeprefix("planned again, ").rsplit(", by ", 1)[0]
    if now.makespan_s is None or then.makespan_s is None:
        unchanged = "" if then.makespan_s is None else " without this change"
        yield f"{change}: no plan was found that fits{unchanged}"
    elif then.makespan_s == now.makespan_s:
        yield f"{change}: no change, a step takes {before} (predicted)"
    else:
        steps = f"{seconds_text(then.makespan_s)} instead of {before}"
        brings = change_text(then.makespan_s - now.makespan_s, now.makespan_s)
        yield f"{change}: a step takes {steps}, {brings}, both planned again (predicted)"


def _time(result: values.TimeExplained) -> Iterator[RenderableType]:
    yield from _answer(result.anew)
    yield f"step {seconds_text(result.makespan_s)} simulated; what fills it from end to end:"
    rows = [
        (
            _what(each),
            seconds_text(each.seconds),
            percent_text(each.seconds / result.makespan_s),
            each.op,
            each.layer,
            _line(each.source),
        )
        for each in result.path[:ROWS]
    ]
    yield table("", ("", "seconds", "share", "most of it: op", "layer", "line"), rows)
    rest = result.path[ROWS:]
    if rest:
        yield f"and {len(rest)} more: {seconds_text(sum(each.seconds for each in rest))}"
    yield from alternatives_table("", result.faster, result.makespan_s)
    yield from alternatives_table("", result.anew, result.makespan_s)


_LINES = {
    values.OpExplained: _op,
    values.TensorExplained: _tensor,
    values.DeviceExplained: _device,
    values.LayersExplained: _layers,
    values.MemoryExplained: _memory,
    values.TimeExplained: _time,
}
