"""Timelines: the simulated times of one step."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Float64, Int64
from numpy import ndarray

from pardnn.graph.csr import GraphArrays
from pardnn.graph.ir import Graph
from pardnn.sim.machine import Machine
from pardnn.sim.transfers import transfers_of


class Timeline(NamedTuple):
    """Simulated times of one step, in seconds from its start. NaN: it never happened.

    Attributes:
        start: Of each op.
        finish: Of each op.
        dispatch: Position of each op among all by the order of their starts.
        message_tensor: What each message carries.
        message_source: The device that sends it.
        message_target: The device that receives it.
        message_start: When it leaves.
        message_finish: When it has arrived.
    """

    start: Float64[ndarray, " n"]
    finish: Float64[ndarray, " n"]
    dispatch: Int64[ndarray, " n"]
    message_tensor: Int64[ndarray, " m"]
    message_source: Int64[ndarray, " m"]
    message_target: Int64[ndarray, " m"]
    message_start: Float64[ndarray, " m"]
    message_finish: Float64[ndarray, " m"]

    @property
    def makespan(self) -> float:
        """Seconds until the last op has finished."""
        return float(self.finish.max())

    def busy(self, place: Int64[ndarray, " n"], num_devices: int) -> Float64[ndarray, " k"]:
        """Seconds that each device computes."""
        return np.bincount(place, weights=self.finish - self.start, minlength=num_devices)

    def transfer_bytes(self, graph: Graph) -> int:
        """Bytes sent between devices."""
        return int(graph.arrays.tensor_bytes[self.message_tensor].sum())


def static_timeline(
    arrays: GraphArrays,
    machine: Machine,
    place: Int64[ndarray, " n"],
    start: Float64[ndarray, " n"],
    finish: Float64[ndarray, " n"],
    dispatch: Int64[ndarray, " n"],
) -> Timeline:
    """Return the timeline of a schedule whose transfers start when their tensor exists.

    Args:
        arrays: The graph.
        machine: Durations and links.
        place: Device of each op.
        start: Seconds.
        finish: Seconds.
        dispatch: Position of each op among all by the order of their starts.
    """
    transfers = transfers_of(arrays, place, machine.num_devices)
    producer, target = arrays.tensor_op[transfers.tensor], transfers.target
    source, sent = place[producer], finish[producer]
    sizes = arrays.tensor_bytes[transfers.tensor]
    comm = machine.latency[source, target] + sizes / machine.bandwidth[source, target]
    return Timeline(start, finish, dispatch, transfers.tensor, source, target, sent, sent + comm)
