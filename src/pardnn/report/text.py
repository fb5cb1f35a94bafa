"""Results as text: the only place, with `units`, that converts units."""

from __future__ import annotations

import dataclasses
import html
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from pardnn.errors import printable
from pardnn.graph.ir import Graph
from pardnn.kernels.compilations import COMPILATIONS
from pardnn.plan.plan import Plan
from pardnn.plan.state_layout import STATE_KINDS, state_layout
from pardnn.report import results
from pardnn.report.export.result import CodeResult
from pardnn.report.verdict import verdict
from pardnn.units import bytes_text, sharing_text

_NUMBER = re.compile(r"[+-]?[0-9]")
#: Of names that a narrow terminal leaves.
NAME_WIDTH = 24
#: States up to this size are numbers: counts of steps, learning rates.
SCALAR_BYTES = 8


def console() -> Console:
    """Return the console for stdout; names are shown as they are, never as markup."""
    return Console(markup=False, highlight=False, emoji=False, soft_wrap=True)


@dataclasses.dataclass(frozen=True)
class _Printable:
    """A renderable without characters that act on the terminal."""

    of: RenderableType

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        for segment in console.render(self.of, options):
            yield Segment(printable(segment.text, lines=True), segment.style)


def printable_renderable(of: RenderableType) -> RenderableType:
    """Return text or a table that is safe to show on a terminal, whatever its names are."""
    return _Printable(of)


def escaped(text: str) -> str:
    """Return a line of text escaped for SVG and HTML, whatever its names are."""
    return html.escape(printable(text))


def seconds_text(seconds: float | None) -> str:
    """Return a time such as "12.3 ms"."""
    if seconds is None:
        return "-"
    if seconds == 0 or not math.isfinite(seconds):
        return f"{seconds:g} s"
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(seconds) >= scale:
            return f"{seconds / scale:.4g} {unit}"
    return f"{seconds / 1e-9:.4g} ns"


def percent_text(fraction: float) -> str:
    """Return a fraction such as "12.3 %"."""
    return f"{round(100 * fraction, 1) + 0.0:.1f} %"  # no "-0.0 %"


def _step_text(makespan_s: float, period_s: float | None, how: str = "simulated") -> str:
    """Return the time of a step, and the time per step of many if that differs."""
    text = f"step {seconds_text(makespan_s)} {how}"
    if period_s is None or makespan_s - period_s <= 1e-4 * makespan_s:
        return text
    return f"{text}, {seconds_text(period_s)} over many steps (period)"


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> RenderableType:
    """Return a table.

    Args:
        title: Above the table; may be empty.
        columns: Heads; of numbers if a cell begins with one (every cell, without a head), and none
            is longer than `NAME_WIDTH`, which the first keeps.
        rows: A cell per column; a tuple is a cell of several lines.
    """
    found = Table(
        title=Text(title) if title else None,
        title_justify="left",
        box=None,
        pad_edge=False,
        show_header=any(columns),
    )
    for i, column in enumerate(columns):
        longest = max((len(line) for row in rows for line in _lines(row[i])), default=0)
        may_be = i > 0 and longest <= NAME_WIDTH  # sentences are read from the left
        kinds = [_NUMBER.match(_lines(row[i])[0]) is not None for row in rows]
        is_number = may_be and (any(kinds) if column else all(kinds))
        width = None if i else min(longest, NAME_WIDTH)
        justify = "right" if is_number else "left"
        found.add_column(column, justify=justify, overflow="fold", min_width=width)
    for row in rows:
        found.add_row(*(Text("\n".join(map(printable, _lines(cell)))) for cell in row))
    return found


def _lines(cell: object) -> Sequence[str]:
    """Return a cell's lines; a line break within a text may be part of a name and is not one."""
    return (list(map(str, cell)) or ["none"]) if isinstance(cell, tuple) else [str(cell)]


