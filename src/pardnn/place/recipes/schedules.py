"""Pipeline schedules as lists of units: which device does which pass of which piece, and when.

Each function returns a row of units for each device, for p devices and m pieces of the batch. A
unit is a pass of a stage on a piece: "F" forward, "I" gradients of inputs, "W" of weights, "B" both
at once. Stages are numbered along the model; where a device has two, they are dealt out in turn
(interleaved) or there and back (V).
Reference: GPipe (NeurIPS 2019); PipeDream-Flush or 1F1B (Narayanan et al., ICML 2021); interleaved
1F1B (Narayanan et al., SC 2021); ZB-H1 and ZB-V (Qi et al., ICLR 2024 and NeurIPS 2024); DualPipeV
(DeepSeek-V3, 2024). The orders are those of torch.distributed.pipelining, with which tests compare.
Deviations: pieces need not divide among the rounds of interleaved schedules.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from pardnn.errors import UsageError


class Unit(NamedTuple):
    """A pass of a stage on a piece of the batch."""

    what: str
    stage: int
    piece: int


Rows = list[list[Unit]]


class Schedule(NamedTuple):
    """A schedule by name.

    Attributes:
        rows: Of each device, given the numbers of devices and of pieces.
        chunks: Stages per device.
        is_v: Whether stages are dealt out there and back.
        least_pieces: Per device.
    """

    rows: Callable[[int, int], Rows]
    chunks: int
    is_v: bool = False
    least_pieces: int = 0

    def device_of(self, stage: int, num_devices: int) -> int:
        """Return the device of a stage."""
        turn, within = divmod(stage, num_devices)
        return num_devices - 1 - within if self.is_v and turn % 2 else within


def gpipe(devices: int, pieces: int) -> Rows:
    """All forward passes, then all backward passes.

    >>> gpipe(1, 2)[0][1:3]
    [Unit(what='F', stage=0, piece=1), Unit(what='B', stage=0, piece=0)]
    """
    return [
        [Unit(what, d, i) for what in ("F", "B") for i in range(pieces)] for d in range(devices)
    ]


def one_f_one_b(devices: int, pieces: int) -> Rows:
    """As few forward passes as the pipeline needs, then a backward pass after each."""
    return [_alternating(d, devices, pieces, 1, devices - 1 - d) for d in range(devices)]


def interleaved_1f1b(devices: int, pieces: int) -> Rows:
    """1F1B with two stages per device, pieces in rounds of as many as there are devices."""
    per_round = _rounds(devices, pieces)[0]
    return [
        _alternating(d, devices, pieces, 2, per_round + 2 * (devices - 1 - d))
        for d in range(devices)
    ]


def zero_bubble_h1(devices: int, pieces: int) -> Rows:
    """1F1B with delayed weight gradients: earlier stages wait only for input gradients."""
    return [_alternating(d, devices, pieces, 1, devices - 1 - d, put_off=d) for d in range(devices)]


def zb_v(devices: int, pieces: int) -> Rows:
    """ZB-V: two stages per device, there and back; the memory of 1F1B without its bubble."""
    return [_numbered(_zb_v_row(d, devices, pieces), pieces) for d in range(devices)]


def dualpipe_v(devices: int, pieces: int) -> Rows:
    """DualPipeV: two stages per device, there and back, each forward beside a backward pass.

    Raises:
        UsageError: E227, if there are fewer pieces than stages.
    """
    if pieces < 2 * devices:
        raise UsageError(
            f"dualpipe-v needs at least as many pieces of the batch as stages: {devices} devices "
            f"have {2 * devices} stages, and there are {pieces} pieces.\n"
            f"Use --microbatches {2 * devices}, or zb-v.",
            code="E227",
        )
    return [_numbered(_dualpipe_v_row(d, devices, pieces), pieces) for d in range(devices)]


#: Schedules by name.
SCHEDULES: Mapping[str, Schedule] = {
    "gpipe": Schedule(gpipe, 1),
    "1f1b": Schedule(one_f_one_b, 1),
    "interleaved-1f1b": Schedule(interleaved_1f1b, 2),
    "zero-bubble-h1": Schedule(zero_bubble_h1, 1),
    "zb-v": Schedule(zb_v, 2, is_v=True),
    "dualpipe-v": Schedule(dualpipe_v, 2, is_v=True, least_pieces=2),
}


def suitable(devices: int, pieces: int) -> list[str]:
    """Return the names of the schedules that exist for these numbers of devices and pieces."""
    found = [name for name, one in SCHEDULES.items() if pieces >= one.least_pieces * devices]
    return found if devices > 1 else []


def unit_times(rows: Rows, stages: int) -> dict[Unit, int]:
    """Return when each unit begins if forward passes, input and weight gradients take 1 each.

    Args:
        rows: Of each device.
        stages: In all.
    """
    begins, ends = dict[Unit, int](), dict[tuple[str, int, int], int]()
    heads, now = [0] * len(rows), [0] * len(rows)
    while any(head < len(row) for head, row in zip(heads, rows, strict=True)):
        before = list(heads)
        for d, row in enumerate(rows):
            while heads[d] < len(row):
                unit = row[heads[d]]
                needs = [ends.get(need, -1) for need in _needs(unit, stages)]
                if min(needs, default=0) < 0:
                    break
                begins[unit] = max(now[d], *needs, 0)
                now[d] = begins[unit] + (2 if unit.what == "B" else 1)
                for part in ("I", "W") if unit.what == "B" else (unit.what,):
                    ends[part, unit.stage, unit.piece] = now[d]
                heads[d] += 1
        assert before != heads, "units that wait for each other"
    return begins


def _needs(unit: Unit, stages: int) -> list[tuple[str, int, int]]:
    """Return the passes that a unit comes after."""
    what, stage, piece = unit
    if what == "F":
        return [("F", stage - 1, piece)] if stage else []
    if what == "W":
        return [("I", stage, piece)]
    return [("F", stage, piece), *([("I", stage + 1, piece)] if stage + 1 < stages else [])]


def _numbered(steps: Iterable[tuple[str, int]], pieces: int) -> list[Unit]:
    """Return passes of stages as units: each takes the next piece; those past the last are left."""
    seen, row = Counter[tuple[str, int]](), list[Unit]()
    for what, stage in steps:
        parts = ("I", "W") if what == "B" else (what,)
        piece = seen[parts[0], stage]
        seen.update((part, stage) for part in parts)
        if piece < pieces:
            row.append(Unit(what, stage, piece))
    return row


def _rounds(devices: int, pieces: int) -> list[int]:
    """Return the sizes of rounds of about as many pieces as devices, larger ones first."""
    count = max(1, pieces // devices)
    return [pieces // count + (i < pieces % count) for i in range(count)]


def _alternating(
    device: int, devices: int, pieces: int, chunks: int, warm_up: int, put_off: int | None = None
) -> list[Unit]:
    """Return forward passes, then one forward and one backward pass in turn, then backward passes.

    Args:
        device: Whose row it is.
        devices: How many.
        pieces: Of the batch.
        chunks: Stages per device.
        warm_up: Forward passes before the first pair.
        put_off: By how many pairs gradients of weights come later; None: at once.
    """
    rounds = _rounds(devices, pieces) if chunks > 1 else [pieces]
    forward = [chunk * devices + device for size in rounds for chunk in range(chunks)
               for _ in range(size)]  # fmt: skip
    backward = [chunk * devices + device for size in rounds for chunk in reversed(range(chunks))
                for _ in range(size)]  # fmt: skip
    warm_up = min(warm_up, len(forward))
    steps: list[tuple[str, int]] = [("F", stage) for stage in forward[:warm_up]]
    waiting = deque[int]()
    for turn, stage in enumerate(backward):
        steps += [("F", one) for one in forward[warm_up + turn : warm_up + turn + 1]]
        if put_off is None:
            steps.append(("B", stage))
            continue
        steps.append(("I", stage))
        waiting.append(stage)
        if turn >= put_off:
            steps.append(("W", waiting.popleft()))
    return _numbered([*steps, *(("W", stage) for stage in waiting)], pieces)


def _zb_v_row(device: int, devices: int, pieces: int) -> list[tuple[str, int]]:
    down, up = device, 2 * devices - 1 - device
    total = max(2 * devices - 1, pieces)
    steps: list[tuple[str, int]] = [("F", down)] * (2 * (devices - device) - 1)
    steps += [("F", up), ("F", down)] * device
    steps += [("F", up), ("I", up), ("W", up)] * (devices - device)
    begun, ended = 2 * devices - device - 1, devices
    while ended < begun or begun < total:
        if begun < total:
            steps.append(("F", down))
            begun += 1
        steps += [("I", down), ("W", down), ("F", up), ("I", up), ("W", up)]
        ended += 1
    steps += [("I", down), ("I", up)] * device
    steps += [("I", down), ("W", down)] * (devices - device)
    return [*steps, *[("W", up)] * device, *[("W", down)] * device]


def _dualpipe_v_row(device: int, devices: int, pieces: int) -> list[tuple[str, int]]:
    down, up = device, 2 * devices - 1 - device
    after, half = devices - 1 - device, (device + 1) // 2
    steps: list[tuple[str, int]] = [("F", down)] * (2 * after)
    steps += [("F", down), ("F", up)] * (device + 1)
    steps += [("I", up), ("W", up), ("F", up)] * after
    steps += [("F", down), ("B", up), ("F", up), ("B", down)] * (pieces - 2 * devices + device + 1)
    steps += [("B", up), ("F", up), ("B", down)] * after
    waiting = deque[int]()
    for turn in range(2 * (device + 1)):
        stage = down if turn % 2 else up
        is_split = turn >= 2 * half + (device % 2 == 0)
        steps.append(("I" if is_split else "B", stage))
        if is_split:
            waiting.append(stage)
    for _ in range(after):
        steps += [("W", waiting.popleft()), ("I", down)]
        waiting.append(down)
    return [*steps, *(("W", stage) for stage in waiting)]


def rows_csv(rows: Rows) -> str:
    """Return rows as torch.distributed.pipelining writes schedules: a line per rank.

    >>> rows_csv(gpipe(1, 2)).rstrip()
    '0F0,0F1,0B0,0B1'
    """
    lines = (",".join(f"{unit.stage}{unit.what}{unit.piece}" for unit in row) for row in rows)
    return "".join(f"{line}\n" for line in lines)
