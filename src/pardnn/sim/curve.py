"""Live bytes over simulated time, for people. Limits bind the order-only peak, not this curve."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float64, Int64
from numpy import ndarray

from pardnn.graph.csr import GraphArrays
from pardnn.plan.plan import PlanArrays
from pardnn.sim.peak import held_bytes
from pardnn.sim.timeline import Timeline


def memory_curve(
    arrays: GraphArrays, plan: PlanArrays, timeline: Timeline, device: int
) -> tuple[Float64[ndarray, " p"], Int64[ndarray, " p"]]:
    """Return start times in seconds of a device's ops, and the bytes it holds while each runs.

    The maximum over the second is the order-only peak of the device.
    """
    row = slice(plan.order_ptr[device], plan.order_ptr[device + 1])
    held = held_bytes(arrays, plan)[row]
    return timeline.start[plan.order_op[row]], np.asarray(held)