def result_text(result: object) -> RenderableType:
    """Return any result as text."""
    if isinstance(result, results.CompareResult):
        return _compare(result)
    if isinstance(result, results.EstimateResult):
        return _estimate(result)
    if isinstance(result, results.SimulateResult):
        return _simulate(result)
    if isinstance(result, results.RunResult):
        return _run(result)
    if isinstance(result, results.MaxBatchResult):
        return _max_batch(result)
    if isinstance(result, results.CheckResult):
        return "valid" if result.valid else "\n".join(["not valid:", *result.problems])
    return _fields(result)


def _fields(result: Any) -> RenderableType:
    rows: list[tuple[str, str | tuple[str, ...]]] = []
    defaults = {field.name: field.default for field in dataclasses.fields(result)}
    for key, value in dataclasses.asdict(result).items():
        if value == defaults[key]:  # nothing to say, such as losses of code that did not run
            continue
        text: str | tuple[str, ...] = str(value)
        if key.endswith("bytes") and isinstance(value, int):
            text = bytes_text(value)
        elif key.endswith("_bytes") and isinstance(value, tuple | list):
            text = tuple(map(bytes_text, value))
        elif isinstance(value, float) and (key.endswith("_s") or key == "seconds"):
            text = seconds_text(value)
        elif key.endswith("_s") and isinstance(value, tuple | list):
            text = tuple(map(seconds_text, value))
        elif key.endswith("bandwidth"):
            text = f"{bytes_text(value)}/s"
        elif isinstance(value, tuple | list):
            text = tuple(map(str, value))
        rows.append((key.removesuffix("_s").removesuffix("_bytes").replace("_", " "), text))
    return table("", ("", ""), rows)


def _max_batch(result: results.MaxBatchResult) -> RenderableType:
    peaks = ", ".join(bytes_text(peak) for peak in result.peak_bytes)
    captures = ", ".join(
        f"{tried.batch_size} ({'fits' if tried.fits else 'does not fit'})"
        for tried in result.tried
        if tried.captured
    )
    rows = (
        ("largest batch size", result.batch_size),
        ("does not fit", result.batch_size + result.step),
        ("algorithm", result.algorithm),
        ("step time, simulated", seconds_text(result.makespan_s)),
        ("peak memory", peaks),
        ("usable memory", ", ".join(bytes_text(size) for size in result.capacity_bytes)),
        ("captured and planned", captures),
        ("predicted", sum(not tried.captured for tried in result.tried)),
    )
    return table("", ("", ""), rows)


def plan_text(graph: Graph, plan: Plan, result: results.PlanResult) -> RenderableType:
    """Return the summary of a plan just made.

    Args:
        graph: The graph.
        plan: Its plan.
        result: The plan's figures.
    """
    cluster = plan.cluster
    assert cluster is not None  # a plan just made was made for one
    rows = [
        (
            device.name,
            len(plan.order[i]),
            bytes_text(result.peak_bytes[i]),
            bytes_text(result.capacity_bytes[i]),
            seconds_text(result.busy_s[i]),
            percent_text(1 - result.busy_s[i] / result.makespan_s if result.makespan_s else 0.0),
        )
        for i, device in enumerate(cluster.devices)
    ]
    serial, step = result.serial_s, result.makespan_s
    faster = f", {serial / step:.2f} times as fast as one device" if serial and step else ""
    kernels = f"compile kernels, {COMPILATIONS.kept}" if result.compiled else "load kernels"
    kernels = f"{seconds_text(result.compile_s)} to {kernels}"
    measured = seconds_text(result.measuring_s)
    timing = f", {measured} of them timing ops, once" if result.measuring_s >= 1 else ""
    ops = f"{printable(graph.name)}: {len(graph.ops)} ops by {result.algorithm}"
    head = (
        f"{ops} on {cluster_text(cluster)}\n{_step_text(step, result.period_s)}{faster}; "
        f"lower bound {seconds_text(result.lower_bound_s)}, gap {percent_text(result.gap)}\n"
        f"transfers {bytes_text(result.transfer_bytes)}; costs: {result.costs}; planned in "
        f"{seconds_text(result.planning_s)}{timing} (+ {kernels})"
    )
    columns = ("device", "ops", "peak", "usable", "busy", "idle")
    notes = [f"note: {note}" for note in result.notes]
    first = [note for note in notes if note.startswith("note: whole on every device")]
    others = [note for note in notes if note not in first]
    return Group(head, *_whole_state(graph, plan), *first, table("", columns, rows), *others)


