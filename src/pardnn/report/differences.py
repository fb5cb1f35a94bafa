"""What `diff` reports: one frozen value, and its text. Times are simulated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Group, RenderableType

from pardnn.report.explained import Alternative
from pardnn.report.explained_text import ROWS, bytes_change_text, change_text, printable
from pardnn.report.results import STRICT
from pardnn.report.text import seconds_text, table
from pardnn.units import bytes_text


@dataclass(frozen=True, kw_only=True)
class PlanFigures:
    """One of two plans."""

    __pydantic_config__ = STRICT

    algorithm: str | None
    devices: tuple[str, ...]
    ops: int
    makespan_s: float
    busy_s: tuple[float, ...]
    peak_bytes: tuple[int, ...]
    usable_bytes: tuple[int | None, ...]
    transfer_bytes: int
    messages: int


@dataclass(frozen=True, kw_only=True)
class MovedOps:
    """Ops of one layer that are elsewhere in the second plan.

    `alone` is the first plan with only this change, evaluated; null if it was not. `ops` counts ops
    of the graph, `names` are those that take most time.
    """

    __pydantic_config__ = STRICT

    layer: str
    source: tuple[str, ...]
    target: tuple[str, ...]
    ops: int
    names: tuple[str, ...]
    seconds: float
    bytes: int
    alone: Alternative | None


@dataclass(frozen=True, kw_only=True)
class Relaid:
    """A tensor that is laid out differently in the second plan; both cut their ops."""

    __pydantic_config__ = STRICT

    tensor: str
    layer: str
    bytes: int
    before: tuple[str, ...]
    after: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class SentBy:
    """Bytes of a layer's tensors that are sent, in either plan."""

    __pydantic_config__ = STRICT

    layer: str
    before: int
    after: int


@dataclass(frozen=True, kw_only=True)
class DiffResult:
    """How two plans differ; the moves that gain most come first.

    Attributes:
        same: Whether both decide the same for the same graph and cluster.
        before: The first plan.
        after: The second one.
        moved: Ops that are on other devices, by layer.
        together: The first plan with all moves and a new order; null without moves, or where
            the plans do not place the same ops.
        unmoved: The first plan with nothing moved and a new order: the part of every gain above
            that is not due to the move.
        reordered: Per device, ops that both plans have there in another order.
        relaid: Tensors with another layout.
        sent: By layer, where it changed.
        only_before: Ops that are only in the first graph.
        only_after: Ops that are only in the second graph.
        notes: What a reader should know.
    """

    __pydantic_config__ = STRICT

    same: bool
    before: PlanFigures
    after: PlanFigures
    moved: tuple[MovedOps, ...]
    together: Alternative | None
    unmoved: Alternative | None
    reordered: tuple[int, ...]
    relaid: tuple[Relaid, ...]
    sent: tuple[SentBy, ...]
    only_before: tuple[str, ...]
    only_after: tuple[str, ...]
    notes: tuple[str, ...]


def diff_text(result: DiffResult) -> RenderableType:
    """Return how two plans differ, as text."""
    result = printable(result)
    notes = [f"note: {note}" for note in result.notes]
    if result.same:
        return Group("same", *notes)
    return Group(*_figures(result), *_moved(result), *_relaid(result), *_others(result), *notes)


def _figures(result: DiffResult) -> Iterator[RenderableType]:
    a, b = result.before, result.after
    rows = [
        ("algorithm", a.algorithm or "-", b.algorithm or "-", ""),
        ("step (simulated)", seconds_text(a.makespan_s), seconds_text(b.makespan_s),
         change_text(b.makespan_s - a.makespan_s, a.makespan_s)),
        ("sent", bytes_text(a.transfer_bytes), bytes_text(b.transfer_bytes),
         bytes_change_text(b.transfer_bytes - a.transfer_bytes)),
        ("messages", a.messages, b.messages, f"{b.messages - a.messages:+d}"),
    ]  # fmt: skip
    count = max(len(a.devices), len(b.devices))
    for i in range(count):
        here, there = (each.peak_bytes[i : i + 1] for each in (a, b))
        change = bytes_change_text(there[0] - here[0]) if here and there else ""
        name = (b.devices if i < len(b.devices) else a.devices)[i]
        texts = (bytes_text(size[0]) if size else "-" for size in (here, there))
        rows.append((f"peak of {name}", *texts, change))
    yield table("", ("", "first plan", "second plan", "change"), rows)


def _moved(result: DiffResult) -> Iterator[RenderableType]:
    if result.moved:
        rows = [
            (
                each.layer or "-",
                f"{', '.join(each.source)} to {', '.join(each.target)}",
                each.ops,
                seconds_text(each.seconds),
                bytes_text(each.bytes),
                _alone(each, result),
                each.names[0],
            )
            for each in result.moved[: 2 * ROWS]
        ]
        columns = ("moved: layer", "", "ops", "computes", "makes", "alone: step", "such as")
        yield table("", columns, rows)
        if len(result.moved) > len(rows):
            yield f"and {len(result.moved) - len(rows)} more groups"
    if _unmoved(result):
        change = change_text(_unmoved(result), result.before.makespan_s)
        yield (
            f"a new order alone, without any move, brings {change}: gains of moves are relative "
            "to this"
        )
    if result.together is not None:
        change = change_text(result.together.change_s, result.before.makespan_s)
        why = f" ({result.together.why})" if result.together.why else ""
        yield f"all moves together: {change}{why}"


def _unmoved(result: DiffResult) -> float:
    """Return the seconds that a new order takes off the first plan, below 0."""
    change = result.unmoved.change_s if result.unmoved is not None else None
    return min(change or 0.0, 0.0)


def _alone(each: MovedOps, result: DiffResult) -> str:
    """Return what a move gains by itself, beyond what a new order gains."""
    if each.alone is None:
        return "not judged"
    if each.alone.change_s is None:
        return "does not fit"
    return change_text(each.alone.change_s - _unmoved(result), result.before.makespan_s)


def _relaid(result: DiffResult) -> Iterator[RenderableType]:
    if not result.relaid:
        return
    rows = [
        (
            each.tensor,
            bytes_text(each.bytes),
            f"({', '.join(each.before)})",
            f"({', '.join(each.after)})",
        )
        for each in result.relaid[:ROWS]
    ]
    yield table("", ("lies otherwise", "bytes", "first plan", "second plan"), rows)
    if len(result.relaid) > len(rows):
        yield f"and {len(result.relaid) - len(rows)} more tensors; none was tried on its own"


def _others(result: DiffResult) -> Iterator[RenderableType]:
    if any(result.reordered):
        turns = ", ".join(
            f"{count} on {name}"
            for name, count in zip(result.before.devices, result.reordered, strict=False)
            if count
        )
        yield f"ops that stay but run in another order: {turns}"
    rows = [
        (each.layer or "-", bytes_text(each.before), bytes_text(each.after),
         bytes_change_text(each.after - each.before))
        for each in result.sent[:ROWS]
    ]  # fmt: skip
    if rows:
        yield table("", ("sent: layer", "first plan", "second plan", "change"), rows)
    for where, names in (("first", result.only_before), ("second", result.only_after)):
        if names:
            more = f" and {len(names) - ROWS} more" if len(names) > ROWS else ""
            yield f"only in the {where} graph: {', '.join(names[:ROWS])}{more}"
