"""Small training steps as graphs, built by hand: what an MLP does, op by op."""

import itertools
import math

from pardnn.graph.build import build_graph
from pardnn.graph.ir import Op, Tensor


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
