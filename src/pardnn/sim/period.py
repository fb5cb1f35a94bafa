"""The period of a plan: the time of a step among many, with no barrier between them but data.

Problem: a step's makespan counts from an idle machine to the last op. A device that is done with
its list begins it again at once, as its parameters and states are its own, so consecutive steps
overlap, and what counts in the long run is the time from one step's end to the next one's.

Idea: all that a step inherits from the one before it is when each device may begin. A device ends
its list when its last op has run and all that it sends has left, so no link carries messages of two
steps of one sender, and the order in memory is that of one list after the other: proven peaks hold.
One step is thus a function from the devices' beginnings to their ends, and it is simulated until
the ends repeat relative to each other: the period is the mean time between. Where links are
independent it is linear over (max, +), so that they do repeat, and the period lies between the
least and the largest growth of any device in any step (Baccelli et al., Synchronization and
Linearity, 1992): where the two meet, fewer steps do.

No device runs more than one step ahead of any other: the runtime waits there for the last loss.
Lower bound: the busiest device, or the busiest serial link. O(step simulations), a handful as a
rule, at most `MOST_STEPS`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Float64
from numpy import ndarray

from pardnn.graph.csr import GraphArrays
from pardnn.plan.plan import PlanArrays
from pardnn.sim.engine import run_lists
from pardnn.sim.levels import placed_seconds
from pardnn.sim.machine import Machine

#: Steps simulated if ends do not repeat before: the period then is the mean of the later half.
MOST_STEPS = 64
#: Ops simulated in all, from which on the steps become fewer.
MOST_OPS = 2_000_000
#: Times that differ by less, relative to the makespan, are equal.
SAME = 1e-9


class Period(NamedTuple):
    """The time of a step among many.

    Attributes:
        seconds: Mean time from one step's end to the next one's.
        lower_bound: That no order of the same placement is below, seconds.
        steps: How many steps were simulated.
        settled: Whether the ends of devices repeated; else `seconds` is a mean of later steps.
        ready: When each device begins a late step, after the first one that does, seconds.
    """

    seconds: float
    lower_bound: float
    steps: int
    settled: bool
    ready: Float64[ndarray, " k"]


def period(arrays: GraphArrays, machine: Machine, plan: PlanArrays) -> Period:
    """Return the period of a plan under its own order.

    Args:
        arrays: The graph.
        machine: Durations and links.
        plan: A plan that does not deadlock.
    """
    k, bound = machine.num_devices, busiest_seconds(arrays, machine, plan)
    most = min(MOST_STEPS, max(4, MOST_OPS // max(arrays.num_ops, 1)))
    low, high = bound, np.inf
    elapsed, known = [0.0], [np.zeros(k)]  # of the first device that begins; of the others
    for step in range(1, most + 1):
        ready = known[-1]
        ends = np.maximum(_ends(arrays, machine, plan, ready), ready.max())
        growth = ends - ready
        if not machine.serial:
            low, high = max(low, float(growth.min())), min(high, float(growth.max()))
            if high - low <= SAME * high:
                return Period(max(high, bound), bound, step, True, ready)
        elapsed.append(elapsed[-1] + float(ends.min()))
        known.append(ends - ends.min())
        for back in range(step):
            if np.abs(known[back] - known[step]).max() <= SAME * growth.max():
                seconds = (elapsed[step] - elapsed[back]) / (step - back)
                return Period(max(seconds, bound), bound, step, True, known[step])
    half = most // 2
    mean = (elapsed[most] + known[most].max() - elapsed[half] - known[half].max()) / (most - half)
    return Period(max(float(mean), bound), bound, most, False, known[most])


def _ends(
    arrays: GraphArrays, machine: Machine, plan: PlanArrays, ready: Float64[ndarray, " k"]
) -> Float64[ndarray, " k"]:
    """Return when each device is done with its list and has sent what it sends."""
    timeline = run_lists(arrays, machine, plan, ready)
    ends = ready.copy()
    np.maximum.at(ends, plan.place, timeline.finish)
    np.maximum.at(ends, plan.message_source, timeline.message_finish)
    return ends


def busiest_seconds(arrays: GraphArrays, machine: Machine, plan: PlanArrays) -> float:
    """Return the seconds of work of the busiest device or serial link: a bound on the period."""
    k = machine.num_devices
    work = np.bincount(plan.place, weights=placed_seconds(machine, plan.place), minlength=k)
    if not machine.serial or not len(plan.message_tensor):
        return float(work.max(initial=0.0))
    source, target = plan.message_source, plan.message_target
    sizes = arrays.tensor_bytes[plan.message_tensor]
    seconds = machine.latency[source, target] + sizes / machine.bandwidth[source, target]
    return float(
        max(work.max(initial=0.0), np.bincount(source * k + target, weights=seconds).max())
    )
