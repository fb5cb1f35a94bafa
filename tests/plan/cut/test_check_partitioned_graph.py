"""Faults planted in a sharded plan, each of which the checker must name."""

import copy
import dataclasses
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pardnn.errors import UnsupportedError
from pardnn.graph.build import build_graph
from pardnn.graph.ir import Graph, Op, Tensor
from pardnn.plan.check import plan_problems
from pardnn.plan.cut.check_partitioned_graph import partition_problems
from pardnn.plan.memory import device_storages, memory_profiles
from pardnn.plan.mesh import boxes_of, make_mesh
from pardnn.plan.partitioned_graph import (
    DRAW,
    SLICE,
    UPDATE,
    Partition,
    check_batch_is_read_only,
    written_inputs,
)
from pardnn.plan.pieces import Pieces
from pardnn.plan.plan import Message, Plan, plan_arrays, planned_graph
from pardnn.shard.sharding import Sharding
from pardnn.shard.spmd.partitioner import spmd_partition


def tensor(name: str, *shape: int) -> Tensor:
    size = 4
    for length in shape:
        size *= length
    return Tensor(name=name, bytes=size, shape=shape, dtype="float32")


def sharded() -> tuple[Graph, Plan]:
    """x w1 = h cut along the reduction, h w2 = y with h gathered by columns."""
    args = [{"tensor": "x"}, {"tensor": "w1"}], [{"tensor": "h"}, {"tensor": "w2"}]
    kind = "aten.mm.default"
    graph = build_graph(
        "chain",
        [
            Op(name="x", kind="input", outputs=(tensor("x", 4, 6),)),
            Op(name="w1", kind="parameter", outputs=(tensor("w1", 6, 8),), memory="residual"),
            Op(name="w2", kind="parameter", outputs=(tensor("w2", 8, 2),), memory="residual"),
            Op(name="a", kind=kind, inputs=("x", "w1"), outputs=(tensor("h", 4, 8),),
               arguments={"args": args[0]}),
            Op(name="b", kind=kind, inputs=("h", "w2"), outputs=(tensor("y", 4, 2),),
               arguments={"args": args[1]}),
        ],
    )  # fmt: skip
    layouts = {"x": (1,), "w1": (0,), "w2": (1,), "h": (0,), "y": (1,)}
    return graph, spmd_partition(
        graph, Sharding(make_mesh((2,)), layouts, {"a": ("k",), "b": ("j",)})
    )


def changed(plan: Plan, name: str, change: Callable[[Op], Op]) -> Plan:
    """The plan with the op whose name begins so changed."""
    assert plan.partition is not None
    ops = list(plan.partition.ops)
    number = next(i for i, op in enumerate(ops) if op.name.startswith(name))
    ops[number] = change(ops[number])
    return dataclasses.replace(plan, partition=dataclasses.replace(plan.partition, ops=tuple(ops)))


def arguments(edit: Callable[[dict[str, Any]], Any]) -> Callable[[Op], Op]:
    def change(op: Op) -> Op:
        data = copy.deepcopy(op.arguments)
        assert data is not None
        edit(data)
        return dataclasses.replace(op, arguments=data)

    return change


def laid_out(plan: Plan, name: str, *words: str) -> Plan:
    assert plan.partition is not None
    sharding = dict(plan.partition.sharding) | {name: words}
    return dataclasses.replace(
        plan, partition=dataclasses.replace(plan.partition, sharding=sharding)
    )


def on_submeshes(plan: Plan, count: int) -> Plan:
    assert plan.partition is not None
    return dataclasses.replace(plan, partition=dataclasses.replace(plan.partition, submeshes=count))


def joined_at(*box: list[int]) -> Callable[[dict[str, Any]], Any]:
    return lambda data: data["args"][1][0].__setitem__(1, list(box))


def received(plan: Plan, **fields: Any) -> Plan:
    """The plan with other words about the piece of h that device 0 receives in place."""
    messages = [
        dataclasses.replace(m, **fields) if m.into is not None and m.target == 0 else m
        for m in plan.messages
    ]
    return dataclasses.replace(plan, messages=tuple(messages))


def reading_the_buffer(op: Op) -> Op:
    name = "h:b:buffer@0"
    arguments = {"args": [{"tensor": name}, {"tensor": "w2@0"}]}
    return dataclasses.replace(op, inputs=(name, *op.inputs), arguments=arguments)


