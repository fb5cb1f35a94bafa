"""The input of a report: a plan as numbers, its simulation, and what each op belongs to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64, Int64
from numpy import ndarray

from pardnn.graph.ir import Graph
from pardnn.plan.plan import Plan, PlanArrays
from pardnn.sim.machine import Machine
from pardnn.sim.timeline import Timeline


class Simulated(NamedTuple):
    """A plan, timed.

    Attributes:
        whole: The graph that the plan is for.
        graph: Whose ops it places: the same, cut, in pieces, or with second calls.
        plan: A valid plan that names its cluster.
        arrays: The plan by numbers.
        machine: Durations and links.
        timeline: Its simulation.
        phase: Of each op, a number of `contents.PHASES`.
        piece: Of the batch, of each op; -1 for what runs once.
        lower_bound_s: No plan takes less.
        serial_s: The step on one device; infinite if none can run it.
        whole_seconds: Of each op of the whole graph, on the device that is fastest at it.
        costs: Where the durations come from, in words.
    """

    whole: Graph
    graph: Graph
    plan: Plan
    arrays: PlanArrays
    machine: Machine
    timeline: Timeline
    phase: Int64[ndarray, " n"]
    piece: Int64[ndarray, " n"]
    lower_bound_s: float
    serial_s: float
    whole_seconds: Float64[ndarray, " w"]
    costs: str

    @property
    def names(self) -> Sequence[str]:
        """Names of the devices."""
        assert self.plan.cluster is not None
        return [device.name for device in self.plan.cluster.devices]

    @property
    def seconds(self) -> Float64[ndarray, " n"]:
        """Of each op."""
        return self.timeline.finish - self.timeline.start

    @property
    def message_bytes(self) -> Int64[ndarray, " m"]:
        """Of each message."""
        return self.graph.arrays.tensor_bytes[self.arrays.message_tensor]

    def phase_seconds(self, of: Int64[ndarray, " n"], count: int) -> Float64[ndarray, "c p"]:
        """Return the seconds of ops by some number of theirs, and by phase.

        Args:
            of: The number of each op, from 0 on.
            count: How many numbers there are.
        """
        sums = np.bincount(of * 5 + self.phase, weights=self.seconds, minlength=count * 5)
        return sums.reshape(count, 5)
