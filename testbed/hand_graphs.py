"""Small training steps as graphs, built by hand: what an MLP does op by op; unit pipelines.

In a unit pipeline a stage's forward, input gradient and weight gradient take 1 each, or 1/2 each
where a device has two chunks; messages take nothing; an activation of `ACTIVATION` bytes (half of
that for a chunk) is held from the start of the forward to the end of the weight gradient. The ops
stand in the order in which a loop over microbatches runs them, and a stage's ops are grouped with
its weight: that is all a planner is told. What each device may hold is the cluster's limit.
"""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

from pardnn.cluster import Cluster
from pardnn.graph.build import build_graph
from pardnn.graph.ir import Graph, Op, Tensor


class Steps:
    """Ops of a graph under construction."""

    def __init__(self):
        self.ops = []
        self.shapes = {}

    def source(self, name, shape, kind="parameter"):
        """A value that exists before the step."""
        memory = "normal" if kind == "input" else "residual"
        self.ops.append(
            Op(name=name, kind=kind, outputs=(self._tensor(name, shape),), memory=memory)
        )
        return name

    def call(self, name, kind, args, shape, *, alias=None, of=None, kwargs=None):
        """A call with one result; strings are tensors."""
        inputs = tuple(dict.fromkeys(a for a in args if isinstance(a, str)))
        arguments = {"args": [{"tensor": a} if isinstance(a, str) else a for a in args]}
        if kwargs:
            arguments["kwargs"] = kwargs
        self.ops.append(
            Op(
                name=name,
                kind=kind,
                inputs=inputs,
                outputs=(self._tensor(name, shape, alias),),
                memory="reference" if alias else "normal",
                arguments=arguments,
                backward_of=of,
            )
        )
        return name

    def mm(self, name, one, other, *, of=None):
        """A product of matrices."""
        shape = self.shapes[one][0], self.shapes[other][1]
        return self.call(name, "aten.mm.default", [one, other], shape, of=of)

    def t(self, name, of_tensor, *, of=None):
        """A transposed view."""
        shape = self.shapes[of_tensor][::-1]
        return self.call(name, "aten.t.default", [of_tensor], shape, alias=of_tensor, of=of)

    def update(self, weight, gradient):
        """A step of SGD, in place."""
        shape = self.shapes[weight]
        kwargs = {"alpha": -0.1}
        kind = "aten.add_.Tensor"
        return self.call(
            f"{weight}.new", kind, [weight, gradient], shape, alias=weight, kwargs=kwargs
        )

    def graph(self):
        """The graph."""
        return build_graph("by hand", self.ops)

    def _tensor(self, name, shape, alias=None):
        self.shapes[name] = tuple(shape)
        size = 4 * math.prod(shape)
        return Tensor(name=name, bytes=size, shape=tuple(shape), dtype="float32", alias_of=alias)


def matmul(m, k, n):
    """Y = X W, alone."""
    steps = Steps()
    steps.source("x", (m, k), "input")
    steps.source("w", (k, n))
    steps.mm("y", "x", "w")
    return steps.graph()


def chain(rows, *widths):
    """Y = X W1 W2 ..., nothing in between."""
    steps = Steps()
    last = steps.source("h0", (rows, widths[0]), "input")
    for number, (k, n) in enumerate(itertools.pairwise(widths), 1):
        steps.source(f"w{number}", (k, n))
        last = steps.mm(f"h{number}", last, f"w{number}")
    return steps.graph()


def mlp(batch, inner, hidden, classes):
    """A training step of two layers with SGD; the gradient of the input is not needed."""
    s = Steps()
    s.source("x", (batch, inner), "input")
    s.source("target", (batch, classes), "input")
    s.source("w1", (inner, hidden))
    s.source("w2", (hidden, classes))
    s.mm("h", "x", "w1")
    s.call("a", "aten.relu.default", ["h"], (batch, hidden))
    s.mm("y", "a", "w2")
    s.call("dy", "aten.sub.Tensor", ["y", "target"], (batch, classes))
    s.mm("dw2", s.t("a.t", "a", of="y"), "dy", of="y")
    s.mm("da", "dy", s.t("w2.t", "w2", of="y"), of="y")
    s.call("dh", "aten.threshold_backward.default", ["da", "h", 0], (batch, hidden), of="a")
    s.mm("dw1", s.t("x.t", "x", of="h"), "dh", of="h")
    s.update("w2", "dw2")
    s.update("w1", "dw1")
    return s.graph()


def conv1d(batch, channels, filters, length, window):
    """A convolution with the same padding, alone."""
    s = Steps()
    s.source("data", (batch, channels, length), "input")
    s.source("filters", (filters, channels, window))
    args = ["data", "filters", None, [1], [window // 2], [1], False, [0], 1]
    s.call("y", "aten.convolution.default", args, (batch, filters, length))
    return s.graph()


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