FAULTS: dict[str, tuple[Callable[[Plan], Plan], str]] = {
    "words": (lambda p: laid_out(p, "h", "Halved()"), "'h' of shape .4, 8. cannot be"),
    "terms": (
        lambda p: laid_out(p, "h", "Partial()"),
        "op 'b' reads terms of 'h', which is not a sum",
    ),
    "dim": (lambda p: laid_out(p, "h", "Shard(2)"), "'h' of shape .4, 8. cannot be"),
    "other layout": (lambda p: laid_out(p, "h", "Shard(1)"), "'h@0' has shape"),
    "source": (
        lambda p: changed(p, "w1@1", arguments(lambda d: d["shard"].update(box=[[0, 3], [0, 8]]))),
        "its shard is",
    ),
    "kind": (
        lambda p: changed(p, "a@1", lambda op: dataclasses.replace(op, kind="aten.sub.Tensor")),
        "'a@1' is aten.sub.Tensor, not a local op of aten.mm.default",
    ),
    "slice": (
        lambda p: changed(p, "h:a:part@0", arguments(lambda d: d["args"][1][0].reverse())),
        "it cuts",
    ),
    "outside": (
        lambda p: changed(
            p, "h:a:part@0", arguments(lambda d: d["args"][1].__setitem__(0, [3, 5]))
        ),
        r"it cuts .*\[3, 5\].* of shape \[4, 8\]",
    ),
    "swapped": (
        lambda p: changed(p, "h:b@0", arguments(joined_at([0, 2], [0, 8]))),
        "not arranged as",
    ),
    "beyond the end": (
        lambda p: changed(p, "h:b@0", arguments(joined_at([3, 5], [0, 8]))),
        "does not fit",
    ),
    "before the begin": (
        lambda p: changed(p, "h:b@0", arguments(joined_at([-1, 1], [0, 8]))),
        "does not fit",
    ),
    "of another length": (
        lambda p: changed(p, "h:b@0", arguments(joined_at([2, 3], [0, 8]))),
        "does not fit",
    ),
    "missing": (
        lambda p: changed(p, "h:b@1", arguments(lambda d: d["args"][1].pop())),
        "its slices hold 16 of 32 elements",
    ),
    "shape": (
        lambda p: changed(
            p, "h:b:buffer.2@1", arguments(lambda d: d["args"].__setitem__(0, [8, 4]))
        ),
        "it makes .8, 4.",
    ),
    "a place that is not there": (lambda p: received(p, into="none"), " no fetch"),
    "submeshes": (
        lambda p: on_submeshes(p, 2),
        "2 x 2 devices of the mesh, order has 2",
    ),
    "no submesh": (
        lambda p: on_submeshes(p, 0),
        "0 x 2 devices of the mesh, order has 2",
    ),
    "no fetch": (lambda p: received(p, into="w2@0"), " no fetch of device 0"),
    "too early": (
        lambda p: received(p, post_before="h:b:buffer@0"),
        "may arrive before its buffer exists",
    ),
    "a buffer of its own": (lambda p: received(p, into=None), "is not received into"),
    "no run of memory": (
        lambda p: changed(p, "h:b@0", arguments(joined_at([0, 4], [0, 4]))),
        "is not a contiguous run",
    ),
    "half a buffer": (lambda p: changed(p, "b@0", reading_the_buffer), "is not complete"),
    "not joined": (
        lambda p: changed(
            p,
            "h:b@0",
            lambda op: dataclasses.replace(
                op, inputs=op.inputs[:1], arguments={"args": [{"tensor": op.inputs[0]}, []]}
            ),
        ),
        "is received in place on device 0, but not joined",
    ),
    "addends": (
        lambda p: changed(p, "h:sum@0", arguments(lambda d: d["args"].__setitem__(1, []))),
        "no addends",
    ),
    "a quotient of three": (
        lambda p: changed(
            p,
            "h:sum@0",
            arguments(
                lambda d: d.update(args=["quotient", [*d["args"][1], d["args"][1][0]], None])
            ),
        ),
        "it is a quotient of 3 tensors",
    ),
    "one weight for two": (
        lambda p: changed(p, "h:sum@0", arguments(lambda d: d["args"].__setitem__(2, [1.0]))),
        "not as many weights",
    ),
    "a tensor of no layout": (
        lambda p: dataclasses.replace(
            p,
            partition=dataclasses.replace(
                p.partition,
                sharding={n: w for n, w in p.partition.sharding.items() if n != "h"},
            ),
        ),
        "^partition.sharding: 'h' is not a tensor of both",
    ),
    "nonsense": (
        lambda p: changed(p, "h:sum@0", arguments(lambda d: d.update(args=[1]))),
        "are not valid",
    ),
    "no arguments": (
        lambda p: changed(p, "h:sum@0", lambda op: dataclasses.replace(op, arguments=None)),
        "'h:sum@0': its arguments are not valid",
    ),
}


def test_the_plan_without_faults_is_valid() -> None:
    graph, plan = sharded()
    assert plan_problems(graph, plan) == []
    assert plan.partition is not None
    kinds = [op.kind for op in plan.partition.ops if op.kind.startswith("pardnn.")]
    moves = ("slice", "fetch", "join", "reduce")
    assert set(kinds) == {f"pardnn.{name}" for name in moves}


