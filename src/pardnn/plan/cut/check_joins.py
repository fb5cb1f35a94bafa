"""The checker of what is received in place: joins, the messages into them, and who reads early."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from pardnn.graph.ir import Op
from pardnn.plan.cut.local_regions import arguments_of
from pardnn.plan.cut.runs_of_memory import is_run
from pardnn.plan.partitioned_graph import FETCH, JOIN, UPDATE, Partition
from pardnn.plan.plan import Plan


def join_problems(plan: Plan, partition: Partition, incomplete: Iterable[str]) -> Iterator[str]:
    """Yield where a join does not find what it expects in its place, or what reads it before.

    Args:
        plan: A plan with a partition.
        partition: Its partition.
        incomplete: Names of buffers that are not complete yet.
    """
    producer = {tensor.name: op for op in partition.ops for tensor in op.outputs}
    yield from _message_problems(plan, producer)
    received = {(m.tensor, m.target): m.into for m in plan.messages if m.into is not None}
    joins = [(op, plan.placement.get(op.name, 0)) for op in partition.ops if op.kind == JOIN]
    for op, device in joins:
        for problem in _problems_of(op, device, received, producer):
            yield f"partition: op {op.name!r:.60}: {problem}"
    yield from _early_reads(plan, partition, {*received.values(), *incomplete})
    left = received.keys() - {(name, device) for op, device in joins for name in op.inputs}
    for name, device in sorted(left):
        yield f"messages: {name!r:.60} is received in place on device {device}, but not joined"


def _message_problems(plan: Plan, producer: Mapping[str, Op]) -> Iterator[str]:
    """Check that what messages go into is made by a fetch of their device, before they arrive."""
    position = {name: i for row in plan.order for i, name in enumerate(row)}
    for m in plan.messages:
        if m.into is None:
            continue
        where = f"messages: {m.tensor!r:.60} into {m.into!r:.60}"
        fetch = producer.get(m.into)
        if fetch is None or fetch.kind != FETCH or plan.placement.get(fetch.name) != m.target:
            yield f"{where}: no fetch of device {m.target} makes that buffer"
        elif position.get(fetch.name, 0) >= position.get(m.post_before, -1):
            yield f"{where}: it may arrive before its buffer exists"


def _early_reads(plan: Plan, partition: Partition, buffers: Iterable[str]) -> Iterator[str]:
    """Check that nothing but joins and updates reads a buffer that is not complete."""
    consumers: dict[str, list[Op]] = {}
    for op in partition.ops:
        for name in op.inputs:
            consumers.setdefault(name, []).append(op)
    sent = {m.tensor for m in plan.messages}
    for name in sorted(buffers):
        others = [
            op
            for op in consumers.get(name, [])
            if op.kind not in (JOIN, UPDATE) or arguments_of(op)[0] != {"tensor": name}
        ]
        if others or name in sent:
            consumer = others[0].name if others else "a message"
            yield f"partition: {consumer!r:.60} reads {name!r:.60}, which is not complete"


def _problems_of(
    op: Op, device: int, received: Mapping[tuple[str, int], str], producer: Mapping[str, Op]
) -> Iterator[str]:
    """Check that every shard of a join was received into its box, in the order of its memory."""
    target, rows = arguments_of(op)
    buffer = target["tensor"]
    while producer[buffer].kind == UPDATE:
        buffer = arguments_of(producer[buffer])[0]["tensor"]
    (made,) = producer[buffer].outputs
    for reference, ends in rows:
        name = reference["tensor"]
        if received.get((name, device)) != buffer:
            yield f"{name!r:.60} is not received into {buffer!r:.60}"
        shard = next(t for t in producer[name].outputs if t.name == name)
        if shard.dtype != made.dtype or not is_run(made, shard, ends):
            yield f"{ends!r:.80} is not a contiguous run of {buffer!r:.60} in the shard's order"
