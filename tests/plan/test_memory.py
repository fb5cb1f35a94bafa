"""What devices hold, storage by storage, by hand."""

import dataclasses

import numpy as np
import pytest

from pardnn.cluster import Cluster
from pardnn.graph.build import build_graph
from pardnn.graph.ir import Graph, Op, Tensor
from pardnn.plan.check import plan_problems
from pardnn.plan.memory import device_storages, memory_profiles, peak_bytes
from pardnn.plan.plan import Message, Plan, plan_arrays


def op(name: str, size: int, *inputs: str, kind: str = "aten.neg.default") -> Op:
    outputs = (Tensor(name=name, bytes=size),)
    memory = "residual" if kind == "parameter" else "normal"
    kind = kind if inputs or kind == "parameter" else "input"
    return Op(name=name, kind=kind, inputs=inputs, outputs=outputs, memory=memory)


def exchange(hold: str | None) -> tuple[Graph, Plan]:
    """Two devices that send each other a tensor; device 1 reads its copy once more, later."""
    graph = build_graph("exchange", [
        op("a", 5), op("b", 7), op("c", 1, "a"), op("d", 2, "b"), op("f", 3, "d"),
        op("g", 4, "a", "c"),
    ])  # fmt: skip
    messages = (
        Message(tensor="a", source=0, target=1, post_before="c", hold_until=hold),
        Message(tensor="b", source=1, target=0, post_before="d", hold_until="c"),
    )
    place = {"a": 0, "d": 0, "f": 0, "b": 1, "c": 1, "g": 1}
    order = (("a", "d", "f"), ("b", "c", "g"))
    return graph, Plan(placement=place, order=order, messages=messages)


def test_copies_of_each_tensor_on_each_device_are_apart() -> None:
    """Device 0: a of 5; then b's copy of 7 and d of 2; then d and f. Device 1 keeps its copy."""
    graph, plan = exchange("a")
    assert plan_problems(graph, plan) == []
    assert memory_profiles(graph, plan_arrays(graph, plan)) == [
        [5, 7 + 2, 2 + 3],
        [7, 7 + 5 + 1, 5 + 1 + 4],
    ]
    graph, plan = exchange("d")  # a has left when d has run
    assert memory_profiles(graph, plan_arrays(graph, plan))[0] == [5, 5 + 7 + 2, 2 + 3]
    graph, plan = exchange(None)  # it leaves at any time
    assert memory_profiles(graph, plan_arrays(graph, plan))[0] == [5, 5 + 7 + 2, 5 + 2 + 3]


def test_what_is_received_into_another_storage_takes_no_room() -> None:
    graph, plan = exchange("a")
    arrays = plan_arrays(graph, plan)
    for into, bytes_of_copies in (([-1, -1], [7, 5]), ([0, -1], [7, 0]), ([1, 1], [0, 0])):
        found = device_storages(graph, arrays._replace(message_into=np.array(into)))
        assert [rows[0].bytes for rows in found] == bytes_of_copies
        assert [rows[0].message for rows in found] == [1, 0]


def test_what_stays_is_released_by_no_op() -> None:
    """A parameter, and a tensor that may leave after the last op; `r` is read by nothing."""
    graph = build_graph("alone", [op("w", 8, kind="parameter"), op("r", 2, "w"), op("s", 1, "w")])
    plan = Plan(placement=dict.fromkeys("wrs", 0), order=(("w", "r", "s"),))
    (found,) = device_storages(graph, plan_arrays(graph, plan))
    assert [(s.bytes, s.allocated, s.released) for s in found] == [
        (8, -1, -1),
        (2, 1, 1),
        (1, 2, 2),
    ]
    assert peak_bytes(graph, plan_arrays(graph, plan)) == [10]


@pytest.mark.parametrize("left", [0, 1])
def test_a_plan_that_lacks_messages_is_refused_and_crashes_nothing(left: int) -> None:
    graph, plan = exchange("a")
    plan = dataclasses.replace(plan, messages=plan.messages[:left])
    problems = plan_problems(graph, plan, Cluster.uniform(2, memory=100))
    assert len(problems) == (1 if left else 3)
    assert "'d'" in problems[-1 if left else 1]
