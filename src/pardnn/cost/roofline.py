"""Seconds of an op from a device's rates: the roofline with launch cost and saturation.

    seconds = launch + max(FLOP / (rate * u), bytes / (bandwidth * v))

The roofline (Williams, Waterman and Patterson, CACM 52, 2009) alone says that half the batch takes
half the time. It does not: a kernel with little to do leaves most of the device idle. So each
rate is scaled by how full the device is, u = P / (P + width) where P is the number of results that
can be computed side by side, and v = bytes / (bytes + fill) where fill is what must be in flight to
keep the memory busy (Little's law). P counts long sums as several results, because kernels split
them: one part per `SPLIT` FLOP. Both scalings are hyperbolas, so seconds grow with every size while
seconds per sample fall with the batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pardnn.cost.call import call_of, is_free, is_view
from pardnn.cost.flops import Unit, Work, work_of
from pardnn.graph.ir import Op, Tensor

#: FLOP of a sum that one worker does before kernels split it: 256 multiply-adds.
SPLIT = 512.0

#: Seconds of one arithmetic operation on host scalars: a Python call. Assumed.
HOST_SECONDS = 2e-7


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceModel:
    """What the roofline knows of a device.

    Attributes:
        name: Such as "a100".
        flops: Peak FLOP/s by unit ("matmul", "conv", "vector") and dtype. A dtype that is absent
            runs at the rate of float32.
        efficiency: Share of the peak that large library kernels reach, by unit.
        bandwidth: Bytes/s that large kernels move to and from memory.
        launch: Seconds from one op to the next when neither has work to do.
        width: Results in flight when the device is full: resident threads on a GPU.
        fill: Bytes in flight when the memory is busy (bandwidth x latency).
        sources: Where each figure is from.
    """

    name: str
    flops: Mapping[Unit, Mapping[str, float]]
    efficiency: Mapping[Unit, float]
    bandwidth: float
    launch: float
    width: float
    fill: float
    sources: Mapping[str, str]

    def rate(self, unit: Unit, dtype: str) -> float:
        """FLOP/s that a large kernel of this unit and dtype reaches."""
        rates = self.flops[unit]
        return rates.get(dtype, rates["float32"]) * self.efficiency[unit]


def work_seconds(work: Work, model: DeviceModel) -> float:
    """Seconds that this much work takes on this device, launch included."""
    # FLOP / (rate * P / (P + width)) with P = FLOP / min(depth, SPLIT), without dividing by 0.
    busy = work.flop + min(work.depth, SPLIT) * model.width
    compute = busy / model.rate(work.unit, work.dtype) if work.flop else 0.0
    moved = (work.bytes + model.fill) / model.bandwidth if work.bytes else 0.0
    return model.launch + max(compute, moved)


def op_seconds(op: Op, tensors: Mapping[str, Tensor], model: DeviceModel) -> float:
    """Seconds of one op on this device.

    Sources, the loss mark and views take none; host arithmetic takes `HOST_SECONDS`.

    Args:
        op: An op.
        tensors: Those of its graph, by name.
        model: The device.
    """
    if is_free(op) or is_view(op):
        return 0.0
    work = work_of(call_of(op, tensors))
    return HOST_SECONDS if work is None else work_seconds(work, model)


def least_share(op: Op, tensors: Mapping[str, Tensor], model: DeviceModel, devices: int) -> float:
    """Return the least part of an op's seconds that each of several devices takes, if all share it.

    However the op is cut: each makes a call, and together they read and write no less than one.

    Args:
        op: An op.
        tensors: Those of its graph, by name.
        model: The device.
        devices: How many share the op.
    """
    if is_free(op) or is_view(op):
        return 0.0
    work = work_of(call_of(op, tensors))
    if work is None:
        return 1.0
    part = work._replace(
        flop=work.flop / devices, depth=work.depth / devices, bytes=work.bytes / devices
    )
    return work_seconds(part, model) / work_seconds(work, model)
