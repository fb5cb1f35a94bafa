"""What storages are for: of the backward pass only what an update reads is a gradient."""

from typing import Any

from pardnn.graph.build import build_graph
from pardnn.graph.ir import Op, Tensor
from pardnn.graph.storage_kinds import storage_kinds


def op(name: str, kind: str, *inputs: str, alias: str | None = None, **fields: Any) -> Op:
    made = Tensor(name=name, bytes=4, alias_of=alias)
    return Op(name=name, kind=kind, inputs=inputs, outputs=(made,), **fields)


def test_what_storages_are_for() -> None:
    ops = [
        op("x", "input"),
        op("w", "parameter", memory="residual"),
        op("m", "state", memory="residual"),
        op("c", "constant"),
        op("y", "aten.mm.default", "x", "w"),
        op("gy", "aten.mul.Tensor", "y", "c", backward_of="y"),
        op("gw", "aten.mm.default", "x", "gy", backward_of="y"),
        op("kept", "aten.mm.default", "x", "gy", backward_of="y", memory="residual"),
        op("u", "aten.add_.Tensor", "w", "gw", "kept", alias="w", memory="reference",
           arguments={"args": [{"tensor": "w"}, {"tensor": "gw"}], "mutates": ["w"]}),
    ]  # fmt: skip
    graph = build_graph("step", ops)
    names = [tensor.name for each in graph.ops for tensor in each.outputs]
    assert dict(zip(names, storage_kinds(graph), strict=True)) == {
        "x": "activations", "w": "parameters", "m": "optimizer", "c": "parameters",
        "y": "activations", "gy": "activations", "gw": "gradients", "kept": "activations",
        "u": "activations",
    }  # fmt: skip
