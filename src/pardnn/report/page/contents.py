"""What a report shows, as one value: the page holds it as JSON, tables and canvases draw it.

Ops are stored as columns, not objects, which takes a tenth of the text. Times are seconds, sizes
bytes, devices and ops numbers: an op is its row in `Bars`. Phases are numbers of `PHASES`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from pardnn.plan.plan import Tried
from pardnn.report.results import STRICT

#: What an op belongs to, by the numbers that columns hold.
PHASES = ("forward", "backward", "weight gradient", "update", "given")
#: What memory holds, from the bottom of the stack to its top.
KINDS = (
    "parameters", "optimizer", "gradients", "activations", "transfers", "workspace",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class DeviceRow:
    """One device.

    Attributes:
        name: Of the cluster.
        ops: That it runs.
        limit_bytes: Its hard limit; None without one.
        usable_bytes: The limit minus the reserve.
        peak_bytes: Proven from the order alone.
        busy_s: Seconds in which it computes.
        phase_s: The same by phase.
        waits: Why it idles, longest first: words and seconds.
    """

    __pydantic_config__ = STRICT

    name: str
    ops: int
    limit_bytes: int | None
    usable_bytes: int | None
    peak_bytes: int
    busy_s: float
    phase_s: tuple[float, ...]
    waits: tuple[tuple[str, float], ...]


@dataclass(frozen=True, kw_only=True)
class Bars:
    """Ops on the timeline as columns; if there are too many, neighbours of one phase as one.

    Attributes:
        name: Of the op, or of the longest one of several.
        kind: Its call, as a row of `kinds`.
        module: Of the model, as a row of `modules`.
        source: The user's line, as a row of `sources`.
        device: Which runs it.
        start_s: When.
        seconds: How long.
        phase: A row of `PHASES`.
        piece: Of the batch; -1 for what runs once.
        count: Ops in this bar.
        critical: 1 if it fills time of the critical path, else 0.
        waits_for: Why it starts then: the bar that ends, -1 - the message that arrives; None for
            the start of the step, or where bars are several ops.
        kinds: Calls.
        modules: Paths.
        sources: The user's "file.py:line".
    """

    __pydantic_config__ = STRICT

    name: tuple[str, ...]
    kind: tuple[int, ...]
    module: tuple[int, ...]
    source: tuple[int, ...]
    device: tuple[int, ...]
    start_s: tuple[float, ...]
    seconds: tuple[float, ...]
    phase: tuple[int, ...]
    piece: tuple[int, ...]
    count: tuple[int, ...]
    critical: tuple[int, ...]
    waits_for: tuple[int | None, ...]
    kinds: tuple[str, ...]
    modules: tuple[str, ...]
    sources: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Messages:
    """Messages as columns; if there are too many, neighbours on one link as one."""

    __pydantic_config__ = STRICT

    tensor: tuple[str, ...]
    source: tuple[int, ...]
    target: tuple[int, ...]
    bytes: tuple[int, ...]
    start_s: tuple[float, ...]
    seconds: tuple[float, ...]
    count: tuple[int, ...]
    critical: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class LinkRow:
    """All that one device sends to another; `critical_s` of it lie on the critical path."""

    __pydantic_config__ = STRICT

    source: int
    target: int
    messages: int
    bytes: int
    seconds: float
    critical_s: float


@dataclass(frozen=True, kw_only=True)
class Held:
    """A storage that is there at a device's peak, and the ops that make and last use it."""

    __pydantic_config__ = STRICT

    tensor: str
    bytes: int
    kind: str
    made_by: str
    freed_after: str | None


@dataclass(frozen=True, kw_only=True)
class MemoryChart:
    """Bytes on a device along its order.

    Attributes:
        position: In the device's order, of each point: the worst of its neighbourhood.
        op: That runs there.
        held: Bytes per kind of `KINDS` and point.
        peak_at: Which point is the peak.
        live: The largest storages at the peak.
        others_bytes: What the others hold there.
    """

    __pydantic_config__ = STRICT

    position: tuple[int, ...]
    op: tuple[str, ...]
    held: tuple[tuple[int, ...], ...]
    peak_at: int
    live: tuple[Held, ...]
    others_bytes: int


