"""What `explain` and `diff` report: one frozen value per question. Times are simulated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pardnn.report.results import STRICT

#: What fills a time: an op of some device, a message on a link, the latency of an order edge.
What = Literal["compute", "message", "order"]


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """Another decision: what the step would take, and each device's peak.

    `judged` is false if evaluating it would take too long; `why` then says what to do, otherwise
    why it does not fit. `change_s` is relative to the plan.
    """

    __pydantic_config__ = STRICT

    what: str
    judged: bool
    fits: bool
    makespan_s: float | None
    change_s: float | None
    peak_bytes: tuple[int, ...] | None
    transfer_bytes: int | None
    why: str | None = None


@dataclass(frozen=True, kw_only=True)
class Link:
    """A part of a chain of waits: ops of one layer in a row on one device, or one message.

    `device` computes, or sends to `target`; `op` is the last one, or makes the tensor. `why` says
    what kept a message from leaving earlier.
    """

    __pydantic_config__ = STRICT

    what: What
    device: str
    target: str | None
    layer: str
    op: str
    ops: int
    bytes: int
    start_s: float
    finish_s: float
    source: str | None
    why: str | None = None


@dataclass(frozen=True, kw_only=True)
class Held:
    """A storage on a device: who makes it, and who reads it last. Null: not in this step."""

    __pydantic_config__ = STRICT

    tensor: str
    device: str
    bytes: int
    kind: str
    layer: str
    from_op: str | None
    last_reader: str | None
    source: str | None
    at_peak: bool


@dataclass(frozen=True, kw_only=True)
class Call:
    """An op of the plan: where and when it runs, and what it waits for, latest first."""

    __pydantic_config__ = STRICT

    op: str
    device: str
    start_s: float
    finish_s: float
    chain: tuple[Link, ...]


@dataclass(frozen=True, kw_only=True)
class OpExplained:
    """An op: its calls, the memory of what it makes, and what it would cost elsewhere."""

    __pydantic_config__ = STRICT

    subject: Literal["op"] = "op"
    name: str
    kind: str
    layer: str
    source: str | None
    calls: tuple[Call, ...]
    num_calls: int
    moves_with: tuple[str, ...]
    constraints: tuple[str, ...]
    memory: tuple[Held, ...]
    layouts: dict[str, tuple[str, ...]]
    alternatives: tuple[Alternative, ...]
    makespan_s: float
    peak_bytes: tuple[int, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Sent:
    """A message: when it leaves and arrives, and what kept it from leaving."""

    __pydantic_config__ = STRICT

    tensor: str
    source: str
    target: str
    bytes: int
    start_s: float
    finish_s: float
    why: str


@dataclass(frozen=True, kw_only=True)
class TensorExplained:
    """A tensor: what holds its memory on each device, and where it is sent."""

    __pydantic_config__ = STRICT

    subject: Literal["tensor"] = "tensor"
    name: str
    bytes: int
    shape: tuple[int, ...] | None
    dtype: str | None
    made_by: str
    layer: str
    source: str | None
    layout: tuple[str, ...] | None
    memory: tuple[Held, ...]
    messages: tuple[Sent, ...]
    alternatives: tuple[Alternative, ...]
    makespan_s: float
    peak_bytes: tuple[int, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Wait:
    """What a device waits for, added up by layer. `op` is the one that takes most of the time."""

    __pydantic_config__ = STRICT

    when: Literal["before its first op", "between its ops", "after its last op"]
    what: What
    device: str
    target: str | None
    layer: str
    seconds: float
    op: str
    source: str | None


@dataclass(frozen=True, kw_only=True)
class LayerSeconds:
    """What a layer takes of a device's time."""

    __pydantic_config__ = STRICT

    layer: str
    seconds: float


@dataclass(frozen=True, kw_only=True)
class HeldBy:
    """What a layer holds at a device's peak, of one kind."""

    __pydantic_config__ = STRICT

    layer: str
    kind: str
    bytes: int


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """A device's peak: at which op, and what is live there; `largest` are the largest storages."""

    __pydantic_config__ = STRICT

    device: str
    peak_bytes: int
    usable_bytes: int | None
    at_op: str | None
    layer: str
    source: str | None
    held: tuple[HeldBy, ...]
    largest: tuple[Held, ...]


@dataclass(frozen=True, kw_only=True)
class DeviceExplained:
    """A device: `busy_s` and the seconds of `waits` add up to `makespan_s`."""

    __pydantic_config__ = STRICT

    subject: Literal["device"] = "device"
    name: str
    makespan_s: float
    busy_s: float
    idle_s: float
    ops: int
    layers: tuple[LayerSeconds, ...]
    waits: tuple[Wait, ...]
    memory: DeviceMemory
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class LayerRow:
    """A layer, and the same plan with it half as large: predicted, see `explain.layer`.

    `held_bytes` are what it holds at each device's peak.
    """

    __pydantic_config__ = STRICT

    name: str
    ops: int
    seconds: tuple[float, ...]
    held_bytes: tuple[int, ...]
    state_bytes: int
    sent_bytes: int
    half_makespan_s: float
    half_change_s: float
    half_peak_bytes: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class LayersExplained:
    """One layer, or all blocks, sorted by the time that halving them saves."""

    __pydantic_config__ = STRICT

    subject: Literal["layer", "layers"]
    devices: tuple[str, ...]
    makespan_s: float
    peak_bytes: tuple[int, ...]
    usable_bytes: tuple[int | None, ...]
    rows: tuple[LayerRow, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class MemoryExplained:
    """What holds each device's peak; `anew` are new plans under the limits that they name."""

    __pydantic_config__ = STRICT

    subject: Literal["memory"] = "memory"
    makespan_s: float
    devices: tuple[DeviceMemory, ...]
    anew: tuple[Alternative, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class PathShare:
    """What a layer, or a link, takes of the critical path."""

    __pydantic_config__ = STRICT

    what: What
    device: str
    target: str | None
    layer: str
    seconds: float
    op: str
    source: str | None


@dataclass(frozen=True, kw_only=True)
class TimeExplained:
    """What the step takes: the shares of its critical path add up to `makespan_s`.

    `faster` is the same plan on faster links and devices, `anew` are new plans.
    """

    __pydantic_config__ = STRICT

    subject: Literal["time"] = "time"
    makespan_s: float
    path: tuple[PathShare, ...]
    faster: tuple[Alternative, ...]
    anew: tuple[Alternative, ...]
    notes: tuple[str, ...]


Explained = (
    OpExplained
    | TensorExplained
    | DeviceExplained
    | LayersExplained
    | MemoryExplained
    | TimeExplained
)
