"""Sums that a device makes in their first terms: which, and that no reader can tell."""

import dataclasses
import random
from typing import Any

import numpy as np
import pytest

from pardnn.graph.build import build_graph
from pardnn.graph.ir import Graph, Op, Tensor
from pardnn.plan.check import plan_problems
from pardnn.plan.memory import peak_bytes
from pardnn.plan.mesh import make_mesh
from pardnn.plan.partitioned_graph import ADD, ADD_IN_PLACE
from pardnn.plan.plan import Message, Plan, plan_arrays, planned_graph
from pardnn.planner.check_cut import cut_problems
from pardnn.shard.sharding import Sharding
from pardnn.shard.spmd.partitioner import spmd_partition
from pardnn.shard.spmd.sums_in_place import with_sums_in_place


def square(name: str, **more: Any) -> Tensor:
    return Tensor(name=name, bytes=16, shape=(2, 2), dtype="float32", **more)


def call(kind: str, name: str, *inputs: str, **more: Any) -> Op:
    args = {"args": [{"tensor": each} for each in inputs]}
    inputs = tuple(dict.fromkeys(inputs))
    return Op(name=name, kind=kind, inputs=inputs, arguments=args,
              **{"outputs": (square(name),)} | more)  # fmt: skip


def add(name: str, *inputs: str, **more: Any) -> Op:
    return call(ADD, name, *inputs, **more)


def product(name: str, *inputs: str) -> Op:
    return call("aten.mm.default", name, *inputs)


def transposed(name: str, of: str) -> Op:
    return call("aten.t.default", name, of, memory="reference",
                outputs=(square(name, strides=(1, 2), alias_of=of),))  # fmt: skip


def source(name: str) -> Op:
    return Op(name=name, kind="parameter", outputs=(square(name),), memory="residual")


def in_place(ops: list[Op], *messages: Message) -> dict[str, str | None]:
    """Where each sum is made that is not new."""
    found = with_sums_in_place(ops, messages)
    assert [op.name for op in found] == [op.name for op in ops]
    return {op.name: op.outputs[0].alias_of for op in found if op.kind == ADD_IN_PLACE}


def test_gradients_of_three_time_steps_are_added_up_in_the_first() -> None:
    ops = [source("w"), *(product(f"g{n}", "w") for n in range(3)), add("s1", "g0", "g1"),
           add("s2", "s1", "g2")]  # fmt: skip
    assert in_place(ops) == {"s1": "g0", "s2": "s1"}
    made = with_sums_in_place(ops, ())[-1]
    assert (made.kind, made.memory, made.arguments) == (
        ADD_IN_PLACE,
        "reference",
        ops[-1].arguments,
    )


SPOILT: dict[str, list[Op]] = {
    "a second reader": [product("g", "w"), add("s", "g", "w"), product("r", "g")],
    "a reader before it": [product("g", "w"), product("r", "g"), add("s", "g", "r")],
    "a parameter": [add("s", "w", "w")],
    "a view of it": [product("g", "w"), transposed("v", "g"), add("s", "g", "v")],
    "what it is a view of": [product("g", "w"), transposed("v", "g"), product("r", "g"),
                             add("s", "v", "r", outputs=(square("s", strides=(1, 2)),))],
    "twice itself": [product("g", "w"), product("h", "w"), add("s", "g", "g"), add("t", "g", "h")],
    "other strides": [product("g", "w"), transposed("v", "g"), add("s", "v", "w")],
    "another dtype": [product("g", "w"),
                      add("s", "g", "w", outputs=(dataclasses.replace(square("s"), dtype="a"),))],
    "it outlives the step": [dataclasses.replace(product("g", "w"), memory="residual"),
                             add("s", "g", "w")],
    "the sum outlives the step": [product("g", "w"), add("s", "g", "w", memory="residual")],
    "a call of somebody": [call("mylib::product", "g", "w"), add("s", "g", "w")],
    "a number": [product("g", "w"), Op(name="s", kind=ADD, inputs=("g",), outputs=(square("s"),),
                                       arguments={"args": [1.0, {"tensor": "g"}]})],
    "a part of it": [call("aten.mm.default", "g", "w",
                          outputs=(Tensor(name="g", bytes=32, shape=(4, 2), dtype="float32"),)),
                     call("pardnn.slice", "v", "g", memory="reference",
                          outputs=(square("v", alias_of="g"),)), add("s", "v", "w")],
}  # fmt: skip


@pytest.mark.parametrize("why", SPOILT)
def test_a_term_that_is_not_the_sums_alone_is_left_alone(why: str) -> None:
    assert in_place([source("w"), *SPOILT[why]]) == {}


def test_what_is_sent_is_left_alone() -> None:
    ops = [source("w"), product("g", "w"), add("s", "g", "w")]
    message = Message(tensor="g", source=0, target=1, post_before="x", hold_until="g")
    assert in_place(ops) == {"s": "g"}
    assert in_place(ops, message) == {}


def test_the_only_view_is_as_good_as_what_it_is_of() -> None:
    made = square("s", strides=(1, 2))
    ops = [
        source("w"),
        product("g", "w"),
        transposed("v", "g"),
        add("s", "v", "w", outputs=(made,)),
    ]
    assert in_place(ops) == {"s": "v"}


