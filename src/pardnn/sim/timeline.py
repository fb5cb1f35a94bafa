"""What the judge returns."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Float64, Int64
from numpy import ndarray

from pardnn.graph.ir import Graph


class Timeline(NamedTuple):
    """Simulated times of one step, in seconds from its start. NaN: it never happened."""

    start: Float64[ndarray, " n"]
    finish: Float64[ndarray, " n"]
    dispatch: Int64[ndarray, " n"]  # rank of the op among all by the order of their starts
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
