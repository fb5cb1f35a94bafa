"""An exchange of two or three devices by hand, whose buffers are filled in three ways, and faults.

Each device has two rows of `x` and makes two columns of `y`. It copies what it has of these columns
into a buffer and puts in what the next device sends; of three devices, what the last one sends is
received in place, before a join.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from pardnn.graph.build import build_graph
from pardnn.graph.ir import LOSS_KIND, Graph, Op, Tensor
from pardnn.plan.check import plan_problems
from pardnn.plan.mesh import make_mesh
from pardnn.plan.partitioned_graph import FETCH, JOIN, REDUCE, SLICE, UPDATE, Partition
from pardnn.plan.plan import Message, Plan

CLONE = "aten.clone.default"
Box = list[list[int]]


def tensor(name: str, *shape: int, alias_of: str | None = None, wide: int = 0) -> Tensor:
    size = 4
    for length in shape:
        size *= length
    return Tensor(name=name, bytes=size, shape=shape, dtype="float32", alias_of=alias_of,
                  strides=(wide, 1) if wide else None)  # fmt: skip


def call(name: str, kind: str, args: list[Any], *reads: str, made: Tensor, **more: Any) -> Op:
    """An op of the plan; of a view or a write `made` is in the storage of what it reads first."""
    memory = "normal" if made.alias_of is None else "reference"
    return Op(name=name, kind=kind, inputs=reads, outputs=(made,), memory=memory,
              arguments={"args": args, **more})  # fmt: skip


def ref(name: str) -> dict[str, str]:
    return {"tensor": name}


def exchange(n: int = 3) -> tuple[Graph, Plan]:
    size = 2 * n
    graph = build_graph("exchange", [
        Op(name="x", kind="input", outputs=(tensor("x", size, size),)),
        call("y", CLONE, [ref("x")], "x", made=tensor("y", size, size)),
        Op(name="loss", kind=LOSS_KIND, inputs=("y",)),
    ])  # fmt: skip
    ops = [op for d in range(n) for op in (source(d, n), *(sent(d, e, n) for e in range(n)))]
    messages = list[Message]()
    for d in range(n):
        own, *others = (f"x:to{d}@{(d + i) % n}" for i in range(n))
        more, more_messages = filled(d, own, others, size)
        full = more[-1].name
        ops += [*more, call(f"y@{d}", CLONE, [ref(full)], full, made=tensor(f"y@{d}", size, 2))]
        messages += more_messages
    ops.append(Op(name="loss@0", kind=LOSS_KIND, inputs=("y@0",)))
    place = {op.name: int(op.name[-1]) for op in ops}
    order = tuple(tuple(name for name, at in place.items() if at == d) for d in range(n))
    layouts = {"x": ("Shard(0)",), "y": ("Shard(1)",)}
    partition = Partition(mesh=make_mesh((n,)), sharding=layouts, ops=tuple(ops))
    plan = Plan(placement=place, order=order, messages=tuple(messages), partition=partition)
    return graph, plan


def source(d: int, n: int) -> Op:
    shard = {"of": "x", "box": [[2 * d, 2 * d + 2], [0, 2 * n]]}
    made = tensor(f"x@{d}", 2, 2 * n)
    return Op(name=made.name, kind="input", outputs=(made,), arguments={"shard": shard})


def sent(d: int, e: int, n: int) -> Op:
    """What device `d` has of the columns of device `e`."""
    made = tensor(f"x:to{e}@{d}", 2, 2, alias_of=f"x@{d}", wide=2 * n)
    box = [[0, 2], [2 * e, 2 * e + 2]]
    return call(made.name, SLICE, [ref(f"x@{d}"), box], f"x@{d}", made=made)


def rows(name: str) -> Box:
    """Where a slice lies in a buffer: by the device that it is of."""
    d = int(name[-1])
    return [[2 * d, 2 * d + 2], [0, 2]]


def filled(d: int, own: str, others: list[str], size: int) -> tuple[list[Op], list[Message]]:
    near, *far = others
    buffer, put, full = (f"x:{what}@{d}" for what in ("buffer", "put", "full"))
    ops = [
        call(buffer, FETCH, [[size, 2], None, [[ref(own), rows(own)]]], own,
             made=tensor(buffer, size, 2)),
        call(put, UPDATE, [ref(buffer), rows(near), ref(near)], buffer, near,
             made=tensor(put, size, 2, alias_of=buffer), mutates=[buffer]),
        *(call(full, JOIN, [ref(put), [[ref(name), rows(name)]]], put, name,
               made=tensor(full, size, 2, alias_of=put)) for name in far),
    ]  # fmt: skip
    messages = [Message(tensor=near, source=int(near[-1]), target=d, post_before=put)]
    messages += [
        Message(tensor=name, source=int(name[-1]), target=d, post_before=full, into=buffer)
        for name in far
    ]
    return ops, messages


Change = Callable[[Op], Op]


def changed(plan: Plan, changes: dict[str, Change]) -> Plan:
    """The plan with the ops of these names changed."""
    assert plan.partition is not None
    ops = tuple(changes.get(op.name, lambda op: op)(op) for op in plan.partition.ops)
    return dataclasses.replace(plan, partition=dataclasses.replace(plan.partition, ops=ops))


def with_args(*args: Any, reads: tuple[str, ...] | None = None) -> Change:
    def change(op: Op) -> Op:
        inputs = op.inputs if reads is None else reads
        return dataclasses.replace(
            op, inputs=inputs, arguments={**(op.arguments or {}), "args": list(args)}
        )

    return change


def reading(name: str) -> Change:
    return with_args(ref(name), reads=(name,))


def in_box(box: Box, kind: str) -> Change:
    """An op that puts in another box what it puts in."""

    def change(op: Op) -> Op:
        assert op.arguments is not None
        args = list(op.arguments["args"])
        if kind == UPDATE:
            args[1] = box
        else:
            args[-1] = [[args[-1][0][0], box]]
        return with_args(*args)(op)

    return change


OWN, NEAR, FAR = [[0, 2], [0, 2]], [[2, 4], [0, 2]], [[4, 6], [0, 2]]
APART = "its slices are not arranged as in the tensor"
#: Op of device 0, what is changed of it, and what is said.
FAULTS: dict[str, tuple[str, Change, str]] = {
    "read before all is there": (
        "y@0", reading("x:buffer@0"), "'y@0' reads 'x:buffer@0', which is not complete",
    ),
    "read before the join": (
        "y@0", reading("x:put@0"), "'y@0' reads 'x:put@0', which is not complete",
    ),
    "put over what is there": ("x:put@0", in_box(OWN, UPDATE), APART),
    "put where the last one's is": ("x:put@0", in_box(FAR, UPDATE), APART),
    "put beyond the end": ("x:put@0", in_box([[5, 7], [0, 2]], UPDATE), "does not fit"),
    "put before the begin": ("x:put@0", in_box([[-1, 1], [0, 2]], UPDATE), "does not fit"),
    "a row too many": ("x:put@0", in_box([[2, 5], [0, 2]], UPDATE), "does not fit"),
    "joined where another one's is": ("x:full@0", in_box(NEAR, JOIN), APART),
    "fetched to another place": ("x:buffer@0", in_box(FAR, FETCH), APART),
    "another one's columns": (
        "x:put@0",
        with_args(ref("x:buffer@0"), NEAR, ref("x:to1@0"), reads=("x:buffer@0", "x:to1@0")), APART,
    ),
    "nothing put in": (
        "x:full@0", with_args(ref("x:buffer@0"), [[ref("x:to0@2"), FAR]],
                              reads=("x:buffer@0", "x:to0@2")),
        "op 'x:full@0': its slices hold 8 of 12 elements",
    ),
    "nothing joined": (
        "x:full@0", with_args(ref("x:put@0"), [], reads=("x:put@0",)),
        "op 'x:full@0': its slices hold 8 of 12 elements",
    ),
    "joined to what is no buffer": (
        "x:full@0",
        with_args(ref("x@0"), [[ref("x:to0@2"), FAR]], reads=("x@0", "x:to0@2", "x:put@0")),
        "are not valid",
    ),
    "a slice of other columns": (
        "x:to0@0", with_args(ref("x@0"), [[0, 2], [1, 3]]), APART,
    ),
    "a slice of another row": (
        "x:to0@0", with_args(ref("x@0"), [[1, 3], [0, 2]]), "it cuts [[1, 3], [0, 2]] out of 'x@0'",
    ),
    "a slice of one dim": ("x:to0@0", with_args(ref("x@0"), [[0, 2]]), "it cuts [[0, 2]] out of"),
    "another form": (
        "x:buffer@0", with_args([2, 6], None, [[ref("x:to0@0"), OWN]]), "it makes [2, 6], its",
    ),
    "other samples of the source": (
        "x@0", lambda op: dataclasses.replace(
            op, arguments={"shard": {"of": "x", "box": [[2, 4], [0, 6]]}}
        ), "op 'x@0': its shard is",
    ),
    "a source of another tensor": (
        "x@0", lambda op: dataclasses.replace(
            op, arguments={"shard": {"of": "y", "box": [[0, 2], [0, 6]]}}
        ), "op 'x@0': its shard is",
    ),
    "a source of nothing": (
        "x@0", lambda op: dataclasses.replace(op, arguments=None), "op 'x@0': its shard is None",
    ),
}  # fmt: skip


@pytest.mark.parametrize("n", [2, 3])
def test_an_exchange_is_valid(n: int) -> None:
    graph, plan = exchange(n)
    assert plan_problems(graph, plan) == []


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_an_exchange_is_named(fault: str) -> None:
    name, change, why = FAULTS[fault]
    graph, plan = exchange()
    found = plan_problems(graph, changed(plan, {name: change}))
    assert any(why in each for each in found), found


def test_what_an_update_completes_is_not_read_before() -> None:
    """Half of it is what the memory held before, in whatever order the ops run."""
    graph, plan = exchange(2)
    early = changed(plan, {"y@0": reading("x:buffer@0")})
    row = [name for name in plan.order[0] if name != "y@0"]
    early_row = (*row[:-2], "y@0", *row[-2:])
    assert row[-2:] == ["x:put@0", "loss@0"]
    for order in (plan.order, (early_row, plan.order[1])):
        assert plan_problems(graph, dataclasses.replace(early, order=order)) == [
            "partition: 'y@0' reads 'x:buffer@0', which is not complete"
        ]


def test_an_open_buffer_is_no_source_of_another_one() -> None:
    """It may be taken up where it is, but neither be put into another buffer nor sent."""
    graph, plan = exchange(2)
    source = "x:buffer@0"
    into = call("more@0", FETCH, [[4, 4], None, []], made=tensor("more@0", 4, 4))
    put = call("put@0", UPDATE, [ref("more@0"), [[0, 4], [0, 2]], ref(source)], "more@0", source,
               made=tensor("put@0", 4, 4, alias_of="more@0"), mutates=["more@0"])  # fmt: skip
    told = f"reads {source!r}, which is not complete"
    found = plan_problems(graph, added(added(plan, into, 0), put, 0))
    assert f"partition: 'put@0' {told}" in found
    takes = call("x:put@1", UPDATE, [ref(source), rows("@1"), ref("x:to1@1")], source, "x:to1@1",
                 made=tensor("x:put@1", 4, 2, alias_of=source), mutates=[source])  # fmt: skip
    far = changed(plan, {"x:put@1": lambda op: takes})
    sent = Message(tensor=source, source=0, target=1, post_before="x:put@1")
    far = dataclasses.replace(far, messages=(plan.messages[0], sent))
    assert f"partition: 'a message' {told}" in plan_problems(graph, far)


def added(plan: Plan, op: Op, device: int) -> Plan:
    """The plan with one more op, the last of its device."""
    assert plan.partition is not None
    partition = dataclasses.replace(plan.partition, ops=(*plan.partition.ops, op))
    order = tuple((*row, op.name) if d == device else row for d, row in enumerate(plan.order))
    place = {**plan.placement, op.name: device}
    return dataclasses.replace(plan, partition=partition, order=order, placement=place)


def test_a_shard_is_no_other_devices_shard() -> None:
    """What has the name of device 0's columns of `y` is a view of those of device 1."""
    graph, plan = exchange()
    spare = {"y@0": lambda op: dataclasses.replace(op, outputs=(tensor("y:spare@0", 6, 2),)),
             "loss@0": lambda op: dataclasses.replace(op, inputs=("y:spare@0",))}  # fmt: skip
    taken = call("y:take@0", SLICE, [ref("y@1"), [[0, 6], [0, 2]]], "y@1",
                 made=tensor("y@0", 6, 2, alias_of="y@1"))  # fmt: skip
    wrong = added(changed(plan, spare), taken, 0)
    sent = Message(tensor="y@1", source=1, target=0, post_before=taken.name)
    wrong = dataclasses.replace(wrong, messages=(*plan.messages, sent))
    assert plan_problems(graph, wrong) == [
        "partition: op 'y:take@0': 'y@0' is made of [(0, 6), (2, 4)], owned is [(0, 6), (0, 2)]"
    ]