def test_numbers_are_drawn_by_the_random_op_of_the_graph() -> None:
    """Each device draws what is its own of one tensor; another kind of draw is no local op."""
    kind = "aten.rand_like.default"
    graph = build_graph("noise", [
        Op(name="x", kind="input", outputs=(tensor("x", 4, 6),)),
        Op(name="r", kind=kind, inputs=("x",), outputs=(tensor("r", 4, 6),),
           arguments={"args": [{"tensor": "x"}]}),
    ])  # fmt: skip
    sharding = Sharding(make_mesh((2,)), {"x": (0,), "r": (0,)}, {"r": ("i0",)})
    plan = spmd_partition(graph, sharding)
    assert plan.partition is not None
    (draw,) = [op.name for op in plan.partition.ops if op.kind == DRAW and op.name.endswith("@0")]
    assert plan_problems(graph, plan) == []
    other = arguments(lambda d: d["args"].__setitem__(0, "aten.randn_like.default"))
    problems = plan_problems(graph, changed(plan, draw, other))
    assert any("not a local op of aten.rand_like.default" in each for each in problems), problems


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named(fault: str) -> None:
    graph, plan = sharded()
    spoil, message = FAULTS[fault]
    problems = plan_problems(graph, spoil(plan))
    assert problems
    assert any(re.search(message, problem) for problem in problems), problems


def test_an_op_without_a_copy_and_one_too_many() -> None:
    graph, plan = sharded()
    assert plan.partition is not None
    renamed = changed(plan, "b@1", lambda op: dataclasses.replace(op, name="c@1"))
    problems = plan_problems(graph, renamed)
    assert any("op 'b' has 1 local ops on 2 devices" in problem for problem in problems)
    assert any("'c@1'" in problem and "belong to any op" in problem for problem in problems)


def test_a_graph_that_is_none_is_told() -> None:
    graph, plan = sharded()
    assert plan.partition is not None
    ops = plan.partition.ops
    double = dataclasses.replace(
        plan, partition=dataclasses.replace(plan.partition, ops=(*ops, ops[-1]))
    )
    assert "two ops are named" in plan_problems(graph, double)[0]


@pytest.mark.parametrize(("at", "problem"), [(0, None), (1, "another one")])
def test_an_update_puts_a_part_back_where_it_was(at: int, problem: str | None) -> None:
    kind, mesh = "aten.clone.default", make_mesh((2,))
    graph = build_graph("update", [
        Op(name="x", kind="input", outputs=(tensor("x", 4),)),
        Op(name="t", kind=kind, inputs=("x",), outputs=(tensor("t", 4),)),
    ])  # fmt: skip
    sources = [
        Op(name=f"x@{d}", kind="input", outputs=(tensor(f"x@{d}", 2),),
           arguments={"shard": {"of": "x", "box": [[2 * d, 2 * d + 2]]}})
        for d in range(2)
    ]  # fmt: skip
    part = Op(name="t:part@0", kind=SLICE, inputs=("x@0",), outputs=(tensor("t:part@0", 1),),
              arguments={"args": [{"tensor": "x@0"}, [[0, 1]]]})  # fmt: skip
    args = [{"tensor": "x@0"}, [[at, at + 1]], {"tensor": "t:part@0"}]
    update = Op(name="t@0", kind=UPDATE, inputs=("x@0", "t:part@0"), outputs=(tensor("t@0", 2),),
                arguments={"args": args})  # fmt: skip
    clone = Op(name="t@1", kind=kind, inputs=("x@1",), outputs=(tensor("t@1", 2),))
    layouts = {"x": ("Shard(0)",), "t": ("Shard(0)",)}
    plan = Plan(
        placement={"x@0": 0, "x@1": 1, "t:part@0": 0, "t@0": 0, "t@1": 1},
        order=(("x@0", "t:part@0", "t@0"), ("x@1", "t@1")),
        partition=Partition(mesh=mesh, sharding=layouts, ops=(*sources, part, update, clone)),
    )
    found = list(partition_problems(graph, plan))
    assert found == [] if problem is None else problem in found[0]


def test_what_is_received_in_place_takes_no_memory() -> None:
    graph, plan = sharded()
    parts = planned_graph(graph, plan)
    arrays = plan_arrays(parts, plan)
    storages = [s for device in device_storages(parts, arrays) for s in device if s.message >= 0]
    sizes = {plan.messages[s.message].into is None: s.bytes for s in storages}
    assert sizes == {False: 0, True: 64}  # a piece of h; a partial sum of half of h
    for storage in storages:
        assert storage.released >= storage.allocated
    apart = arrays._replace(message_into=arrays.message_into * 0 - 1)
    gained = np.subtract(memory_profiles(parts, apart), memory_profiles(parts, arrays))
    assert sorted(set(gained.ravel().tolist())) == [0, 64]


