"""Every rule of the checker fires on a planted fault, alone, and names what breaks it."""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pardnn.errors import FileError
from pardnn.graph.build import build_graph
from pardnn.graph.check import check_ops
from pardnn.graph.ir import Graph, Op, Tensor
from tests.strategies import graphs


def valid() -> list[Op]:
    """x -> h -> (view v) -> y, with an in-place update of w."""
    return [
        Op(name="x", kind="input", outputs=(Tensor(name="x", bytes=8, shape=(2,)),)),
        Op(name="w", kind="parameter", outputs=(Tensor(name="w", bytes=8),), memory="residual"),
        Op(name="h", kind="aten.mul", inputs=("x", "w"), outputs=(Tensor(name="h", bytes=8),)),
        Op(name="v", kind="aten.view", inputs=("h",), memory="reference",
           outputs=(Tensor(name="v", bytes=8, alias_of="h"),)),
        Op(name="y", kind="aten.exp", inputs=("v",), outputs=(Tensor(name="y", bytes=8),),
           seconds={"gpu": 1.0}),
        Op(name="u", kind="aten.add_", inputs=("w", "y"), after=("h",), memory="reference",
           outputs=(Tensor(name="u", bytes=8, alias_of="w"),), arguments={"mutates": ["w"]}),
    ]  # fmt: skip


def with_op(name: str, **changes: Any) -> list[Op]:
    return [dataclasses.replace(op, **changes) if op.name == name else op for op in valid()]


def with_tensor(name: str, **changes: Any) -> list[Op]:
    ops = valid()
    i = next(i for i, op in enumerate(ops) if op.name == name)
    tensor = dataclasses.replace(ops[i].outputs[0], **changes)
    ops[i] = dataclasses.replace(ops[i], outputs=(tensor,))
    return ops


def with_memory(memory: str) -> list[Op]:
    """What no file and no constructor that checks types would let through."""
    ops = valid()
    object.__setattr__(ops[2], "memory", memory)
    return ops


FAULTS: dict[str, tuple[Callable[[], list[Op]], str]] = {
    "no op": (list, "graph has no operations"),
    "op twice": (lambda: [*valid(), Op(name="x", kind="input")], "two ops are named 'x'"),
    "tensor twice": (
        lambda: [*valid(), Op(name="z", kind="input", outputs=(Tensor(name="x", bytes=8),))],
        "two tensors are named 'x'",
    ),
    "half a letter": (
        lambda: [*valid(), Op(name="\ud800", kind="input")],
        r"op '\ud800' has a name that is not Unicode text",
    ),
    "workspace": (lambda: with_op("h", workspace=-1), "ops[2] 'h': workspace is -1 bytes"),
    "memory": (
        lambda: with_memory("forever"),
        "ops[2] 'h': memory is 'forever', not normal, residual, reference or host",
    ),
    "reference to nothing": (
        lambda: with_op("x", memory="reference"),
        "ops[0] 'x': memory is reference, but it reads no tensor",
    ),
    "no device": (lambda: with_op("y", seconds={}), "ops[4] 'y': seconds is empty"),
    "negative time": (lambda: with_op("y", seconds={"gpu": -1.0}), "seconds on 'gpu' is -1.0"),
    "NaN": (lambda: with_op("y", seconds={"gpu": float("nan")}), "seconds on 'gpu' is nan"),
    "infinity": (lambda: with_op("y", seconds={"gpu": float("inf")}), "seconds on 'gpu' is inf"),
    "mutates": (
        lambda: with_op("u", arguments={"mutates": 5}),
        "ops[5] 'u': arguments.mutates is not a list of tensors that it reads",
    ),
    "mutates another's": (
        lambda: with_op("u", arguments={"mutates": ["x"]}),
        "arguments.mutates is not a list of tensors that it reads",
    ),
    "bytes": (lambda: with_tensor("x", bytes=-1), "ops[0] 'x': tensor 'x' has -1 bytes"),
    "shape": (lambda: with_tensor("x", shape=(-1,)), "tensor 'x' has shape [-1]"),
    "large shape": (lambda: with_tensor("x", shape=(2**63,)), "tensor 'x' has shape [92233"),
    "rank": (lambda: with_tensor("x", strides=(1, 1)), "has strides of another rank"),
    "misaligned": (
        lambda: with_tensor("x", misaligned_bytes=64),
        "'x' is misaligned by 64 bytes, not",
    ),
    "strides": (lambda: with_tensor("x", strides=(-1,)), "tensor 'x' has strides [-1]"),
    "too many bytes": (
        lambda: with_tensor("x", bytes=2**63),
        f"its tensors take {2**63 + 40} bytes together",
    ),
    "unknown tensor": (
        lambda: with_op("h", inputs=("x", "q")),
        "op 'h' reads tensor 'q', which no op produces",
    ),
    "own output": (lambda: with_op("h", inputs=("h",)), "op 'h' reads its own output 'h'"),
    "unknown op": (
        lambda: with_op("u", after=("q",)),
        "op 'u' comes after op 'q', which does not exist",
    ),
    "after itself": (lambda: with_op("u", after=("u",)), "op 'u' comes after itself"),
    "alias of nothing": (
        lambda: with_tensor("v", alias_of="q"),
        "tensor 'v' of op 'v' aliases 'q', which no op produces",
    ),
    "alias of itself": (
        lambda: with_tensor("v", alias_of="v"),
        "tensor 'v' of op 'v' aliases itself through other tensors",
    ),
    "alias of what it does not read": (
        lambda: with_tensor("v", alias_of="x"),
        "tensor 'v' of op 'v' aliases 'x', but its op does not read it",
    ),
    "cycle": (
        lambda: with_op("x", after=("y",)),
        "it has a cycle: 'x' -> 'h' -> 'v' -> 'y' -> 'x'",
    ),
}


