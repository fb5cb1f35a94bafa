"""Small graphs made by hand, in the encoding that capture writes."""

import math

import numpy as np

from pardnn.cost.call import tensors_by_name
from pardnn.cost.roofline import DeviceModel, op_seconds
from pardnn.graph.build import build_graph
from pardnn.graph.ir import Graph, Op, Tensor

ITEM_BYTES = {"float64": 8, "int64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "bool": 1}


def tensor(name, *shape, dtype="float32", strides=None, alias_of=None):
    num_bytes = math.prod(shape) * ITEM_BYTES[dtype]
    return Tensor(
        name=name, bytes=num_bytes, shape=shape, dtype=dtype, strides=strides, alias_of=alias_of
    )


def source(name, *shape, dtype="float32", strides=None):
    return Op(
        name=name, kind="input", outputs=(tensor(name, *shape, dtype=dtype, strides=strides),)
    )


def call(name, kind, args, outputs, *, kwargs=None, memory="normal", seconds=None):
    """An op whose string arguments name tensors."""
    inputs = []

    def encoded(value):
        if isinstance(value, str):
            inputs.append(value)
            return {"tensor": value}
        return [encoded(item) for item in value] if isinstance(value, list) else value

    arguments = {"args": [encoded(value) for value in args], "kwargs": kwargs or {}}
    return Op(
        name=name,
        kind=kind,
        inputs=tuple(dict.fromkeys(inputs)),
        outputs=tuple(outputs),
        memory=memory,
        arguments=arguments,
        seconds=seconds,
    )


def mm_graph(m, k, n, dtype="float32") -> Graph:
    return build_graph(
        "mm",
        [
            source("a", m, k, dtype=dtype),
            source("b", k, n, dtype=dtype),
            call("c", "aten.mm.default", ["a", "b"], [tensor("c", m, n, dtype=dtype)]),
        ],
    )


def mlp_graph(batch: int, width: int = 256) -> Graph:
    """Two layers with a view and an in-place update, forward only."""
    return build_graph(
        "mlp",
        [
            source("x", batch, width),
            source("w", width, width),
            call("h", "aten.mm.default", ["x", "w"], [tensor("h", batch, width)]),
            call("r", "aten.relu.default", ["h"], [tensor("r", batch, width)]),
            call(
                "v",
                "aten.view.default",
                ["r", [batch * width]],
                [tensor("v", batch * width, alias_of="r")],
                memory="reference",
            ),
            call("s", "aten.sum.default", ["v"], [tensor("s")]),
            call(
                "u",
                "aten.mul_.Tensor",
                ["w", "s"],
                [tensor("u", width, width, alias_of="w")],
                memory="reference",
            ),
        ],
    )


def roofline_seconds(graph: Graph, model: DeviceModel):
    """Seconds of every op of a graph on a device."""
    tensors = tensors_by_name(graph)
    return np.array([op_seconds(op, tensors, model) for op in graph.ops])
