"""Waits in the user's terms: chains with layers, and what a device waits for, added up."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from pardnn.explain.case import Case
from pardnn.graph.layers import block_of
from pardnn.report.explained import Link, PathShare, Wait
from pardnn.sim.waits import COMPUTE, MESSAGE, Stretch, chain, critical_chain, idle_stretches

_BEFORE, _BETWEEN, _AFTER = "before its first op", "between its ops", "after its last op"


class _Who(NamedTuple):
    """The cause of a stretch: stretches that differ only in the op have the same cause."""

    what: Any
    device: str
    target: str | None
    layer: str


def _who(case: Case, stretch: Stretch) -> tuple[_Who, int]:
    """Return what fills a stretch, and its op: of a message the one that makes the tensor."""
    arrays, names = case.arrays, case.devices
    if stretch.what == MESSAGE:
        op = int(case.planned.arrays.tensor_op[arrays.message_tensor[stretch.number]])
        source = int(arrays.message_source[stretch.number])
        target = int(arrays.message_target[stretch.number])
        who = _Who("message", names[source], names[target], block_of(case.layers[op]))
        return who, op
    op = stretch.number
    what = "compute" if stretch.what == COMPUTE else "order"
    return _Who(what, names[int(arrays.place[op])], None, block_of(case.layers[op])), op


def chain_of(case: Case, op: int) -> tuple[Link, ...]:
    """Return what an op waits for, latest first, back to second 0.

    Ops of one layer that run in a row on one device are one link; anything that takes no time is
    skipped.
    """
    found: list[Link] = []
    last: _Who | None = None
    for stretch in chain(case.causes, op):
        if stretch.finish <= stretch.start:
            continue
        who, number = _who(case, stretch)
        if who == last and who.what == "compute":
            joined = found[-1]
            found[-1] = _link(case, who, number, stretch, joined)
        else:
            found.append(_link(case, who, number, stretch, None))
        last = who
    return tuple(found)


def _link(case: Case, who: _Who, op: int, stretch: Stretch, after: Link | None) -> Link:
    """Return a link of a chain; `after` is the one that it is joined with."""
    is_message = stretch.what == MESSAGE
    size = 0
    if is_message:
        tensor = case.arrays.message_tensor[stretch.number]
        size = int(case.planned.arrays.tensor_bytes[tensor])
    return Link(
        what=who.what,
        device=who.device,
        target=who.target,
        layer=who.layer,
        op=after.op if after else case.planned.ops[op].name,
        ops=after.ops + 1 if after else int(stretch.what == COMPUTE),
        bytes=size,
        start_s=stretch.start,
        finish_s=after.finish_s if after else stretch.finish,
        source=after.source if after else case.planned.ops[op].source,
        why=why_then(case, stretch.number) if is_message else None,
    )


def why_then(case: Case, message: int) -> str:
    """Say what kept a message from leaving earlier."""
    what, at = int(case.causes.message_what[message]), int(case.causes.message_from[message])
    if what == COMPUTE:
        return "as soon as it is made"
    if what == MESSAGE:
        tensor = case.tensor_names[int(case.arrays.message_tensor[at])]
        return f"after {tensor!r:.80} on the same link"
    return f"when its receiver makes room, before {case.planned.ops[at].name!r:.80}"


class _Sum:
    """Seconds by cause, and the op that takes the most of each."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.seconds: dict[Any, float] = {}
        self.by_op: dict[Any, dict[int, float]] = {}

    def add(self, key: Any, op: int, seconds: float) -> None:
        """Count a stretch."""
        self.seconds[key] = self.seconds.get(key, 0.0) + seconds
        ops = self.by_op.setdefault(key, {})
        ops[op] = ops.get(op, 0.0) + seconds

    def largest(self) -> Iterator[tuple[Any, float, str, str | None]]:
        """Yield causes by falling seconds, with name and source of the op that takes most."""
        for key in sorted(self.seconds, key=lambda key: (-self.seconds[key], str(key))):
            ops = self.by_op[key]
            op = self.case.planned.ops[max(ops, key=lambda op: (ops[op], -op))]
            yield key, self.seconds[key], op.name, op.source


def waits_of(case: Case, device: int) -> tuple[Wait, ...]:
    """Return what a device waits for; the seconds add up to its idle time."""
    total = _Sum(case)
    row = case.arrays.order_op[case.arrays.order_ptr[device] : case.arrays.order_ptr[device + 1]]
    first = int(row[0]) if len(row) else -1
    for idle in idle_stretches(case.causes, case.arrays, device):
        when = _AFTER if idle.before < 0 else _BEFORE if idle.before == first else _BETWEEN
        who, op = _who(case, idle.stretch)
        total.add((when, who), op, idle.stretch.finish - idle.stretch.start)
    return tuple(
        Wait(when=when, **who._asdict(), seconds=seconds, op=op, source=source)
        for (when, who), seconds, op, source in total.largest()
    )


def critical_path(case: Case) -> tuple[PathShare, ...]:
    """Return what fills the step from end to end; the seconds add up to its makespan."""
    total = _Sum(case)
    for stretch in critical_chain(case.causes):
        who, op = _who(case, stretch)
        total.add(who, op, stretch.finish - stretch.start)
    return tuple(
        PathShare(**who._asdict(), seconds=seconds, op=op, source=source)
        for who, seconds, op, source in total.largest()
        if seconds > 0
    )
