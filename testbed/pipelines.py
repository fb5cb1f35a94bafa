"""Unit pipelines as plain graphs: what a planner has to make of schedules experts draw by hand.

A stage's forward, input gradient and weight gradient take 1 each, or 1/2 each where a device has
two chunks; messages take nothing; an activation of `ACTIVATION` bytes (half of that for a chunk)
is held from the start of the forward to the end of the weight gradient. The ops stand in the order
in which a loop over microbatches runs them, and a stage's ops are grouped with its weight: that is
all a planner is told. What each device may hold is the cluster's limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pardnn.cluster import Cluster
from pardnn.graph.build import build_graph
from pardnn.graph.ir import Graph, Op, Tensor

#: Bytes of one microbatch's activation on one device, all its chunks together.
ACTIVATION = 1024


class StageTimes(NamedTuple):
    """Seconds of a stage's three ops on a microbatch."""

    forward: float = 1.0
    input_gradient: float = 1.0
    weight_gradient: float = 1.0


def pipeline(
    devices: int,
    microbatches: int,
    *,
    chunks: int = 1,
    times: StageTimes = StageTimes(),  # noqa: B008
    scales: Sequence[float] | None = None,
    message_bytes: int = 0,
) -> Graph:
    """Return the graph of a pipelined step.

    Args:
        devices: Stages are this number times `chunks`.
        microbatches: Pieces of the batch.
        chunks: Stages per device.
        times: Of a device's whole share; a chunk takes its part of it.
        scales: Factor of each stage's times and bytes; None: all are alike.
        message_bytes: What a stage sends to the next.
    """
    stages = devices * chunks
    scale = [1.0] * stages if scales is None else list(scales)
    ops = list[Op]()

    def add(
        name: str, s: int, seconds: float, reads: tuple[str, ...], makes: tuple[Tensor, ...]
    ) -> None:
        kind, memory = ("stage", "normal") if reads else ("parameter", "residual")
        took = {"accelerator": seconds * scale[s] / chunks}
        ops.append(
            Op(
                name=name, kind=kind, inputs=reads, outputs=makes, seconds=took, group=f"s{s}",
                memory=memory,
            )
        )  # fmt: skip

    for s in range(stages):
        add(f"w{s}", s, 0.0, (), (tensor(f"w{s}", 0),))
    for i in range(microbatches):
        for s in range(stages):
            size = round(ACTIVATION * scale[s] / chunks)
            makes = (tensor(f"a{s}.{i}", size), tensor(f"y{s}.{i}", message_bytes))
            reads = (f"w{s}",) if s == 0 else (f"w{s}", f"y{s - 1}.{i}")
            add(f"F{s}.{i}", s, times.forward, reads, makes)
        for s in reversed(range(stages)):
            above = f"y{s}.{i}" if s == stages - 1 else f"d{s + 1}.{i}"
            makes = (tensor(f"d{s}.{i}", message_bytes), tensor(f"g{s}.{i}", 0))
            reads = (f"w{s}", f"a{s}.{i}", above)
            add(f"B{s}.{i}", s, times.input_gradient, reads, makes)
            reads = (f"a{s}.{i}", f"g{s}.{i}")
            add(f"W{s}.{i}", s, times.weight_gradient, reads, (tensor(f"v{s}.{i}", 0),))
    return build_graph(f"pipeline-{devices}x{chunks}-{microbatches}", ops)


def tensor(name: str, size: int) -> Tensor:
    """Return a tensor of so many bytes."""
    return Tensor(name=name, bytes=size)


def pipeline_cluster(devices: int, cap: float | None, *, latency: float = 0.0) -> Cluster:
    """Return equal devices that hold `cap` activations each; None: as many as there are.

    Args:
        devices: How many.
        cap: In units of `ACTIVATION`.
        latency: Seconds of each message beside its bytes.
    """
    memory = None if cap is None else round(cap * ACTIVATION)
    return Cluster.uniform(devices, memory=memory, bandwidth=1e9, latency=latency)
