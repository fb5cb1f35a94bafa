"""Optimizer state on the host: what follows from a plan, and what the checker refuses."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, cast

import pytest

from pardnn.errors import FileError, InvalidPlanError
from pardnn.graph.build import build_graph
from pardnn.graph.ir import FROM_HOST, LOSS_KIND, TO_HOST, Graph, Op, Tensor
from pardnn.plan.check import plan_problems
from pardnn.plan.memory import peak_bytes
from pardnn.plan.plan import Plan, plan_arrays
from pardnn.plan.rewritten import check_offload
from pardnn.plan.rewritten.offload import graph_with_host, may_offload


def tensor(name: str, alias: str | None = None) -> Tensor:
    return Tensor(name=name, bytes=100, shape=(25,), dtype="float32", alias_of=alias)


def update(name: str, state: str) -> Op:
    """An op that adds the gradient to a state in place."""
    args = {"args": [{"tensor": state}, {"tensor": "grad"}]}
    return Op(name=name, kind="aten.add_.Tensor", inputs=(state, "grad"), memory="reference",
              group=state, outputs=(tensor(name, state),), arguments=args,
              seconds={"accelerator": 1.0})  # fmt: skip


def momenta() -> Graph:
    """A step with two states, each added to and then read."""
    sources = [
        Op(name=name, kind="state", memory="residual", group=name, outputs=(tensor(name),))
        for name in ("a", "b")
    ]
    grad = Op(name="grad", kind="input", outputs=(tensor("grad"),))
    ops = [*sources, grad]
    for name in ("a", "b"):
        ops += [
            update(f"{name}1", name),
            Op(name=f"{name}2", kind="aten.exp.default", inputs=(f"{name}1",),
               outputs=(tensor(f"{name}2"),), arguments={"args": [{"tensor": f"{name}1"}]},
               seconds={"accelerator": 1.0}),
        ]  # fmt: skip
    return build_graph("momenta", ops)


def in_order(graph: Graph, offload: tuple[str, ...] | None = None) -> Plan:
    """A plan for one device in the order of the rewritten graph."""
    placed = graph if offload is None else graph_with_host(graph, offload)
    order = tuple(op.name for op in placed.ops)
    return Plan(placement=dict.fromkeys(order, 0), order=(order,), offload=offload)


def test_states_are_on_their_device_while_they_are_used() -> None:
    graph = momenta()
    assert [op.name for op in may_offload(graph)] == ["a", "b"]
    rewritten = graph_with_host(graph, ("a", "b"))
    assert [op.name for op in rewritten.ops] == [
        "a", "b", "grad", "a<host", "a1", "a>host", "a2", "b<host", "b1", "b>host", "b2",
    ]  # fmt: skip
    plan = in_order(graph, offload=("a", "b"))
    assert plan_problems(graph, plan) == []
    # The gradient, one state and what reads it; with both states there, 100 bytes more.
    assert peak_bytes(rewritten, plan_arrays(rewritten, plan)) == [300]
    assert peak_bytes(graph, plan_arrays(graph, in_order(graph))) == [400]


#: What keeps a state on its device: of its op, of its tensor.
STAYING: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a parameter": ({"kind": "parameter"}, {}),
    "of the step alone": ({"memory": "normal"}, {}),
    "one number": ({}, {"shape": (), "bytes": 4}),
    "of unknown shape": ({}, {"shape": None}),
    "empty": ({}, {"shape": (0,), "bytes": 0}),
    "of the host's own": ({}, {"dtype": "host.int"}),
    "of no dtype": ({}, {"dtype": None}),
    "returned": ({}, {}),
    "returned as a view": ({}, {}),
}


def test_what_may_live_on_the_host_is_state_that_ops_alone_read() -> None:
    def source(name: str) -> Op:
        more, of = STAYING.get(name, ({}, {}))
        made = dataclasses.replace(tensor(name), **of)
        op = Op(name=name, kind="state", memory="residual", outputs=(made,))
        return dataclasses.replace(op, **more)

    names = ("plain", *STAYING, "by a view")
    ops = [Op(name=f"view {i}", kind="aten.view.default", memory="reference", inputs=(of,),
              outputs=(tensor(f"view {i}", of),))
           for i, of in enumerate(("by a view", "returned as a view"))]  # fmt: skip
    reader = Op(name="y", kind="aten.stack.default", inputs=(*names[:-1], "view 0"),
                outputs=(tensor("y"),))  # fmt: skip
    loss = Op(name="loss", kind=LOSS_KIND, inputs=("y",),
              arguments={"result": [{"state": ["returned", ("view 1",)]}],
                         "replaced": ["plain"]})  # fmt: skip
    graph = build_graph("states", [*map(source, names), *ops, reader, loss])
    assert [op.name for op in may_offload(graph)] == ["plain", "by a view"]


def test_a_state_of_no_group_may_go_to_the_host() -> None:
    """It and its copies are put in one."""
    ops = [dataclasses.replace(op, group=None) for op in momenta().ops]
    graph = build_graph("alone", ops)
    assert plan_problems(graph, in_order(graph, offload=("a",))) == []
    groups = {op.name: op.group for op in graph_with_host(graph, ("a",)).ops}
    assert groups["a"] == groups["a<host"] == groups["a>host"] is not None
    other = [
        dataclasses.replace(op, group="b") if op.name == "a1" else op
        for op in graph_with_host(graph, ("a",)).ops
    ]
    rewritten = dataclasses.replace(graph, ops=tuple(other))
    problems = list(check_offload.offload_problems(graph, ("a",), rewritten))
    assert any("is in another group" in problem for problem in problems), problems


def test_a_state_that_is_only_read_is_not_written_back() -> None:
    ops = [op for op in momenta().ops if op.name not in ("b1", "b2")]
    read = Op(name="b2", kind="aten.exp.default", inputs=("b",), outputs=(tensor("b2"),),
              arguments={"args": [{"tensor": "b"}]})  # fmt: skip
    graph = build_graph("frozen", [*ops, read])
    rewritten = graph_with_host(graph, ("b",))
    assert "b>host" not in {op.name for op in rewritten.ops}
    assert plan_problems(graph, in_order(graph, offload=("b",))) == []
    back = next(op for op in graph_with_host(momenta(), ("b",)).ops if op.kind == TO_HOST)
    back = dataclasses.replace(back, after=())
    more = dataclasses.replace(rewritten, ops=(*rewritten.ops, back))
    assert list(check_offload.offload_problems(graph, ("b",), more)) == [
        "offload: 'b' is written back 1 times"
    ]


def test_a_state_that_no_op_reads_is_not_copied() -> None:
    """As that of a layer that was frozen since it went to the host."""
    graph = build_graph("frozen", [op for op in momenta().ops if op.name not in ("b1", "b2")])
    rewritten = graph_with_host(graph, ("a", "b"))
    assert {op.name for op in rewritten.ops if op.name.startswith("b")} == {"b"}
    plan = in_order(graph, offload=("a", "b"))
    assert plan_problems(graph, plan) == []
    assert peak_bytes(rewritten, plan_arrays(rewritten, plan)) == [200]


def test_a_state_that_two_ops_write_goes_back_after_both() -> None:
    """And after nothing else, which would keep its copy on the device."""
    graph = momenta()
    again = dataclasses.replace(update("a3", "a1"), group="a", after=("a2",))
    graph = build_graph("twice", [*graph.ops, again])
    rewritten = graph_with_host(graph, ("a",))
    for after, is_right in (
        (("a1", "a3"), True), (("a3", "a1"), True), (("a3",), False), (("a1", "a2", "a3"), False),
    ):  # fmt: skip
        ops = tuple(
            dataclasses.replace(op, after=after) if op.kind == TO_HOST else op
            for op in rewritten.ops
        )
        found = list(
            check_offload.offload_problems(graph, ("a",), dataclasses.replace(graph, ops=ops))
        )
        told = ["offload: 'a>host' does not wait for every write"]
        assert found == ([] if is_right else told), after


@pytest.mark.parametrize("names", [("grad",), ("a1",), ("nothing",), ("a", "a")])
def test_only_states_go_to_the_host(names: tuple[str, ...]) -> None:
    with pytest.raises(InvalidPlanError, match="offload"):
        graph_with_host(momenta(), names)
    plan = dataclasses.replace(in_order(momenta(), offload=("a",)), offload=names)
    assert "offload" in plan_problems(momenta(), plan)[0]


@pytest.mark.parametrize("names", [("b", "a"), ()])
def test_states_are_named_in_the_order_of_the_graph(names: tuple[str, ...]) -> None:
    assert "offload" in plan_problems(momenta(), in_order(momenta(), names))[0]


def dropped(name: str) -> Callable[[Op], Op | None]:
    return lambda op: None if op.name == name else op


def changed(op_name: str, **fields: object) -> Callable[[Op], Op | None]:
    given = cast("dict[str, Any]", fields)
    return lambda op: dataclasses.replace(op, **given) if op.name == op_name else op


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        (dropped("a>host"), "written back 0 times"),
        (changed("a>host", after=()), "does not wait"),
        (changed("a>host", group=None), "another device"),
        (changed("a>host", arguments={"args": []}), "does not write"),
        (changed("a", memory="residual"), "memory"),
        (changed("a2", kind="aten.log.default"), "another op"),
        (changed("b1", workspace=1), "another op"),
        (changed("b1", after=("a1",)), "another op"),
        (changed("grad", name="other"), "other ops"),
        (changed("b", memory="host"), "has memory host"),
        (changed("b1", group="a"), "is in another group"),
        (changed("a2", inputs=("b1",)), "reads other tensors"),
        (changed("a2", arguments={"args": [{"tensor": "b1"}]}), "has other arguments"),
        (changed("a2", outputs=(tensor("a2", "a1"),)), "makes other tensors"),
        (changed("a1", outputs=(tensor("a1", "b"),)), "makes other tensors"),
        (dropped("a<host"), "not copied to its device exactly once"),
        (changed("a<host", inputs=("b",)), "not copied to its device exactly once"),
        (changed("b2", kind=FROM_HOST, inputs=("a",)), "not copied to its device exactly once"),
        (changed("a<host", group="b"), "may be on another device"),
        (changed("a>host", group="b"), "may be on another device"),
        (changed("a>host", inputs=("a", "grad")), "'grad' is written back, but is not a copy of a"),
        (changed("a>host", inputs=("grad", "a<host")), "does not write 'a' back"),
    ],
)
def test_the_checker_is_not_the_rewriter(fault: Callable[[Op], Op | None], text: str) -> None:
    graph = momenta()
    ops = map(fault, graph_with_host(graph, ("a",)).ops)
    rewritten = dataclasses.replace(graph, ops=tuple(op for op in ops if op is not None))
    problems = list(check_offload.offload_problems(graph, ("a",), rewritten))
    assert any(text in problem for problem in problems), problems


def test_nothing_but_copies_reads_the_host() -> None:
    first, *rest = momenta().ops
    with pytest.raises(FileError, match="which is on the host"):
        build_graph("direct", [dataclasses.replace(first, memory="host"), *rest])
    source = Op(name="w", kind="parameter", memory="host", outputs=(tensor("w"),))
    with pytest.raises(FileError, match="is not a state"):
        build_graph("parameter", [source])
