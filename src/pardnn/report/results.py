"""What the commands report: one frozen value each, and its JSON schema."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

STRICT = {"extra": "forbid", "strict": True, "allow_inf_nan": False}


@dataclass(frozen=True, kw_only=True)
class CaptureResult:
    """What `capture` found; `edges` are distinct (predecessor, successor) pairs of ops."""

    __pydantic_config__ = STRICT

    ops: int
    tensors: int
    edges: int
    parameters_bytes: int
    optimizer_bytes: int
    capture_s: float


@dataclass(frozen=True, kw_only=True)
class PlanResult:
    """What `plan` decided. Times with `_s` other than planning and compiling are simulated.

    `gap` is makespan / lower bound - 1, `dop` total work / work on the critical path, `ccr` total
    communication / total computation. Lists are per device; an unlimited capacity is null.
    `period_s` is the time per step of many (`sim.period`), `makespan_s` that of a single one.
    `compile_s` was spent before planning, loading kernels or, if `compiled`, compiling some. Of
    `planning_s`, `measuring_s` went into timing ops, once on a machine.
    """

    __pydantic_config__ = STRICT

    algorithm: str
    num_devices: int
    makespan_s: float
    period_s: float
    lower_bound_s: float
    gap: float
    serial_s: float | None
    peak_bytes: tuple[int, ...]
    capacity_bytes: tuple[int | None, ...]
    busy_s: tuple[float, ...]
    transfer_bytes: int
    planning_s: float
    moved_ops: int
    dop: float
    ccr: float
    costs: str
    notes: tuple[str, ...] = ()
    measuring_s: float = 0.0
    compile_s: float = 0.0
    compiled: bool = False


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """What `check` found."""

    __pydantic_config__ = STRICT

    valid: bool
    problems: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class SimulateResult:
    """A simulated plan.

    `peak_bytes` follows from the plan's order, without times ("order"); for "fifo" and "priority"
    it is what devices hold in that scheduler's simulated run ("time"). `period_s`, the time per
    step of many, is that of the plan's order, and null for the others.
    """

    __pydantic_config__ = STRICT

    policy: Literal["order", "fifo", "priority"]
    makespan_s: float
    period_s: float | None
    peak_bytes: tuple[int, ...]
    peak_along: Literal["order", "time"]
    busy_s: tuple[float, ...]
    transfer_bytes: int


@dataclass(frozen=True, kw_only=True)
class CompareRow:
    """One algorithm; without a plan only `error` is set. A row that is `estimated` has no plan."""

    __pydantic_config__ = STRICT

    algorithm: str
    makespan_s: float | None
    peak_bytes: tuple[int, ...] | None
    planning_s: float | None
    fits: bool
    error: str | None
    estimated: bool = False
    note: str | None = None


@dataclass(frozen=True, kw_only=True)
class CompareResult:
    """Several algorithms under one simulator."""

    __pydantic_config__ = STRICT

    rows: tuple[CompareRow, ...]


@dataclass(frozen=True, kw_only=True)
class MemoryByKind:
    """Bytes held at the peak of the device with the highest peak."""

    __pydantic_config__ = STRICT

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    workspace: int
    transfers: int


@dataclass(frozen=True, kw_only=True)
class LargestOp:
    """The op that needs most memory at once: its inputs, outputs and workspace."""

    __pydantic_config__ = STRICT

    name: str
    bytes: int
    source: str | None


@dataclass(frozen=True, kw_only=True)
class EstimateResult:
    """Whether the step fits. If it does not, the peaks are those without limits.

    `minimum_bytes` is the smallest equal limit per device that was found to fit, reserve included.
    """

    __pydantic_config__ = STRICT

    fits: bool
    peak_bytes: tuple[int, ...]
    capacity_bytes: tuple[int | None, ...]
    by_kind: MemoryByKind
    minimum_bytes: int
    largest_op: LargestOp


@dataclass(frozen=True, kw_only=True)
class ProfileResult:
    """How many op signatures were timed now, and how many were known."""

    __pydantic_config__ = STRICT

    measured: int
    cached: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class LinksResult:
    """Messages between two local ranks, measured.

    `latency_s` and `bandwidth` are for idle ranks. The others are for ranks that compute between
    messages: the sender's own time (`send_s` + bytes / `send_bandwidth`), the receiver's for a
    message that has arrived (`post_s` + `take_s` + bytes / `take_bandwidth`), and the time that a
    sleeping receiver needs to wake up (`wake_s`).
    """

    __pydantic_config__ = STRICT

    latency_s: float
    bandwidth: float
    send_s: float
    send_bandwidth: float
    post_s: float
    take_s: float
    take_bandwidth: float
    wake_s: float
    seconds: float
    measured: int
    cached: int


@dataclass(frozen=True, kw_only=True)
class RankLinksResult:
    """Messages between the ranks of torchrun, every pair measured.

    For the slowest link within a node (`latency_s`, `bandwidth`) and the slowest one between two
    nodes; null if there is none.
    """

    __pydantic_config__ = STRICT

    num_devices: int
    num_nodes: int
    latency_s: float | None
    bandwidth: float | None
    between_latency_s: float | None
    between_bandwidth: float | None
    measured: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class ConvertResult:
    """What `convert` read and wrote."""

    __pydantic_config__ = STRICT

    format_in: str
    format_out: str
    ops: int
    output: str


@dataclass(frozen=True, kw_only=True)
class StateDifference:
    """Parameters, buffers and optimizer states after the last step, compared with one device.

    `differing` of `tensors` are not bitwise equal; the largest difference is relative to the
    largest element of its tensor, `worst`, and null if it is not finite.
    """

    __pydantic_config__ = STRICT

    tensors: int
    differing: int
    largest_difference: float | None
    worst: str | None


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """What `run` measured and what was predicted. Lists of bytes are per device.

    `step_s` is the slowest rank's time of each step, measured; `makespan_s` is simulated for
    separate devices, `shared_cores_s` for ranks that share this machine's cores: null if their
    messages or calls were not measured here. A limit is null where the device has none. With
    `--verify`, `verified` tells whether no loss differs from one device's by more than `tolerance`,
    relative: 0, every bit, where each op runs on one device; where sums are sharded, 1e-10 in
    double and 1e-4 in single precision; and, where each op runs on one device, whether every bit of
    `state` is that of one device. `first_step` counts the steps before the checkpoint that
    the run went on from; of `saved_steps` a checkpoint was written; `stopped_by` names the signal
    that ended the run before its last step. A loss that is not finite is null in JSON.
    """

    __pydantic_config__ = STRICT

    losses: tuple[float | None, ...]
    reference_losses: tuple[float | None, ...] | None
    verified: bool | None = None
    tolerance: float | None = None
    largest_difference: float | None = None
    state: StateDifference | None = None
    step_s: tuple[float, ...]
    makespan_s: float | None
    shared_cores_s: float | None = None
    peak_bytes_predicted: tuple[int, ...]
    peak_bytes_measured: tuple[int, ...]
    limit_bytes: tuple[int | None, ...]
    allowance_bytes: int
    algorithm: str | None
    first_step: int = 0
    saved_steps: tuple[int, ...] = ()
    stopped_by: str | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class TriedBatch:
    """One batch size that was tried; `captured` says whether it was captured or predicted."""

    __pydantic_config__ = STRICT

    batch_size: int
    fits: bool
    peak_bytes: tuple[int, ...] | None
    captured: bool


@dataclass(frozen=True, kw_only=True)
class MaxBatchResult:
    """The largest batch size that fits; `batch_size + step` was captured, and does not.

    `peak_bytes` and `makespan_s` are those of its plan. `tried` is in the order of attempts.
    """

    __pydantic_config__ = STRICT

    batch_size: int
    step: int
    peak_bytes: tuple[int, ...]
    capacity_bytes: tuple[int | None, ...]
    makespan_s: float
    algorithm: str
    tried: tuple[TriedBatch, ...]


@dataclass(frozen=True, kw_only=True)
class DoctorResult:
    """What a machine has; `problems` says what will not work."""

    __pydantic_config__ = STRICT

    pardnn: str
    python: str
    numba: str
    torch: str | None
    devices: tuple[str, ...]
    cpu_cores: int
    cache: str | None
    problems: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class CheckpointResult:
    """What a checkpoint holds; `steps` are all complete ones of its directory."""

    __pydantic_config__ = STRICT

    step: int
    steps: tuple[int, ...]
    path: str
    num_tensors: int
    total_bytes: int
    file_bytes: tuple[int, ...]
    models: tuple[str, ...]
    algorithm: str | None
    num_devices: int | None
    versions: dict[str, str]
    extra: Any = None


@dataclass(frozen=True, kw_only=True)
class CheckpointVerifyResult:
    """Every byte of a checkpoint was read and matches its checksums."""

    __pydantic_config__ = STRICT

    step: int
    path: str
    num_tensors: int
    read_bytes: int


@dataclass(frozen=True, kw_only=True)
class CheckpointExportResult:
    """The whole model of a checkpoint was written into one file."""

    __pydantic_config__ = STRICT

    step: int
    output: str
    num_tensors: int


@dataclass(frozen=True, kw_only=True)
class ErrorBody:
    """A failure: its code, the exit status, the message and facts."""

    __pydantic_config__ = STRICT

    code: str
    exit: int
    message: str
    details: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class ErrorResult:
    """What every command prints with `--json` when it fails."""

    __pydantic_config__ = STRICT

    error: ErrorBody


def result_to_dict(result: object) -> dict[str, Any]:
    """Return a result as JSON types; NaN and infinities become null."""
    return _finite(asdict(result))  # pyright: ignore[reportArgumentType]


def _finite(data: Any) -> Any:
    if isinstance(data, float):
        return data if math.isfinite(data) else None
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    return type(data)(map(_finite, data)) if isinstance(data, list | tuple) else data
