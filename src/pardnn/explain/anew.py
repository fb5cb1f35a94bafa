"""What more memory, faster links or one more device would bring: simulated, or planned again.

A new plan differs from an old one for two reasons: what has changed, and what the planner
finds today. So the step is planned twice, without and with the change, and the two are compared;
the plan in question is shown next to them.
"""

from __future__ import annotations

import dataclasses
import re

import numpy as np

from pardnn.cluster import Cluster, Device, more_like
from pardnn.errors import InfeasibleError, UsageError
from pardnn.explain.case import Case
from pardnn.explain.memory import Memory, device_memory
from pardnn.explain.waiting import critical_path
from pardnn.planner.algorithms import BEST, BEST_WHOLE
from pardnn.planner.costs import costs_for
from pardnn.planner.make_plan import make_plan
from pardnn.planner.options import PlanOptions
from pardnn.planner.problem import Problem
from pardnn.report.explained import Alternative, MemoryExplained, TimeExplained
from pardnn.sim.engine import run_lists
from pardnn.sim.machine import Machine
from pardnn.units import bytes_text, parse_bytes

_MORE = re.compile(r"\+([0-9]{1,4})")


def explain_memory(
    case: Case, change: str | None = None, algorithm: str | None = None
) -> MemoryExplained:
    """Explain what holds each device's peak, and what other limits would bring.

    Args:
        case: The plan.
        change: "+2GiB" or "-2GiB" for every device that has a limit, or "10GiB" for every device;
            None: plans nothing.
        algorithm: Of new plans; None for the best of the plan's kind.

    Raises:
        UsageError: E242, if no limit can be changed this way, or none changes; E202, if it is not a
            size.
        InfeasibleError: E301, if the unchanged step no longer fits.
    """
    memory = Memory(case)
    anew: tuple[Alternative, ...] = ()
    if change is not None:
        cluster = with_memory(case.cluster, change)
        limit = bytes_text(max((d.memory or 0 for d in cluster.devices), default=0))
        anew = _anew(case, cluster, f"with {change} (limit {limit})", algorithm)
    return MemoryExplained(
        makespan_s=case.timeline.makespan,
        devices=tuple(device_memory(memory, device) for device in range(len(case.devices))),
        anew=anew,
        notes=case.notes,
    )


def explain_time(
    case: Case, change: str | None = None, algorithm: str | None = None
) -> TimeExplained:
    """Explain what the critical path is made of, and what faster links or more devices would bring.

    Args:
        case: The plan.
        change: "+1" for one more device; None: plans nothing.
        algorithm: Of new plans; None for the best of the plan's kind.

    Raises:
        UsageError: E242, if devices or links are not all alike, it is not a number, or it is zero.
    """
    anew: tuple[Alternative, ...] = ()
    if change is not None:
        cluster = with_devices(case.cluster, change)
        what = f"with {change} device ({cluster.num_devices} in all)"
        anew = _anew(case, cluster, what, algorithm)
    return TimeExplained(
        makespan_s=case.timeline.makespan,
        path=critical_path(case),
        faster=_faster(case),
        anew=anew,
        notes=case.notes,
    )


def with_memory(cluster: Cluster, change: str) -> Cluster:
    """Return the cluster with other limits.

    Args:
        cluster: The cluster.
        change: As in `explain_memory`.

    Raises:
        UsageError: E242, if no device has a limit that could be changed, one has none left, or
            nothing changes.
    """
    sign, size = (change[0], change[1:]) if change[:1] in ("+", "-") else ("", change)
    amount = parse_bytes(size, "memory")
    if sign and all(device.memory is None for device in cluster.devices):
        raise UsageError(
            "no device has a memory limit, so more memory brings nothing.\n"
            "Ask what a limit would cost: pardnn explain PLAN --memory 10GiB.",
            code="E242",
        )

    def limit(memory: int | None) -> int | None:
        if not sign:
            return amount
        return memory if memory is None else memory + (amount if sign == "+" else -amount)

    limits = [limit(device.memory) for device in cluster.devices]
    if any(size is not None and size <= 0 for size in limits):
        raise UsageError(f"{change} leaves a device without memory", code="E242")
    devices = zip(cluster.devices, limits, strict=True)
    return _with(cluster, [dataclasses.replace(d, memory=size) for d, size in devices], change)