def _whole_state(graph: Graph, plan: Plan) -> list[str]:
    """Return how much state a cut plan keeps whole on every device; nothing if it is all cut."""
    if plan.partition is None:
        return []
    sizes = {op.name: op.outputs[0].bytes for op in graph.ops if op.kind in STATE_KINDS}
    kept = [
        name
        for name, shards in state_layout(graph, plan).items()
        if sizes[name] > SCALAR_BYTES and all(shard.box is None for shard in shards)
    ]
    if not kept:
        return []
    listed = ", ".join(sorted(kept, key=lambda name: -sizes[name])[:3])
    at = " of a submesh" if plan.partition.submeshes > 1 else ""
    line = (
        f"whole on every device{at}: {len(kept)} of {len(sizes)} parameters, buffers and states, "
        f"{bytes_text(sum(sizes[name] for name in kept))} of {bytes_text(sum(sizes.values()))}: "
        f"{printable(listed)}{', ...' if len(kept) > 3 else ''}"
    )
    return [line]


def code_text(result: CodeResult) -> RenderableType:
    """Return the losses of code that ran, and how they compare with those of one device."""
    return Group(losses_table(result), *verdict(result))


def memory_table(kinds: Sequence[results.MemoryByKind], names: Sequence[str]) -> RenderableType:
    """Return what each device holds at its own peak, by kind."""
    columns = [field.name for field in dataclasses.fields(results.MemoryByKind)]
    rows = [
        (name, *(bytes_text(getattr(held, column)) for column in columns))
        for name, held in zip(names, kinds, strict=True)
    ]
    return table("at each device's peak (predicted)", ("device", *columns), rows)


def cluster_text(cluster: Any) -> str:
    """Return one line on a cluster."""
    first, rate = cluster.devices[0], cluster.default_link
    alike = all(
        (d.type, d.memory, d.speed) == (first.type, first.memory, first.speed)
        for d in cluster.devices
    )
    memory = f" of {bytes_text(first.memory)}" if first.memory else " without limit"
    called = {device.name.rpartition(":")[0] for device in cluster.devices}
    name = called.pop() if called in ({"gpu"}, {"cpu"}) else first.type
    kind = f"x {name}{memory}" if alike else "unlike devices"
    devices = f"{cluster.num_devices} {kind}"
    if cluster.sharing is not None and cluster.num_devices > 1:
        devices += f", {sharing_text(cluster.sharing.slowdown, cluster.num_devices)}"
    if rate is None or cluster.links:
        return f"{devices}, {len(cluster.links)} links ({cluster.link_model})"
    link = f"{rate.bandwidth / 1e9:.4g} GB/s + {seconds_text(rate.latency)}"
    return f"{devices}, links {link} ({cluster.link_model})"


def _compare(result: results.CompareResult) -> RenderableType:
    rows = [
        (
            row.algorithm,
            seconds_text(row.makespan_s) + (" (estimated)" if row.estimated else ""),
            "-" if row.peak_bytes is None else bytes_text(max(row.peak_bytes)),
            seconds_text(row.planning_s),
            "no" if not row.fits else "-" if row.estimated else "yes",
        )
        for row in result.rows
    ]
    head = ("algorithm", "step (simulated)", "largest peak", "planning", "fits")
    said = [(row.algorithm, row.error or row.note) for row in result.rows]
    why = [f"{name}: {text.splitlines()[0]}" for name, text in said if text]
    return Group(table("", head, rows), *why)


