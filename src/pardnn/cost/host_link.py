"""The link between an accelerator and the memory of its host."""

from __future__ import annotations

from collections.abc import Mapping

from pardnn.graph.ir import FROM_HOST, TO_HOST, Op, Tensor, span_bytes

#: Bytes per second that PCI Express 3.0 of 16 lanes moves from and to pinned memory, and the
#: seconds of a launch. Assumed, where nothing is measured.
BANDWIDTH, LATENCY = 12e9, 10e-6


def is_host_copy(op: Op) -> bool:
    """Whether an op copies between a device and its host."""
    return op.kind in (FROM_HOST, TO_HOST)


def host_copy_seconds(op: Op, tensors: Mapping[str, Tensor]) -> float:
    """Return the seconds of a copy over the link."""
    return LATENCY + span_bytes(tensors[op.inputs[0]]) / BANDWIDTH
