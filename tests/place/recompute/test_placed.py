"""Second calls on several devices: none makes devices wait for each other."""

from __future__ import annotations

import numpy as np

from pardnn.graph.build import build_graph
from pardnn.graph.ir import Graph, Op, Tensor
from pardnn.place.recompute.placed import recomputed_plan
from pardnn.plan.lower import message_order
from pardnn.plan.plan import Message, Plan, plan_arrays, planned_graph


def _op(name: str, *inputs: str, size: int = 1) -> Op:
    arguments = {"args": [{"tensor": each} for each in inputs]}
    return Op(name=name, kind="aten.mm.default", inputs=inputs, arguments=arguments,
              outputs=(Tensor(name=name, bytes=size),))  # fmt: skip


def updated_elsewhere() -> tuple[Graph, Plan]:
    """Device 0 reads a weight of device 1, which overwrites it for what device 0 reads next."""
    update = Op(
        name="update", kind="aten.add_.Tensor", inputs=("w",), memory="reference", after=("a",),
        arguments={"args": [{"tensor": "w"}]},
        outputs=(Tensor(name="update", bytes=1, alias_of="w"),),
    )  # fmt: skip
    graph = build_graph("updated elsewhere", [
        Op(name="w", kind="parameter", memory="residual", outputs=(Tensor(name="w", bytes=1),)),
        _op("a", "w", size=100), _op("b", "a"), update, _op("t", "update"),
        _op("big", "b", size=100), _op("c", "big", "t"), _op("d", "a", "c"),
    ])  # fmt: skip
    order = (("a", "b", "big", "c", "d"), ("w", "update", "t"))
    messages = (
        Message(tensor="w", source=1, target=0, post_before="a", hold_until="w"),
        Message(tensor="t", source=1, target=0, post_before="c", hold_until="t"),
    )
    placement = {name: device for device, names in enumerate(order) for name in names}
    return graph, Plan(placement=placement, order=order, messages=messages)


def test_no_call_waits_for_the_write_that_waits_for_it() -> None:
    """Made again after c, "a" would have to come before the write that c waits for."""
    graph, plan = updated_elsewhere()
    found = recomputed_plan(graph, plan, np.ones((2, len(graph.ops))), (150, None), work=2_000)
    again = planned_graph(graph, found)
    assert message_order(again, plan_arrays(again, found)) == [0, 1]  # or E411