def with_devices(cluster: Cluster, change: str) -> Cluster:
    """Return the cluster with more devices like the others.

    Args:
        cluster: The cluster.
        change: "+1" for one.

    Raises:
        UsageError: E242, if devices or links are not all alike, it is not a number, or it is zero.
    """
    match, first = _MORE.fullmatch(change), cluster.devices[0]
    if match is None:
        raise UsageError(f"{change!r:.40} is not a number of devices; write +1", code="E242")
    alike = all((d.type, d.memory, d.speed) == (first.type, first.memory, first.speed)
                for d in cluster.devices)  # fmt: skip
    if not alike or cluster.links or cluster.default_link is None:
        raise UsageError(
            "devices or links are not all alike, so it is unclear what one more would be.\nWrite "
            "the larger cluster to a file: pardnn plan TARGET --cluster FILE.",
            code="E242",
        )
    more = more_like(first, int(match[1]), [device.name for device in cluster.devices])
    return _with(cluster, [*cluster.devices, *more], change)


def _with(cluster: Cluster, devices: list[Device], change: str) -> Cluster:
    if tuple(devices) == cluster.devices:
        raise UsageError(
            f"{change} changes nothing: the devices and their limits stay the same", code="E242"
        )
    return dataclasses.replace(cluster, devices=tuple(devices))


def options_of(case: Case, algorithm: str | None) -> PlanOptions:
    """Return the options that a plan was made with, as far as it says.

    Args:
        case: The plan.
        algorithm: None for the best of its kind: whole ops stay whole.
    """
    plan = case.plan
    best = BEST_WHOLE if plan.partition is None else BEST
    if plan.partition is not None and plan.partition.submeshes > 1:
        best = plan.algorithm or best
    return PlanOptions(
        algorithm=algorithm or best,
        objective=plan.objective,
        reserve=plan.reserve,
        seed=plan.seed,
        costs=case.choice,
        microbatches=None if plan.pieces is None else len(plan.pieces.points) - 1,
        recompute=plan.recompute is not None,
        offload=plan.offload is not None,
        constraints=plan.constraints or (),
    )


def _anew(
    case: Case, cluster: Cluster, what: str, algorithm: str | None
) -> tuple[Alternative, ...]:
    """Plan the step on its own cluster and on another one."""
    return (
        _planned(case, case.cluster, "unchanged", algorithm),
        _planned(case, cluster, what, algorithm),
    )


def _planned(case: Case, cluster: Cluster, what: str, algorithm: str | None) -> Alternative:
    costs = costs_for(case.graph, cluster, case.choice)
    problem = Problem(case.graph, cluster, costs, options_of(case, algorithm))
    what = f"planned again, {what}"
    try:
        _, result = make_plan(problem)
    except InfeasibleError as error:
        return Alternative(
            what=what, judged=True, fits=False, makespan_s=None, change_s=None, peak_bytes=None,
            transfer_bytes=None, why=error.message.splitlines()[0],
        )  # fmt: skip
    return Alternative(
        what=f"{what}, by {result.algorithm}",
        judged=True,
        fits=True,
        makespan_s=result.makespan_s,
        change_s=result.makespan_s - case.timeline.makespan,
        peak_bytes=result.peak_bytes,
        transfer_bytes=result.transfer_bytes,
    )


def _faster(case: Case) -> tuple[Alternative, ...]:
    """Simulate the same plan on faster links and devices."""
    m = case.machine
    twice = {"links twice as fast": m._replace(latency=m.latency / 2, bandwidth=m.bandwidth * 2)}
    free = m._replace(
        latency=np.where(np.isfinite(m.latency), 0.0, m.latency),
        bandwidth=np.full_like(m.bandwidth, np.inf),
    )
    machines = twice | {
        "links that take no time": free,
        "devices twice as fast": m._replace(seconds=m.seconds / 2),
    }
    return tuple(_simulated(case, what, machine) for what, machine in machines.items())


def _simulated(case: Case, what: str, machine: Machine) -> Alternative:
    makespan = run_lists(case.planned.arrays, machine, case.arrays).makespan
    return Alternative(
        what=f"the same plan, {what}",
        judged=True,
        fits=True,
        makespan_s=makespan,
        change_s=makespan - case.timeline.makespan,
        peak_bytes=case.peak_bytes,
        transfer_bytes=case.transfer_bytes,
    )
