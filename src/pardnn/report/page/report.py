"""The report of a plan: everything that the page shows, made from its simulation."""

from __future__ import annotations

import numpy as np

from pardnn.plan.check import capacities
from pardnn.plan.memory import peak_bytes
from pardnn.plan.run_record import RunRecord
from pardnn.report.page.bars import Critical, bars_of, links_of, messages_of, op_runs
from pardnn.report.page.contents import Bars, DeviceRow, Report, Times
from pardnn.report.page.measured import measured_of
from pardnn.report.page.memory import memory_charts
from pardnn.report.page.modules import module_rows
from pardnn.report.page.simulated import Simulated
from pardnn.report.page.summary import bindings, costs, decided
from pardnn.report.text import seconds_text
from pardnn.sim.period import period
from pardnn.sim.waits import COMPUTE, MESSAGE, Causes, causes, critical_chain, idle_stretches

#: Reasons that are listed for each device's idle time.
MOST_WAITS = 4
#: Ops times devices from which on nobody asks why each device idles: it takes longer than drawing.
MOST_CHAINS = 200_000
#: Times that differ by less, relative, were made with the same costs.
SAME = 1e-6


def report_of(found: Simulated, record: RunRecord | None = None) -> Report:
    """Return the report of a plan. O(ops + messages) and the simulation of a few steps.

    Args:
        found: The plan, timed.
        record: What was measured of it.
    """
    why = causes(found.graph, found.machine, found.arrays, found.timeline)
    critical = Critical(found, critical_chain(why))
    times = _times(found, critical)
    devices = _devices(found, why)
    links = links_of(found, critical)
    runs = op_runs(found, critical)
    bars = bars_of(found, critical, why, runs)
    plan = found.plan
    return Report(
        title=f"{found.whole.name} on {plan.num_devices} device{'s' * (plan.num_devices > 1)}",
        decided=tuple(decided(found, devices)),
        costs=tuple(costs(found, times, devices)),
        binds=tuple(bindings(found, times, devices, links, critical)),
        times=times,
        devices=devices,
        bars=bars,
        messages=messages_of(found, critical),
        links=links,
        memory=memory_charts(found),
        modules=module_rows(found),
        measured=None if record is None else measured_of(found, record, runs),
        tried=plan.tried,
        notes=(*plan.notes, *_notes(found, bars)),
    )


def _times(found: Simulated, critical: Critical) -> Times:
    return Times(
        makespan_s=found.timeline.makespan,
        period_s=period(found.graph.arrays, found.machine, found.arrays).seconds,
        lower_bound_s=found.lower_bound_s,
        serial_s=found.serial_s if np.isfinite(found.serial_s) else None,
        critical_compute_s=float(critical.op_s.sum()),
        critical_messages_s=float(critical.message_s.sum()) + critical.order_s,
    )


def _devices(found: Simulated, why: Causes) -> tuple[DeviceRow, ...]:
    plan, arrays = found.plan, found.arrays
    assert plan.cluster is not None
    usable = capacities(plan.cluster, plan.reserve)
    peaks = peak_bytes(found.graph, arrays)
    phases = found.phase_seconds(arrays.place, arrays.num_devices)
    return tuple(
        DeviceRow(
            name=device.name,
            ops=int(arrays.order_ptr[i + 1] - arrays.order_ptr[i]),
            limit_bytes=device.memory,
            usable_bytes=usable[i],
            peak_bytes=peaks[i],
            busy_s=float(phases[i].sum()),
            phase_s=tuple(phases[i].tolist()),
            waits=_waits(found, why, i),
        )
        for i, device in enumerate(plan.cluster.devices)
    )


def _waits(found: Simulated, why: Causes, device: int) -> tuple[tuple[str, float], ...]:
    """Return why a device idles, longest first."""
    if len(found.graph.ops) * found.arrays.num_devices > MOST_CHAINS:
        return ()
    names, arrays = found.names, found.arrays
    spent: dict[str, float] = {}
    for idle in idle_stretches(why, arrays, device):
        stretch = idle.stretch
        if stretch.what == COMPUTE:
            text = f"work of {names[arrays.place[stretch.number]]}"
        elif stretch.what == MESSAGE:
            source, target = arrays.message_source, arrays.message_target
            text = f"message {names[source[stretch.number]]} to {names[target[stretch.number]]}"
        else:
            text = "an order between devices"
        end = "" if idle.before >= 0 else ", with no work left"
        spent[text + end] = spent.get(text + end, 0.0) + stretch.finish - stretch.start
    listed = sorted(spent.items(), key=lambda pair: (-pair[1], pair[0]))
    rest = sum(seconds for _, seconds in listed[MOST_WAITS:])
    others = [("other waits", rest)] if len(listed) > MOST_WAITS else []
    return (*listed[:MOST_WAITS], *others)


def _notes(found: Simulated, bars: Bars) -> list[str]:
    notes: list[str] = []
    predicted = found.plan.predicted
    step = found.timeline.makespan
    if predicted is not None and abs(predicted.makespan_s - step) > SAME * step:
        notes.append(
            "The plan was made with other costs: it predicts "
            f"{seconds_text(predicted.makespan_s)} a step, with {found.costs} it takes "
            f"{seconds_text(step)}. Choose with --costs."
        )
    ops = len(found.graph.ops)
    if max(bars.count, default=1) > 1:
        notes.append(
            f"{ops:,} ops are drawn as {len(bars.name):,} bars: neighbours of one phase are one "
            "bar, named for the longest op in it. Sums and peaks are of all ops."
        )
    return notes