@dataclass(frozen=True, kw_only=True)
class ModuleRow:
    """A module of the model, including what is below it.

    Attributes:
        path: Such as "blocks.0.mlp"; "" stands for the whole step.
        depth: From 0 on.
        ops: That compute.
        phase_s: Seconds by phase, over all devices.
        state_bytes: Parameters, buffers and optimizer states.
        made_bytes: New tensors of the forward pass.
        device_s: Seconds per device, of those that run any of it.
        layout: How its weights are cut, in DTensor's words; "" where they are whole.
    """

    __pydantic_config__ = STRICT

    path: str
    depth: int
    ops: int
    phase_s: tuple[float, ...]
    state_bytes: int
    made_bytes: int
    device_s: Mapping[int, float]
    layout: str


@dataclass(frozen=True, kw_only=True)
class Binding:
    """Something that keeps the step from being faster or smaller, in a sentence."""

    __pydantic_config__ = STRICT

    what: Literal["memory", "link", "critical path", "compute"]
    text: str


@dataclass(frozen=True, kw_only=True)
class Times:
    """Seconds of a step; None where they are not known."""

    __pydantic_config__ = STRICT

    makespan_s: float
    period_s: float
    lower_bound_s: float
    serial_s: float | None
    critical_compute_s: float
    critical_messages_s: float


@dataclass(frozen=True, kw_only=True)
class MeasuredRank:
    """What a rank measured per step, as medians: the whole step, ops, and waits for messages."""

    __pydantic_config__ = STRICT

    step_s: float
    busy_s: float
    waited_s: float
    peak_bytes: int


@dataclass(frozen=True, kw_only=True)
class KindTimes:
    """All ops of one call: how long they take as simulated, and as measured."""

    __pydantic_config__ = STRICT

    kind: str
    ops: int
    simulated_s: float
    measured_s: float


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A run of the plan, next to the simulation.

    Attributes:
        ranks: By number.
        steps: That medians are of.
        start_s: Of each bar, from the start of its rank's own step.
        seconds: Of each bar.
        kinds: The calls that take longest, in either.
    """

    __pydantic_config__ = STRICT

    ranks: tuple[MeasuredRank, ...]
    steps: int
    start_s: tuple[float, ...]
    seconds: tuple[float, ...]
    kinds: tuple[KindTimes, ...]


@dataclass(frozen=True, kw_only=True)
class Report:
    """All that the page shows.

    Attributes:
        title: Of the page.
        decided: Sentences: what was decided.
        costs: Sentences: what it costs.
        binds: What limits the step, most important first.
        times: Of a step.
        devices: In rank order.
        bars: The ops.
        messages: Between devices.
        links: Of each pair that talks.
        memory: A chart per device.
        modules: Depth first.
        measured: A run of the plan; None if none was given.
        tried: How each algorithm did, before local search improved the best; empty if one was
            named.
        notes: Of the plan, and what a reader of this page should know.
    """

    __pydantic_config__ = STRICT

    format: Literal["pardnn.report/1"] = "pardnn.report/1"
    title: str
    decided: tuple[str, ...]
    costs: tuple[str, ...]
    binds: tuple[Binding, ...]
    times: Times
    devices: tuple[DeviceRow, ...]
    bars: Bars
    messages: Messages
    links: tuple[LinkRow, ...]
    memory: tuple[MemoryChart, ...]
    modules: tuple[ModuleRow, ...]
    measured: Measured | None = None
    tried: tuple[Tried, ...] = ()
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class ReportResult:
    """The page that `report` wrote, and what limits the step, in sentences."""

    __pydantic_config__ = STRICT

    output: str
    bytes: int
    makespan_s: float
    binds: tuple[str, ...]
