"""Faults planted in sums that are made in place: the checker names each."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest

from pardnn.graph.build import build_graph
from pardnn.graph.ir import Graph, Op, Tensor
from pardnn.plan.check import plan_problems
from pardnn.plan.mesh import make_mesh
from pardnn.plan.partitioned_graph import ADD, ADD_IN_PLACE
from pardnn.plan.plan import Message, Plan
from pardnn.planner.check_cut import cut_problems
from pardnn.shard.sharding import Sharding
from pardnn.shard.spmd.partitioner import spmd_partition

Spoil = Callable[[Plan], Plan]


def tensor(name: str, **more: Any) -> Tensor:
    return Tensor(name=name, bytes=64, shape=(4, 4), dtype="float32", **more)


def call(kind: str, name: str, *inputs: str, **more: Any) -> Op:
    args = {"args": [{"tensor": each} for each in inputs]}
    more = {"outputs": (tensor(name),)} | more
    return Op(name=name, kind=kind, inputs=inputs, arguments=args, **more)


def sums() -> tuple[Graph, Plan]:
    """g + h in place, k + l as it was: k is read again."""
    ops = [
        Op(name="w", kind="parameter", outputs=(tensor("w"),), memory="residual"),
        *(call("aten.tanh.default", name, "w") for name in "ghkl"),
        call("aten.detach.default", "v", "k", memory="reference",
             outputs=(tensor("v", alias_of="k"),)),
        call(ADD, "s", "g", "h"),
        call(ADD, "t", "k", "l"),
        call("aten.mul.Tensor", "late", "v", "s"),
        call("aten.mul.Tensor", "last", "late", "t"),
    ]  # fmt: skip
    graph = build_graph("sums", ops)
    layouts = {t.name: (0,) for op in ops for t in op.outputs}
    loops = {op.name: ("i0",) for op in ops if op.name != "w"}
    return graph, spmd_partition(graph, Sharding(make_mesh((2,)), layouts, loops))


def with_ops(plan: Plan, **changes: Callable[[Op], Op]) -> Plan:
    """The plan with the ops of device 0 changed that are named."""
    assert plan.partition is not None
    ops = [changes.get(op.name.removesuffix("@0"), lambda op: op)(op) for op in plan.partition.ops]
    return dataclasses.replace(plan, partition=dataclasses.replace(plan.partition, ops=tuple(ops)))


def into(*names: str, **more: Any) -> Callable[[Op], Op]:
    """A sum made in the first of some terms."""

    def change(op: Op) -> Op:
        made = dataclasses.replace(op.outputs[0], **{"alias_of": names[0]} | more)
        arguments = {"args": [{"tensor": name} for name in names]}
        inputs = tuple(dict.fromkeys(names))
        return dataclasses.replace(op, kind=ADD_IN_PLACE, memory="reference", outputs=(made,),
                                   inputs=inputs, arguments=arguments)  # fmt: skip

    return change


def flag(plan: Plan) -> Plan:
    assert plan.partition is not None
    return dataclasses.replace(
        plan, partition=dataclasses.replace(plan.partition, sums_in_place=False)
    )


def from_the_batch(op: Op) -> Op:
    return dataclasses.replace(op, kind="input", inputs=(), arguments=None)


def outliving(op: Op) -> Op:
    return dataclasses.replace(op, memory="residual")


def typed(op: Op) -> Op:
    return dataclasses.replace(op, outputs=(dataclasses.replace(op.outputs[0], dtype="float16"),))


def formed(**form: Any) -> Callable[[Op], Op]:
    """An op whose result is of another form."""
    return lambda op: dataclasses.replace(op, outputs=(dataclasses.replace(op.outputs[0], **form),))


def sent(plan: Plan) -> Plan:
    """g is on its way to device 1 while it is added to, and read there."""
    message = Message(tensor="g@0", source=0, target=1, post_before="late@1", hold_until="late@0")
    plan = dataclasses.replace(plan, messages=(message,))
    assert plan.partition is not None
    ops = [
        dataclasses.replace(op, inputs=(*op.inputs, "g@0")) if op.name == "late@1" else op
        for op in plan.partition.ops
    ]
    return dataclasses.replace(plan, partition=dataclasses.replace(plan.partition, ops=tuple(ops)))


FAULTS: dict[str, tuple[Spoil, str]] = {
    "not said": (flag, "'s@0' is in place, but sums_in_place is not set"),
    "a view is read later": (
        lambda p: with_ops(p, t=into("k@0", "l@0")),
        "'t@0' adds in place, but 'late@0' reads 'v@0' in the same storage after it",
    ),
    "through a view": (
        lambda p: with_ops(p, t=into("v@0", "l@0")),
        "'t@0' adds in place, but 'late@0' reads 'v@0' in the same storage after it",
    ),
    "added to itself": (
        lambda p: with_ops(p, s=into("k@0", "v@0")),
        "'s@0' adds in place, but the other term is in the same storage",
    ),
    "a parameter": (
        lambda p: with_ops(p, s=into("w@0", "h@0")),
        "'s@0' adds in place, but 'w@0' outlives it",
    ),
    "of the batch": (
        lambda p: with_ops(p, g=from_the_batch),
        "'s@0' adds in place, but 'g@0' outlives it",
    ),
    "kept after the step": (
        lambda p: with_ops(p, g=outliving),
        "'s@0' adds in place, but 'g@0' outlives it",
    ),
    "of another dtype": (
        lambda p: with_ops(p, g=typed),
        "'s@0' adds in place, but 'g@0' has another form than the sum",
    ),
    "of other strides": (
        lambda p: with_ops(p, s=into("g@0", "h@0", strides=(1, 2))),
        "'s@0' adds in place, but 'g@0' has another form than the sum",
    ),
    "into the second term": (
        lambda p: with_ops(p, s=into("g@0", "h@0", alias_of="h@0")),
        "'s@0' adds in place, but it does not return its first argument",
    ),
    "a new tensor": (
        lambda p: with_ops(p, s=lambda op: dataclasses.replace(op, memory="normal")),
        "'s@0' adds in place, but it does not return its first argument",
    ),
    "two sums in one place": (
        lambda p: with_ops(p, s=into("g@0", "h@0"), t=into("g@0", "l@0")),
        "'s@0' adds in place, but 't@0' reads 'g@0' in the same storage after it",
    ),
    "half of its storage": (
        lambda p: with_ops(
            p, v=formed(bytes=16, shape=(1, 4)),
            s=into("v@0", "h@0", bytes=16, shape=(1, 4)),
        ),
        "'s@0' adds in place, but 'v@0' is not all of its storage",
    ),
    "one row, repeated": (
        lambda p: with_ops(
            p, v=formed(strides=(0, 1)), s=into("v@0", "h@0", strides=(0, 1))
        ),
        "'s@0' adds in place, but 'v@0' is not all of its storage",
    ),
    "of unknown shape": (
        lambda p: with_ops(p, g=formed(shape=None), s=formed(shape=None)),
        "'g@0' has shape [], owned is [2, 4]",
    ),
    "no arguments": (
        lambda p: with_ops(p, s=lambda op: dataclasses.replace(op, arguments=None)),
        "'s@0' adds in place, but it does not return its first argument",
    ),
    "a sum of no op of the graph": (
        lambda p: with_ops(p, s=lambda op: dataclasses.replace(op, name="more@0")),
        f"'more@0' ({ADD_IN_PLACE}) does not belong to any op of the graph",
    ),
    "two results": (
        lambda p: with_ops(
            p, s=lambda op: dataclasses.replace(op, outputs=(*op.outputs, tensor("more")))
        ),
        "'s@0' adds in place, but it makes 2 tensors",
    ),
    "on its way": (sent, "overwrites 'g@0' while it may still be on its way to device 1"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_sum_that_may_not_be_in_place_is_refused(fault: str) -> None:
    graph, plan = sums()
    spoil, expected = FAULTS[fault]
    problems = plan_problems(graph, spoil(plan))
    assert any(re.search(re.escape(expected), each) for each in problems), problems


def test_the_plan_without_faults_is_valid() -> None:
    graph, plan = sums()
    assert plan_problems(graph, plan) == []
    assert list(cut_problems(graph, plan)) == []
    assert plan.partition is not None
    kinds = {op.name: op.kind for op in plan.partition.ops}
    assert (kinds["s@1"], kinds["t@1"]) == (ADD_IN_PLACE, ADD)


def test_a_term_whose_readers_have_all_run_is_sound_but_not_what_the_decision_says() -> None:
    graph, plan = sums()
    early = list(plan.order[0])
    early.remove("t@0")
    after = early.index("late@0") + 1
    row = (*early[:after], "t@0", *early[after:])
    moved = dataclasses.replace(with_ops(plan, t=into("k@0", "l@0")), order=(row, *plan.order[1:]))
    assert plan_problems(graph, moved) == []
    assert any("'t@0'" in each for each in cut_problems(graph, moved))
