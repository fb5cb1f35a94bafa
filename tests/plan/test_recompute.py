"""Second calls of ops: the graph that follows from them, and the checker, by faults in it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from pardnn.errors import InvalidPlanError
from pardnn.graph.build import build_graph
from pardnn.graph.ir import Graph, Op, Tensor
from pardnn.plan.check import check_plan, plan_problems
from pardnn.plan.file import plan_from_json, plan_to_json, stamped
from pardnn.plan.memory import peak_bytes
from pardnn.plan.partitioned_graph import FETCH, JOIN
from pardnn.plan.plan import Plan, plan_arrays, planned_graph
from pardnn.plan.rewritten.check_recompute import recompute_problems
from pardnn.plan.rewritten.recompute import SecondCall, graph_with_calls


def op(name: str, *inputs: str, size: int = 8, kind: str = "aten.mm.default", **kw: Any) -> Op:
    """Return an op that makes the tensor of its own name."""
    arguments = {"args": [{"tensor": name} for name in inputs]}
    return Op(name=name, kind=kind, inputs=inputs, arguments=arguments,
              outputs=(Tensor(name=name, bytes=size),), **kw)  # fmt: skip


def written(name: str, of: str, *more: str, after: tuple[str, ...] = ()) -> Op:
    """Return an op that writes a tensor in place."""
    return Op(
        name=name, kind="aten.add_.Tensor", inputs=(of, *more), memory="reference", after=after,
        arguments={"args": [{"tensor": each} for each in (of, *more)]},
        outputs=(Tensor(name=name, bytes=8, alias_of=of),),
    )  # fmt: skip


def chain() -> Graph:
    """A step of three layers: x -> a -> b -> c, then the gradients gc, gb, ga, then the update."""
    return build_graph("chain", [
        Op(name="w", kind="parameter", memory="residual", outputs=(Tensor(name="w", bytes=4),)),
        op("x", kind="input", size=2), op("a", "x", "w"), op("b", "a", "w"), op("c", "b", "w"),
        op("gc", "c", size=2), op("gb", "gc", "b", size=2), op("ga", "gb", "a", size=2),
        written("w2", "w", "ga", after=("a", "b", "c")),
    ])  # fmt: skip


TWICE = (SecondCall(op="a", readers=("b~2", "ga")), SecondCall(op="b", readers=("gb",)))


def planned(graph: Graph, calls: tuple[SecondCall, ...]) -> Plan:
    """Return the plan for one device, in the order of the rewritten graph."""
    names = [each.name for each in graph_with_calls(graph, calls).ops]
    plan = Plan(placement=dict.fromkeys(names, 0), order=(tuple(names),), recompute=calls)
    return stamped(plan, graph)


def test_second_calls_run_before_what_reads_them_and_free_the_first_results() -> None:
    graph, plan = chain(), planned(chain(), TWICE)
    check_plan(graph, plan)
    assert plan.order[0] == ("w", "x", "a", "b", "c", "gc", "a~2", "b~2", "gb", "ga", "w2")
    rewritten = {each.name: each for each in planned_graph(graph, plan).ops}
    assert rewritten["b~2"].inputs == ("a~2", "w")
    assert rewritten["b~2"].arguments == {"args": [{"tensor": "a~2"}, {"tensor": "w"}]}
    assert rewritten["gb"].inputs == ("gc", "b~2")
    assert rewritten["c"].inputs == ("b", "w")
    assert rewritten["w2"].after == ("a", "b", "c", "a~2", "b~2")


def test_arguments_by_name_are_those_of_the_second_call_too() -> None:
    named = {"other": {"tensor": "a"}, "alpha": 2, "dtype": {"dtype": "float32"}}
    arguments = {"args": [{"tensor": "x"}], "kwargs": named}
    b = dataclasses.replace(op("b", "x", "a"), arguments=arguments)
    graph = build_graph("named", [op("x", kind="input"), op("a", "x"), b, op("gb", "b")])
    calls = (SecondCall(op="a", readers=("b~2",)), SecondCall(op="b", readers=("gb",)))
    rewritten = {each.name: each for each in graph_with_calls(graph, calls).ops}
    assert rewritten["b~2"].arguments == {
        "args": [{"tensor": "x"}], "kwargs": named | {"other": {"tensor": "a~2"}},
    }  # fmt: skip
    assert rewritten["b"].arguments == arguments


def test_all_other_rules_hold_beside_second_calls() -> None:
    graph, plan = chain(), planned(chain(), TWICE)
    row = list(plan.order[0])
    row[3], row[4] = row[4], row[3]  # c before the b that it reads
    (problem,) = plan_problems(graph, dataclasses.replace(plan, order=(tuple(row),)))
    assert "'c'" in problem
    assert "'b'" in problem


def test_memory_falls() -> None:
    graph, plan = chain(), planned(chain(), TWICE)
    without = dataclasses.replace(plan, recompute=None, order=(tuple(o.name for o in graph.ops),))
    with_calls = planned_graph(graph, plan)
    assert peak_bytes(graph, plan_arrays(graph, without)) == [4 + 3 * 8 + 2]
    assert peak_bytes(with_calls, plan_arrays(with_calls, plan)) == [4 + 2 * 8 + 2 * 2]


def test_a_plan_keeps_its_calls_in_its_file() -> None:
    graph, plan = chain(), planned(chain(), TWICE)
    again = plan_from_json(plan_to_json(plan))
    assert again.recompute == TWICE
    check_plan(graph, again)
    assert again.keeps_bits


def in_place() -> Graph:
    """A layer whose result is written in place, and read by its gradient."""
    return build_graph("in place", [
        op("x", kind="input"), op("a", "x"), written("r", "a"), op("b", "r"), op("gb", "b"),
        op("ga", "gb", "r"),
    ])  # fmt: skip


def test_what_is_written_in_place_is_made_and_written_again() -> None:
    calls = (SecondCall(op="a", readers=("r~2",)), SecondCall(op="r", readers=("ga",)))
    plan = planned(in_place(), calls)
    check_plan(in_place(), plan)
    (again,) = (each for each in planned_graph(in_place(), plan).ops if each.name == "r~2")
    assert again.inputs == ("a~2",)
    assert again.outputs[0].alias_of == "a~2"


def stale() -> Graph:
    """A gradient that reads a storage by the name that it had before it was written."""
    return build_graph("stale", [
        op("x", kind="input"), op("a", "x"), written("r", "a"), op("gb", "r"),
        op("ga", "gb", "a", after=("r",)),
    ])  # fmt: skip


REFUSED: list[Any] = [
    (chain, (SecondCall(op="x", readers=("a",)),), "not a call that can"),
    (chain, (SecondCall(op="w", readers=("a",)),), "not a call that can"),
    (chain, (SecondCall(op="a", readers=("ga",), number=1),), "number"),
    (chain, (SecondCall(op="a", readers=("ga",)),) * 2, "number"),
    (chain, (SecondCall(op="a", readers=()),), "no readers"),
    (chain, (SecondCall(op="a", readers=("nobody",)),), "has no op"),
    (chain, (SecondCall(op="nobody", readers=("a",)),), "has no op"),
    (chain, (SecondCall(op="b", readers=("a",)),), "runs before it"),
    (in_place, (SecondCall(op="r", readers=("ga",)),), "would write what 'r' has written"),
    (stale, (SecondCall(op="a", readers=("ga",)),), "finds other writes"),
]


@pytest.mark.parametrize(("factory", "calls", "why"), REFUSED)
def test_what_may_not_be_called_again_is_refused(factory: Any, calls: Any, why: str) -> None:
    graph = factory()
    names = tuple(each.name for each in graph.ops)
    plan = Plan(placement=dict.fromkeys(names, 0), order=(names,), recompute=calls)
    with pytest.raises(InvalidPlanError):
        check_plan(graph, plan)
    assert any(why in problem for problem in plan_problems(graph, plan))


def fetches() -> Graph:
    """A buffer that a join completes, one that is complete at once, and what outlives the step."""

    def made(name: str, kind: str, *args: Any, reads: tuple[str, ...], **kw: Any) -> Op:
        return Op(name=name, kind=kind, inputs=reads, arguments={"args": list(args)},
                  outputs=(Tensor(name=name, bytes=8, shape=(2,)),), **kw)  # fmt: skip

    part, rest = [{"tensor": "x"}, [[0, 1]]], [{"tensor": "y"}, [[1, 2]]]
    return build_graph("fetches", [
        op("x", kind="input"), op("y", kind="input"),
        made("open", FETCH, [2], None, [part], reads=("x",)),
        made("whole", JOIN, {"tensor": "open"}, [rest], reads=("open", "y")),
        made("closed", FETCH, [2], None, [part, rest], reads=("x", "y")),
        op("kept", "whole", "closed", memory="residual"), op("end", "kept", "closed", "whole"),
    ])  # fmt: skip


@pytest.mark.parametrize(
    ("called", "why"),
    [
        ("open", "makes a buffer that messages fill"),
        ("whole", "works in place or for all devices"),
        ("kept", "makes a tensor that outlives the step"),
        ("closed", None),
    ],
)
def test_buffers_and_what_outlives_the_step_are_made_once(called: str, why: str | None) -> None:
    graph = fetches()
    reader = next(each.name for each in reversed(graph.ops) if called in each.inputs)
    calls = (SecondCall(op=called, readers=(reader,)),)
    problems = list(recompute_problems(graph, calls, graph_with_calls(graph, calls)))
    kind = next(each.kind for each in graph.ops if each.name == called)
    assert problems == ([] if why is None else [f"recompute: {called!r} ({kind}) {why}"])


@pytest.mark.parametrize("named", ["op", "tensor"])
def test_names_of_second_calls_are_new(named: str) -> None:
    """Neither an op of the graph nor a tensor may have the name of a second call already."""
    graph = chain()
    other = op("a~2", "x")
    if named == "tensor":
        other = dataclasses.replace(other, name="other")
    taken = build_graph("taken", [*graph.ops, other])
    rewritten = graph_with_calls(graph, TWICE)
    assert list(recompute_problems(taken, TWICE, rewritten)) == [
        "recompute: 'a~2' is in the graph already"
    ]


def broken(changed: str, **fields: Any) -> list[str]:
    graph = chain()
    rewritten = graph_with_calls(graph, TWICE)
    ops = [
        dataclasses.replace(each, **fields) if each.name == changed else each
        for each in rewritten.ops
    ]
    return list(recompute_problems(graph, TWICE, build_graph("broken", ops)))


def test_the_checker_finds_what_the_rewriting_got_wrong() -> None:
    assert broken("b~2") == []
    other = {"args": [{"tensor": "x"}, {"tensor": "w"}]}
    assert "reads other tensors" in broken("b~2", inputs=("x", "w"), arguments=other)[0]
    assert "other arguments" in broken("b~2", arguments={"args": [{"tensor": "a~2"}, 3]})[0]
    assert "not the aten.mm.default" in broken("b~2", kind="aten.bmm.default")[0]
    assert "other tensors" in broken("b~2", outputs=(Tensor(name="b~2", bytes=9),))[0]
    assert "wait for" in broken("w2", after=("a", "b", "c"))[0]
    assert "wait for" in broken("w2", after=("a~2", "b~2"))[0]
    for more in ({"workspace": 1}, {"group": "g"}, {"memory": "residual"}):
        assert "not the aten.mm.default" in broken("b~2", **more)[0], more


@pytest.mark.parametrize("left_out", ["w2", "b~2"])
def test_all_ops_are_there(left_out: str) -> None:
    """With the op of a second call alone, `gb` reads what nobody makes."""
    graph = chain()
    rewritten = graph_with_calls(graph, TWICE)
    ops = tuple(each for each in rewritten.ops if each.name != left_out)
    if left_out == "b~2":
        ops = tuple(each for each in ops if each.name != "b")
    found = list(recompute_problems(graph, TWICE, dataclasses.replace(graph, ops=ops)))
    assert found == ["recompute: the rewritten graph has other ops"]


def test_two_calls_that_write_one_storage_are_at_odds_with_all_that_read_it() -> None:
    """Neither is before the other, and what reads the storage finds two writes, not one."""
    graph, calls = in_place(), (SecondCall(op="r", readers=("ga",)),)
    rewritten = graph_with_calls(graph, calls)
    assert list(recompute_problems(graph, calls, rewritten)) == [
        "recompute: 'r~2' does not wait for 'r'",
        "recompute: 'b' finds other writes in 'r' than 'b' does",
        "recompute: 'r~2' would write what 'r' has written",
        "recompute: 'r' does not wait for 'r~2'",
        "recompute: 'ga' finds other writes in 'r~2' than 'ga' does",
    ]


def test_a_reader_waits_for_the_write_whose_result_it_reads() -> None:
    """Its order follows from what it reads, if not from what it names."""
    graph = in_place()
    calls = (SecondCall(op="a", readers=("r~2",)), SecondCall(op="r", readers=("ga",)))
    rewritten = graph_with_calls(graph, calls)
    free = dataclasses.replace(
        rewritten, ops=tuple(dataclasses.replace(op, after=()) for op in rewritten.ops)
    )
    assert list(recompute_problems(graph, calls, free)) == []