def _simulate(result: results.SimulateResult) -> RenderableType:
    rows = [
        (i, bytes_text(peak), seconds_text(busy))
        for i, (peak, busy) in enumerate(zip(result.peak_bytes, result.busy_s, strict=True))
    ]
    how = f"simulated under {result.policy}"
    head = (
        f"{_step_text(result.makespan_s, result.period_s, how)}, transfers "
        f"{bytes_text(result.transfer_bytes)}"
    )
    along = "plan's order" if result.peak_along == "order" else f"times under {result.policy}"
    return Group(head, table("", ("device", f"peak ({along})", "busy"), rows))


def _estimate(result: results.EstimateResult) -> RenderableType:
    rows = [
        (i, bytes_text(peak), bytes_text(usable))
        for i, (peak, usable) in enumerate(
            zip(result.peak_bytes, result.capacity_bytes, strict=True)
        )
    ]
    kinds = results.result_to_dict(result.by_kind).items()
    where = ", ".join(f"{kind} {bytes_text(size)}" for kind, size in kinds if size)
    largest = result.largest_op
    return Group(
        "fits" if result.fits else "does not fit; the smallest plan found needs:",
        table("", ("device", "peak (predicted)", "usable"), rows),
        f"at the worst peak: {where}",
        f"smallest limit found that fits: {bytes_text(result.minimum_bytes)} per device "
        f"({result.minimum_bytes} B, reserve included)",
        f"largest op: {printable(largest.name)}"
        f"{f' ({printable(largest.source)})' if largest.source else ''}: "
        f"{bytes_text(largest.bytes)} of inputs, outputs and workspace",
    )


def losses_table(result: results.RunResult | CodeResult, first_step: int = 0) -> RenderableType:
    """Return the losses of steps that ran, next to those of one device if there are any.

    Args:
        result: Of the run.
        first_step: The number of the first one.
    """
    reference = result.reference_losses
    losses = [
        (
            first_step + i,
            repr(loss),
            *(() if reference is None else (repr(reference[i]),)),
            seconds_text(step),
        )
        for i, (loss, step) in enumerate(zip(result.losses, result.step_s, strict=True))
    ]
    columns = ("step", "loss", *(() if reference is None else ("one device",)), "time (measured)")
    return table("", columns, losses)


def _run(result: results.RunResult) -> RenderableType:
    saved = result.saved_steps
    memory = [
        (i, bytes_text(predicted), bytes_text(measured), bytes_text(limit))
        for i, (predicted, measured, limit) in enumerate(
            zip(
                result.peak_bytes_predicted,
                result.peak_bytes_measured,
                result.limit_bytes,
                strict=True,
            )
        )
    ]
    return Group(
        losses_table(result, result.first_step),
        table("", ("rank", "peak (predicted)", "peak (measured)", "limit"), memory),
        _step_times(result),
        f"allowance for memory other than tensors: {bytes_text(result.allowance_bytes)} per rank",
        *verdict(result),
        *([f"checkpoints after steps: {', '.join(map(str, saved))}"] if saved else []),
        *([f"stopped by {result.stopped_by}"] if result.stopped_by else []),
        *(f"note: {note}" for note in result.notes),
    )


def _step_times(result: results.RunResult) -> str:
    """Return the predicted and the measured time of a step."""
    ranks, fastest = len(result.limit_bytes), min(result.step_s, default=None)
    devices = f"{ranks} separate devices" if ranks > 1 else "one device"
    times = [f"step {seconds_text(result.makespan_s)} simulated on {devices}"]
    if result.shared_cores_s is not None:
        times.append(f"{seconds_text(result.shared_cores_s)} predicted on the cores shared here")
    return "; ".join([*times, f"fastest measured {seconds_text(fastest)}"])