def test_only_sharded_plans_receive_in_place() -> None:
    ops = [Op(name="a", kind="input", outputs=(tensor("a", 4),)), Op(name="b", kind="x::y",
           inputs=("a",), outputs=(tensor("b", 4),))]  # fmt: skip
    message = Message(tensor="a", source=0, target=1, post_before="b", into="b")
    plan = Plan(placement={"a": 0, "b": 1}, order=(("a",), ("b",)), messages=(message,))
    problems = plan_problems(build_graph("two", ops), plan)
    assert ["only sharded plans" in problem for problem in problems] == [True]


@pytest.mark.parametrize(
    ("shares", "problem"),
    [
        (((1, 1),), None),
        (((3, 1),), "has shape [4, 3], owned is [4, 4]"),  # the boxes follow from the shares
        (((3, 1), (1, 1)), "partition.mesh: shares"),
        (((3, 0),), "each is 1 to"),
        (((-3, 1),), "each is 1 to"),
        (((1, 2, 1),), "partition.mesh: shares"),
    ],
)
def test_boxes_are_those_of_the_declared_shares(
    shares: tuple[tuple[int, ...], ...], problem: str | None
) -> None:
    graph, plan = sharded()
    assert plan.partition is not None
    mesh = dataclasses.replace(plan.partition.mesh, shares=shares)
    plan = dataclasses.replace(plan, partition=dataclasses.replace(plan.partition, mesh=mesh))
    found = "\n".join(plan_problems(graph, plan))
    assert found == "" if problem is None else problem in found


@pytest.mark.parametrize(
    ("words", "fits"),
    [
        (("Shard(0)", "Shard(1)"), True),
        (("Shard(0)", "Shard(2)"), False),
        (("Shard(2)", "Shard(0)"), False),
        (("Shard(0)", "Replicate()"), True),
        (("Shard(0)",), False),
        (("Shard(0)", "Partial()"), True),
        (("Shard(0)", "Halved()"), False),
        (("Shard(1)", "Shard(1)"), False),
    ],
)
def test_every_axis_cuts_a_dim_that_is_there(words: tuple[str, ...], fits: bool) -> None:
    assert (boxes_of(tensor("t", 4, 3), words, make_mesh((2, 2))) is not None) == fits


def test_a_step_that_writes_its_batch_is_not_cut() -> None:
    """Each device would hold a shard of what the caller reads afterwards."""
    source = Op(name="x", kind="input", outputs=(tensor("x", 4, 6),))
    weight = Op(name="w", kind="parameter", outputs=(tensor("w", 4, 6),), memory="residual")
    check_batch_is_read_only(build_graph("read", [source, weight]))
    source = dataclasses.replace(source, arguments={"written": True})
    with pytest.raises(UnsupportedError, match="writes the batch tensor 'x'") as error:
        check_batch_is_read_only(build_graph("written", [weight, source]))
    assert error.value.code == "E823"
    assert error.value.details == {"inputs": ["x"]}
    source = dataclasses.replace(source, name="ema.shadow.0")
    with pytest.raises(UnsupportedError, match="If 'ema' is state, let the step find it as a glo"):
        check_batch_is_read_only(build_graph("written", [weight, source]))
    source = dataclasses.replace(source, name="o.param_groups.0.scale")
    with pytest.raises(UnsupportedError, match=r"of a group 'o.param[\s\S]+optimizer.state\["):
        check_batch_is_read_only(build_graph("written", [weight, source]))


def test_of_what_is_written_the_batch_alone_is_read_by_the_caller() -> None:
    ops = [
        Op(name=name, kind=kind, outputs=(tensor(name, 4),), arguments=arguments)
        for name, kind, arguments in (
            ("x", "input", {"written": True}), ("y", "input", {"written": False}),
            ("z", "input", None), ("b", "buffer", {"written": True}),
            ("v", "input", {"written": True}),
        )
    ]  # fmt: skip
    assert written_inputs(build_graph("written", ops)) == ["x", "v"]


def test_pieces_come_before_what_is_cut_of_them() -> None:
    """Of a batch that is in no pieces nothing else is said: what follows from it is no news."""
    graph, plan = sharded()
    assert plan.partition is not None
    ops = tuple(op for op in graph.ops if op.name != "b")
    wrong = Pieces(points=(0, 4), batch={"x": (0, 1, 1)}, ops=ops)
    plan = laid_out(dataclasses.replace(plan, pieces=wrong), "h", "Halved()")
    assert plan_problems(graph, plan) == [
        "pieces: [0, 4] are not the starts of two or more pieces and an end"
    ]