def test_the_valid_graph_is_valid() -> None:
    check_ops(valid())


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault(fault: str) -> None:
    plant, expected = FAULTS[fault]
    with pytest.raises(FileError) as caught:
        build_graph("planted", plant())
    assert caught.value.code == "E402"
    assert caught.value.exit_status == 4
    assert expected in caught.value.details["problems"][0]
    assert caught.value.message.startswith("'planted' is not a valid graph: ")


def test_ten_problems_at_most_are_listed() -> None:
    ops = [Op(name=f"op{i}", kind="input", workspace=-1) for i in range(50)]
    with pytest.raises(FileError, match="9 more: ") as caught:
        check_ops(ops)
    assert len(caught.value.details["problems"]) == 10


def test_a_long_cycle_is_cut_in_the_middle() -> None:
    n = 20_000
    ops = [Op(name=f"op{i}", kind="call", after=(f"op{(i - 1) % n}",)) for i in range(n)]
    with pytest.raises(FileError) as caught:
        check_ops(ops)
    assert f"({n + 1 - 8} more)" in caught.value.message
    assert len(caught.value.message) < 300


@given(graphs(min_ops=2, shuffled=True), st.data())
def test_an_edge_against_the_order_is_a_cycle(graph: Graph, data: st.DataObject) -> None:
    """Any dependence of an ancestor on its descendant is found, and the cycle is one."""
    arrays = graph.arrays
    order = arrays.topological.tolist()
    by_name = {op.name: op for op in graph.ops}
    late = data.draw(st.sampled_from(order[1:]))
    early = data.draw(st.sampled_from(order[: order.index(late)]))
    first, last = graph.ops[early], graph.ops[late]
    # early -> late -> early, whatever lay between them before.
    last = dataclasses.replace(last, after=(*last.after, first.name))
    by_name[last.name] = last
    by_name[first.name] = dataclasses.replace(first, after=(*first.after, last.name))
    with pytest.raises(FileError, match="it has a cycle: ") as caught:
        check_ops(list(by_name.values()))
    names = [part.strip("'") for part in caught.value.message.split("cycle: ")[1].split(" -> ")]
    assert names[0] == names[-1]
    if len(names) < 10:
        producer = {tensor.name: op.name for op in graph.ops for tensor in op.outputs}
        for a, b in itertools.pairwise(names):
            assert a in {*(producer[t] for t in by_name[b].inputs), *by_name[b].after}


@pytest.mark.parametrize(
    ("form", "told"),
    [({"bytes": -1, "shape": (2,)}, "has -1 bytes"),
     ({"bytes": 8, "shape": (2,), "strides": (-1,)}, "has strides [-1]")],
)  # fmt: skip
def test_a_tensor_is_looked_at_that_differs_from_one_before_in_one_field(
    form: dict[str, Any], told: str
) -> None:
    good = Op(name="a", kind="op", outputs=(Tensor(name="a", bytes=8, shape=(2,)),))
    bad = Op(name="b", kind="op", outputs=(Tensor(name="b", **form),))
    with pytest.raises(FileError, match=rf"tensor 'b' {told}".replace("[", r"\[")):
        check_ops([good, bad])


@pytest.mark.parametrize("kind", ["pardnn.from_host", "pardnn.to_host"])
def test_what_copies_from_the_host_needs_something_there(kind: str) -> None:
    """Also in a graph in which nothing is on the host."""
    x = Op(name="x", kind="input", outputs=(Tensor(name="x", bytes=8),))
    with pytest.raises(FileError, match="op 'c' copies no tensor of the host"):
        check_ops([x, Op(name="c", kind=kind, inputs=("x",))])


def test_what_is_on_the_host_is_state_also_where_nothing_copies_it() -> None:
    op = Op(name="c", kind="op", memory="host", outputs=(Tensor(name="c", bytes=8),))
    with pytest.raises(FileError, match=r"op 'c' \('op'\) is on the host, but is not a state"):
        check_ops([op])
