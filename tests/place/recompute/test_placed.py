"""Second calls on several devices: none makes devices wait for each other."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from pardnn.graph.build import build_graph
from pardnn.graph.ir import Graph, Op, Tensor
from pardnn.place.recompute.placed import recomputed_plan
from pardnn.plan.lower import message_order
from pardnn.plan.plan import Message, Plan, plan_arrays, planned_graph


def _op(name: str, *inputs: str, size: int = 1) -> Op:
    arguments = {"args": [{"tensor": each} for each in inputs]}
    return Op(name=name, kind="aten.mm.default", inputs=inputs, arguments=arguments,
              outputs=(Tensor(name=name, bytes=size),))  # fmt: skip


UPDATE = Op(
    name="update", kind="aten.add_.Tensor", inputs=("w",), memory="reference", after=("a",),
    arguments={"args": [{"tensor": "w"}]}, outputs=(Tensor(name="update", bytes=1, alias_of="w"),),
)  # fmt: skip


def step(*ops: Op) -> Graph:
    """Return a step that reads a weight, which is updated once "a" has run."""
    made = (Tensor(name="w", bytes=1),)
    weight = Op(name="w", kind="parameter", memory="residual", outputs=made)
    return build_graph("step", [weight, _op("a", "w", size=100), _op("b", "a"), *ops])


def planned(order: tuple[tuple[str, ...], ...], *messages: Message) -> Plan:
    placement = {name: device for device, names in enumerate(order) for name in names}
    weight = Message(tensor="w", source=1, target=0, post_before="a", hold_until="w")
    return Plan(placement=placement, order=order, messages=(weight, *messages))


def reading_the_update() -> tuple[Graph, Plan]:
    """Device 0 reads "a" again after what follows from the update on device 1."""
    graph = step(
        UPDATE,
        _op("t", "update"),
        _op("big", "b", size=100),
        _op("c", "big", "t"),
        _op("d", "a", "c"),
    )
    return graph, planned(
        (("a", "b", "big", "c", "d"), ("w", "update", "t")),
        Message(tensor="t", source=1, target=0, post_before="c", hold_until="t"),
    )


def sending_past_the_update() -> tuple[Graph, Plan]:
    """Device 0 reads "a" again once "b" has left for device 1, which takes it after the update."""
    graph = step(
        _op("big", "b", size=100), _op("c", "big"), UPDATE, _op("u", "b"), _op("d", "a", "c")
    )
    return graph, planned(
        (("a", "b", "big", "c", "d"), ("w", "update", "u")),
        Message(tensor="b", source=0, target=1, post_before="u", hold_until="c"),
    )


@pytest.mark.parametrize("case", [reading_the_update, sending_past_the_update])
def test_no_call_waits_for_the_write_that_waits_for_it(
    case: Callable[[], tuple[Graph, Plan]],
) -> None:
    """Made again before "d", "a" would have to come before the update that "d" waits for."""
    graph, plan = case()
    found = recomputed_plan(graph, plan, np.ones((2, len(graph.ops))), (150, None), work=500)
    again = planned_graph(graph, found)
    assert message_order(again, plan_arrays(again, found)) == [0, 1]  # or E411