def test_the_loss_is_marked_once() -> None:
    graph, plan = exchange()
    again = Op(name="loss@1", kind=LOSS_KIND, inputs=("y@1",))
    assert plan_problems(graph, added(plan, again, 1)) == [
        "partition: op 'loss' has 2 local ops on 3 devices"
    ]
    assert plan.partition is not None
    ops = tuple(op for op in plan.partition.ops if op.name != "loss@0")
    none = dataclasses.replace(plan, partition=dataclasses.replace(plan.partition, ops=ops))
    assert plan_problems(graph, none) == ["partition: op 'loss' has 0 local ops on 3 devices"]


def test_terms_of_a_sum_have_its_form() -> None:
    graph, plan = exchange()
    for of, why in (("x:to0@0", None), ("x@0", "its addends are not all of shape [2, 2]")):
        args = ["sum", [ref("x:to0@0"), ref(of)], None]
        more = call("more@0", REDUCE, args, *dict.fromkeys(("x:to0@0", of)),
                    made=tensor("more@0", 2, 2))  # fmt: skip
        told = [] if why is None else [f"partition: op 'more@0': {why}"]
        assert plan_problems(graph, added(plan, more, 0)) == told


def test_on_several_meshes_nothing_is_received_in_place() -> None:
    """The device of a buffer is one of several there."""
    graph, plan = exchange()
    assert plan.partition is not None
    mixed = dataclasses.replace(
        plan, order=(*plan.order, (), (), ()),
        partition=dataclasses.replace(plan.partition, submeshes=2),
    )  # fmt: skip
    assert plan_problems(graph, mixed) == [
        f"messages: 'x:to{d}@{(d + 2) % 3}' goes into a buffer" for d in range(3)
    ]
