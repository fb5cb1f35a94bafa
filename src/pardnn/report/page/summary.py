"""The summary in sentences: what was decided, what it costs, what limits it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pardnn.graph.layers import origin
from pardnn.plan.constraints import hard
from pardnn.plan.plan import Plan
from pardnn.report.page.bars import Critical
from pardnn.report.page.contents import Binding, DeviceRow, LinkRow, Times
from pardnn.report.page.simulated import Simulated
from pardnn.report.text import cluster_text, percent_text, seconds_text
from pardnn.units import bytes_text

#: Constraints that are named.
LISTED = 8
#: From this part of what a device may use on, its memory binds.
TIGHT = 0.95
#: From this part of the step on, something is worth a sentence.
WORTH = 0.02
#: From this part of the step on that it is shorter, the period is worth a sentence.
LATER = 0.005
#: From this part of the step on, a device is always busy.
BUSY = 0.9


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _batch(plan: Plan) -> str:
    return f"the batch is in {len(plan.pieces.points) - 1} pieces, and " if plan.pieces else ""


def decided(found: Simulated, devices: Sequence[DeviceRow]) -> Iterator[str]:
    """Yield what was decided."""
    plan, step = found.plan, found.whole.name
    where = cluster_text(plan.cluster)
    if plan.partition is not None:
        mesh, count = " x ".join(map(str, plan.partition.mesh.shape)), plan.partition.submeshes
        over = f"a mesh of {mesh} devices" if count == 1 else f"one of {count} submeshes of {mesh}"
        yield f"{step}: {_batch(plan)}every op is cut over {over} ({where})."
    elif plan.pieces is not None:
        pieces = len(plan.pieces.points) - 1
        how = (
            "each op on one device for all of them" if _alike(found) else ("each placed separately")
        )
        yield f"{step}: the batch is cut in {pieces} pieces, {how}, on {where}."
    else:
        yield f"{step}: each of {len(found.whole.ops)} ops runs whole on one device of {where}."
    used = [device for device in devices if device.busy_s > 0]
    work = sum(device.busy_s for device in used)
    if 1 < len(used) <= 8:
        shares = ", ".join(f"{row.name} {percent_text(row.busy_s / work)}" for row in used)
        yield f"Work by device: {shares}."
    elif len(used) == 1:
        yield f"All the work is on {used[0].name}."
    idle = [device.name for device in devices if device.busy_s <= 0]
    if idle:
        yield f"Without work: {', '.join(idle[:8])}{' and others' if len(idle) > 8 else ''}."
    demanded = hard(plan.constraints or ())
    if demanded:
        more = f"; and {len(demanded) - LISTED} more" if len(demanded) > LISTED else ""
        yield f"Constraints, all met: {'; '.join(map(str, demanded[:LISTED]))}{more}."
    if plan.offload:
        are = "is" if len(plan.offload) == 1 else "are"
        yield f"{_count(len(plan.offload), 'tensor')} of optimizer state {are} on the host."
    if plan.recompute:
        are = "is" if len(plan.recompute) == 1 else "are"
        yield f"{_count(len(plan.recompute), 'op')} {are} called a second time to save memory."
    yield f"Decided by {plan.algorithm or 'hand'}; {_kept(found)}"


def _alike(found: Simulated) -> bool:
    """Whether every op runs on one device for all pieces of the batch, as in a pipeline."""
    places = zip(found.graph.ops, found.arrays.place.tolist(), strict=True)
    return len({origin(op.name) for op in found.graph.ops}) == len(
        {(origin(op.name), device) for op, device in places}
    )


def _kept(found: Simulated) -> str:
    if found.plan.keeps_bits:
        return "losses equal those of one device, bit for bit."
    return "losses agree with those of one device to rounding."


def costs(found: Simulated, times: Times, devices: Sequence[DeviceRow]) -> Iterator[str]:
    """Yield what the plan costs."""
    step = f"A step takes {seconds_text(times.makespan_s)} (simulated, costs: {found.costs})"
    if times.serial_s and times.makespan_s:
        step += f", {times.serial_s / times.makespan_s:.2f} times as fast as one device"
    yield f"{step}."
    if times.makespan_s - times.period_s > LATER * times.makespan_s:
        yield f"Over many steps, each takes {seconds_text(times.period_s)} (the period)."
    if times.lower_bound_s > 0:
        gap = times.makespan_s / times.lower_bound_s - 1
        yield (
            f"No plan takes less than {seconds_text(times.lower_bound_s)}: this one is at most "
            f"{percent_text(gap)} above the best."
        )
    most = max(devices, key=lambda device: device.peak_bytes)
    text = f"At most {bytes_text(most.peak_bytes)} are held at once, by {most.name}"
    if most.limit_bytes is not None:
        text += f", whose limit is {bytes_text(most.limit_bytes)}"
    yield f"{text}. Peaks follow from the order alone and are proven."
    sent = found.message_bytes
    if len(sent):
        carry = "carries" if len(sent) == 1 else "carry"
        sum_text = bytes_text(int(sent.sum()))
        yield f"{_count(len(sent), 'message')} {carry} {sum_text} between devices."


def bindings(
    found: Simulated,
    times: Times,
    devices: Sequence[DeviceRow],
    links: Sequence[LinkRow],
    critical: Critical,
) -> Iterator[Binding]:
    """Yield what keeps the step from being faster or smaller.

    Args:
        found: The plan, timed.
        times: Of a step.
        devices: Its devices.
        links: What they send.
        critical: The critical path.
    """
    yield from _memory(devices)
    step = times.makespan_s or 1.0
    for row in sorted(links, key=lambda row: -row.critical_s)[:3]:
        if row.critical_s > WORTH * step:
            pair = f"{found.names[row.source]} to {found.names[row.target]}"
            yield Binding(
                what="link",
                text=f"The link {pair}: its messages are {percent_text(row.critical_s / step)} of "
                f"the critical path, {seconds_text(row.critical_s)}.",
            )
    busy = max(devices, key=lambda device: device.busy_s)
    if busy.busy_s >= BUSY * step:
        rest = percent_text(max(0.0, 1 - busy.busy_s / step))
        least = "no" if rest == percent_text(0.0) else f"at most {rest}"
        yield Binding(
            what="compute",
            text=f"{busy.name} computes {percent_text(busy.busy_s / step)} of the step: the step "
            f"gets {least} shorter unless that device has less or faster work.",
        )
    yield _path(found, times, critical)


def _memory(devices: Sequence[DeviceRow]) -> Iterator[Binding]:
    full = [
        row for row in devices if row.usable_bytes and row.peak_bytes >= TIGHT * row.usable_bytes
    ]
    if not full:
        return
    each = "; ".join(
        f"{row.name} holds {bytes_text(row.peak_bytes)} of {bytes_text(row.usable_bytes)} usable"
        for row in full[:4]
    )
    more = f"; and {len(full) - 4} more" if len(full) > 4 else ""
    yield Binding(what="memory", text=f"Memory: {each}{more}.")


def _path(found: Simulated, times: Times, critical: Critical) -> Binding:
    step = times.makespan_s or 1.0
    by_device = found.phase_seconds(found.arrays.place, found.arrays.num_devices) * 0
    for op in critical.op_s.nonzero()[0].tolist():
        by_device[found.arrays.place[op], found.phase[op]] += critical.op_s[op]
    shares = sorted(
        ((float(row.sum()), name) for row, name in zip(by_device, found.names, strict=True)),
        key=lambda pair: -pair[0],
    )
    listed = ", ".join(
        f"{name} {percent_text(seconds / step)}"
        for seconds, name in shares[:4]
        if seconds > WORTH * step
    )
    ops, messages = int((critical.op_s > 0).sum()), int((critical.message_s > 0).sum())
    return Binding(
        what="critical path",
        text=f"The critical path runs through {_count(ops, 'op')} ({listed or 'none long'}) and "
        f"{_count(messages, 'message')} "
        f"({percent_text(times.critical_messages_s / step)}): the step gets no shorter "
        "unless something on it does.",
    )
