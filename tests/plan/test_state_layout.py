"""Where a plan keeps state and what a step returns, on one axis of devices."""

import dataclasses

import pytest

from pardnn.cluster import Cluster, Device
from pardnn.errors import InvalidPlanError
from pardnn.graph.build import build_graph
from pardnn.graph.ir import Graph, Op, Tensor
from pardnn.plan.mesh import make_mesh
from pardnn.plan.pieces import Pieces
from pardnn.plan.plan import Plan
from pardnn.plan.state_in_place import state_in_place, state_problems
from pardnn.plan.state_layout import KeptShard, kept_shards, shard_of
from pardnn.shard.sharding import Sharding
from pardnn.shard.spmd.partitioner import spmd_partition
from tests.reference.plan import serial_plan


def step(size: int = 20, kind: str = "parameter") -> Graph:
    made = [Tensor(name=name, bytes=4 * size, shape=(size,), dtype="float32") for name in "wy"]
    return build_graph("step", [
        Op(name="w", kind=kind, outputs=(made[0],), memory="residual"),
        Op(name="y", kind="aten.neg.default", inputs=("w",), outputs=(made[1],),
           arguments={"args": [{"tensor": "w"}]}),
    ])  # fmt: skip


def cut(n: int) -> Plan:
    sharding = Sharding(make_mesh((n,)), {"w": (0,), "y": (0,)}, {"y": ("i0",)})
    return spmd_partition(step(), sharding)


def test_a_shard_of_all_is_the_whole() -> None:
    whole = {"w": step().ops[0]}
    for shard, box in (
        (None, None), ([[0, 20]], None), ([[0, 10]], ((0, 10),)), ([[10, 20]], ((10, 20),)),
    ):  # fmt: skip
        arguments = None if shard is None else {"shard": {"of": "w", "box": shard}}
        op = dataclasses.replace(whole["w"], name="w@1", arguments=arguments)
        assert shard_of(op, whole) == ("w@1" if shard is None else "w", box)
    scalar = Op(name="s", kind="state", outputs=(Tensor(name="s", bytes=4, shape=None),))
    op = dataclasses.replace(scalar, name="s@0", arguments={"shard": {"of": "s", "box": []}})
    assert shard_of(op, {"s": scalar}) == ("s", None)


@pytest.mark.parametrize("n", [4, 5])
def test_four_places_are_named(n: int) -> None:
    graph, state = step(), state_in_place(step(), cut(n))
    ends = [20 * i // n for i in range(n + 1)]
    there = [f"device {d} (({ends[d]}, {ends[d + 1]}),)" for d in range(4)]
    more = ", ..." if n > 4 else ""
    assert state_problems(graph, serial_plan(graph, [0, 0], n), state) == [
        f"'w' is on {', '.join(there)}{more}, but the plan puts it on device 0"
    ]


def test_a_device_without_a_limit_has_room() -> None:
    graph, plan = step(), serial_plan(step(), [0, 0], 2)
    state = state_in_place(graph, plan, other_bytes=(1 << 60, 0))
    for memory, fits in ((None, True), (1 << 60, False)):
        cluster = Cluster(devices=(Device(name="a", memory=memory), Device(name="b", memory=1)))
        assert (state_problems(graph, plan, state, cluster) == []) == fits


def test_state_of_another_form_is_told_and_what_is_no_state_is_not() -> None:
    state = state_in_place(step(), serial_plan(step(), [0, 0], 1))
    longer = step(21)
    assert state_problems(longer, serial_plan(longer, [0, 0], 1), state) == [
        "parameter 'w' is float32[21] of 84 bytes; the tensor there is float32[20] of 80 bytes"
    ]
    batch = step(21, "input")
    assert state_problems(batch, serial_plan(batch, [0, 0], 1), state) == []
    assert state_problems(step(), serial_plan(step(), [0, 0], 2), state) == [
        "the plan is for 2 devices, the state is on 1"
    ]


def test_what_a_step_returns_is_somewhere() -> None:
    graph, plan = step(), cut(2)
    y = graph.ops[1]
    assert kept_shards(y, y.outputs[0], plan) == (
        KeptShard(0, "y@0", ((0, 10),)), KeptShard(1, "y@1", ((10, 20),)),
    )  # fmt: skip
    assert plan.partition is not None
    replicas = dataclasses.replace(plan.partition, sharding={"y": ("Replicate()",)})
    assert kept_shards(y, y.outputs[0], dataclasses.replace(plan, partition=replicas)) == (
        KeptShard(0, "y@0", None), KeptShard(1, "y@1", None),
    )  # fmt: skip
    wrong = dataclasses.replace(plan.partition, sharding={"y": ("Halved()",)})
    with pytest.raises(InvalidPlanError, match="'y' has no layout on the mesh"):
        kept_shards(y, y.outputs[0], dataclasses.replace(plan, partition=wrong))
    joined = dataclasses.replace(y, name="y:join", kind="pardnn.fetch")
    for ops, place in (((joined,), 1), ((), None)):
        pieces = Pieces(points=(0, 10, 20), batch={}, ops=ops)
        in_pieces = Plan(placement={"y:join": 1, "y": 0}, order=((), ()), pieces=pieces)
        if place is not None:
            assert kept_shards(y, y.outputs[0], in_pieces) == (KeptShard(place, "y", None),)
            continue
        with pytest.raises(InvalidPlanError, match="returns 'y', which the plan never joins"):
            kept_shards(y, y.outputs[0], in_pieces)
