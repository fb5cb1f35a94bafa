"""Step times of devices that take from each other: ranks that share cores, caches and memory.

The simulator (`pardnn.sim.engine`) gives every device its own speed, and messages cost their ends
nothing. Where a cluster says how far that is wrong (`cluster.Sharing`), its step times are
corrected:

- A message adds its overhead (the o of LogGP, Alexandrov et al., SPAA 1995) to the op that makes
  its tensor and to the first op that reads it on the other device.
- While j devices compute, time passes `slowdown[j - 1]` times as slowly: the simulated timeline is
  stretched there. That is processor sharing with equal rates. Messages under way are stretched too,
  so a step that waits for links is overestimated.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Float64
from numpy import ndarray

from pardnn.cluster import Cluster, Rate, Sharing
from pardnn.graph.ir import Graph
from pardnn.plan.plan import PlanArrays
from pardnn.sim.engine import first_uses, simulate
from pardnn.sim.levels import placed_seconds
from pardnn.sim.machine import Machine
from pardnn.sim.period import period
from pardnn.sim.timeline import Timeline

#: Of devices that have all they need: no time is changed, to the last bit.
_NOTHING = Sharing(slowdown=(1.0,))


class StepTimes(NamedTuple):
    """How long a plan's steps take.

    Attributes:
        timeline: Of one step.
        period: Seconds of a step among many.
    """

    timeline: Timeline
    period: float


def timeline_on(cluster: Cluster, graph: Graph, machine: Machine, plan: PlanArrays) -> Timeline:
    """Return the timeline of a step on a cluster, whose devices may share what they have.

    Args:
        cluster: What the plan runs on.
        graph: The graph.
        machine: Its durations, and the cluster's links.
        plan: A valid plan.
    """
    sharing = cluster.sharing or _NOTHING
    machine = with_overhead(graph, machine, plan, sharing.overhead)
    return stretched(simulate(graph, machine, plan), sharing.slowdown)


def step_times(cluster: Cluster, graph: Graph, machine: Machine, plan: PlanArrays) -> StepTimes:
    """Return the timeline of one step, and the seconds of a step among many, on a cluster.

    A period is stretched as much as the makespan.

    Args:
        cluster: What the plan runs on.
        graph: The graph.
        machine: Its durations, and the cluster's links.
        plan: A valid plan.
    """
    sharing = cluster.sharing or _NOTHING
    machine = with_overhead(graph, machine, plan, sharing.overhead)
    alone = simulate(graph, machine, plan)
    timeline = stretched(alone, sharing.slowdown)
    among = period(graph.arrays, machine, plan).seconds
    longer = timeline.makespan / alone.makespan if alone.makespan > 0 else 1.0
    return StepTimes(timeline, among * longer)


def with_overhead(
    graph: Graph, machine: Machine, plan: PlanArrays, overhead: Rate | None
) -> Machine:
    """Return durations for this plan alone, in which messages take time of both of their ends.

    Args:
        graph: The graph.
        machine: Durations and links.
        plan: A valid plan.
        overhead: Of a message, at each end; None: nothing.
    """
    if overhead is None:
        return machine
    a, tensors = graph.arrays, plan.message_tensor
    seconds = placed_seconds(machine, plan.place).copy()
    sizes = a.tensor_bytes[tensors].astype(np.float64)
    own = overhead.latency + sizes / overhead.bandwidth
    np.add.at(seconds, a.tensor_op[tensors], own)
    np.add.at(seconds, first_uses(a, plan), own)
    everywhere = np.zeros_like(machine.device_class)
    return machine._replace(seconds=seconds[None, :], device_class=everywhere)


def stretched(timeline: Timeline, slowdown: tuple[float, ...]) -> Timeline:
    """Return a timeline in which time passes the more slowly the more devices compute.

    O((n + messages) log n).

    Args:
        timeline: Simulated with every device by itself.
        slowdown: See `cluster.Sharing`.
    """
    if slowdown[-1] == 1.0:
        return timeline
    busy = timeline.finish > timeline.start
    # What ends at a time comes before what begins then.
    times = np.concatenate([[0.0], timeline.finish[busy], timeline.start[busy]])
    change = np.repeat([0, -1, 1], [1, int(busy.sum()), int(busy.sum())])
    order = np.argsort(times, kind="stable")
    times, computing = times[order], np.minimum(np.cumsum(change[order]), len(slowdown))
    factor = np.concatenate([[1.0], slowdown])[computing[:-1]]
    later = np.concatenate([[0.0], np.cumsum(np.diff(times) * factor)])

    def at(when: Float64[ndarray, " x"]) -> Float64[ndarray, " x"]:
        return np.interp(when, times, later) + np.maximum(when - times[-1], 0.0)

    return timeline._replace(
        start=at(timeline.start), finish=at(timeline.finish),
        message_start=at(timeline.message_start), message_finish=at(timeline.message_finish),
    )  # fmt: skip