def random_ops(rng: random.Random) -> list[Op]:
    ops = [source("w"), source("u")]
    for n in range(rng.randint(3, 14)):
        names = [op.name for op in ops]
        kind = rng.choice([add, add, add, product, transposed])
        count = 1 if kind is transposed else 2
        ops.append(kind(f"t{n}", *(rng.choice(names[-5:]) for _ in range(count))))
        strides = {op.name: op.outputs[0].strides for op in ops}
        if kind is transposed and strides[ops[-1].inputs[0]]:
            ops.pop()
        elif kind is add and strides[ops[-1].inputs[0]]:
            ops[-1] = dataclasses.replace(ops[-1], outputs=(square(f"t{n}", strides=(1, 2)),))
    return ops


def run(ops: list[Op], order: list[int]) -> dict[str, np.ndarray]:
    """What each op read, views sharing memory."""
    values: dict[str, np.ndarray] = {}
    seen: dict[str, np.ndarray] = {}
    for number in order:
        op = ops[number]
        args = [values[each["tensor"]] for each in (op.arguments or {}).get("args", [])]
        seen[op.name] = np.array([each.copy() for each in args])
        if op.is_source:
            made = np.array([[1.0, 2.0], [3.0, 5.0]]) * (1 + len(values))
        elif op.kind == "aten.t.default":
            made = args[0].T
        elif op.kind == ADD_IN_PLACE:
            made = args[0]
            made += args[1]
        else:
            made = args[0] + args[1] if op.kind == ADD else args[0] * 0.5 + args[1].T
        values[op.name] = made
    return seen


def some_order(ops: list[Op], rng: random.Random) -> list[int]:
    left, done, order = list(range(len(ops))), set[str](), list[int]()
    while left:
        number = rng.choice([n for n in left if done.issuperset(ops[n].inputs)])
        left.remove(number)
        done.add(ops[number].name)
        order.append(number)
    return order


def test_no_op_reads_anything_else_in_any_order() -> None:
    rng, count = random.Random(0), 0
    for _ in range(300):
        ops = random_ops(rng)
        changed = list(with_sums_in_place(ops, ()))
        count += sum(op.kind == ADD_IN_PLACE for op in changed)
        build_graph("changed", changed)
        for _ in range(3):
            order = [0, 1, *(n for n in some_order(ops, rng) if n > 1)]
            expected, found = run(ops, order), run(changed, order)
            for name, values in expected.items():
                assert (found[name] == values).all(), (name, changed)
    assert count > 200


def time_steps(count: int = 4) -> Graph:
    """The gradient of a weight from each time step, added up, and the update."""

    def tensor(name: str, *shape: int, **more: Any) -> Tensor:
        size = 4 * shape[0] * shape[1]
        return Tensor(name=name, bytes=size, shape=shape, dtype="float32", **more)

    ops = [Op(name="w", kind="parameter", outputs=(tensor("w", 32, 64),), memory="residual")]
    last = None
    for n in range(count):
        for name, shape in ((f"x{n}", (32, 8)), (f"d{n}", (8, 64))):
            ops.append(Op(name=name, kind="input", outputs=(tensor(name, *shape),),
                          memory="residual"))  # fmt: skip
        ops.append(call("aten.mm.default", f"g{n}", f"x{n}", f"d{n}",
                        outputs=(tensor(f"g{n}", 32, 64),)))  # fmt: skip
        if last is not None:
            ops.append(add(f"s{n}", last, f"g{n}", outputs=(tensor(f"s{n}", 32, 64),)))
        last = ops[-1].name
    ops.append(call("aten.sub_.Tensor", "new", "w", str(last), memory="reference",
                    outputs=(tensor("new", 32, 64, alias_of="w"),)))  # fmt: skip
    return build_graph("time steps", ops)


def cut(graph: Graph, *, sums_in_place: bool = True) -> Plan:
    """Weight and gradients by rows."""
    layouts = dict.fromkeys((t.name for op in graph.ops for t in op.outputs), (0,))
    layouts |= {f"d{n}": (None,) for n in range(4)}
    loops = {f"g{n}": ("i",) for n in range(4)} | {f"s{n}": ("i0",) for n in range(1, 4)}
    loops["new"] = ("i0",)
    sharding = Sharding(make_mesh((2,)), layouts, loops)
    return spmd_partition(graph, sharding, sums_in_place=sums_in_place)


def test_a_cut_plan_holds_one_shard_less() -> None:
    graph, peaks = time_steps(), []
    for flag in (False, True):
        plan = cut(graph, sums_in_place=flag)
        assert plan_problems(graph, plan) == []
        assert list(cut_problems(graph, plan)) == []
        assert plan.partition is not None
        kinds = [op.kind for op in plan.partition.ops]
        assert (kinds.count(ADD), kinds.count(ADD_IN_PLACE)) == ((0, 6) if flag else (6, 0))
        local = planned_graph(graph, plan)
        peaks.append(peak_bytes(local, plan_arrays(local, plan)))
    shard = 4 * 32 * 64 // 2
    assert [new - old for new, old in zip(*peaks, strict=True)] == [shard, shard]
