import itertools
import random

import networkx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pardnn.graph.build import build_arrays, build_graph, made_graph, reordered
from pardnn.graph.csr import (
    NORMAL,
    REFERENCE,
    RESIDUAL,
    GraphArrays,
    op_edges,
    topological_order,
    transposed,
)
from pardnn.graph.ir import Graph, Op, Tensor, storage_owners
from tests.reference import graph as naive
from tests.strategies import FAMILIES, graphs, random_graph


def rows(ptr: np.ndarray, values: np.ndarray) -> list[list[int]]:
    return [values[a:b].tolist() for a, b in itertools.pairwise(ptr)]


@given(graphs(shuffled=True))
def test_a_graph_that_is_not_checked_is_the_same(graph: Graph) -> None:
    made, checked = made_graph("g", graph.ops), build_graph("g", graph.ops)
    assert made.ops == checked.ops
    assert all(np.array_equal(*both) for both in zip(made.arrays, checked.arrays, strict=True))


@given(graphs(shuffled=True))
def test_arrays_say_what_the_ops_say(graph: Graph) -> None:
    arrays, ops = graph.arrays, graph.ops
    op_id = {op.name: i for i, op in enumerate(ops)}
    tensors = [tensor for op in ops for tensor in op.outputs]
    tensor_id = {tensor.name: i for i, tensor in enumerate(tensors)}
    assert (arrays.num_ops, arrays.num_tensors) == (len(ops), len(tensors))
    assert np.diff(arrays.output_ptr).tolist() == [len(op.outputs) for op in ops]
    assert rows(arrays.input_ptr, arrays.input_tensor) == [
        [tensor_id[name] for name in op.inputs] for op in ops
    ]
    assert rows(arrays.after_ptr, arrays.after_op) == [
        [op_id[name] for name in op.after] for op in ops
    ]
    assert rows(arrays.before_ptr, arrays.before_op) == [
        [i for i, op in enumerate(ops) if other.name in op.after] for other in ops
    ]
    assert rows(arrays.consumer_ptr, arrays.consumer_op) == [
        [i for i, op in enumerate(ops) if tensor.name in op.inputs] for tensor in tensors
    ]
    assert arrays.tensor_op.tolist() == [i for i, op in enumerate(ops) for _ in op.outputs]
    assert arrays.tensor_bytes.tolist() == [tensor.bytes for tensor in tensors]
    assert arrays.workspace.tolist() == [op.workspace for op in ops]
    codes = {"normal": NORMAL, "residual": RESIDUAL, "reference": REFERENCE}
    assert arrays.memory.tolist() == [codes[op.memory] for op in ops]


@given(graphs(shuffled=True), st.randoms(use_true_random=False))
def test_arrays_of_another_order_are_those_built_of_it(graph: Graph, rng: random.Random) -> None:
    order = rng.sample(range(len(graph.ops)), len(graph.ops))
    built = build_arrays([graph.ops[i] for i in order])
    for name, found, array in zip(
        GraphArrays._fields, reordered(graph.arrays, np.array(order)), built, strict=True
    ):
        np.testing.assert_array_equal(found, array, err_msg=name)
        assert found.dtype == np.int64, name
        assert not found.flags.writeable, name


@given(graphs(shuffled=True))
def test_arrays_are_frozen_int64(graph: Graph) -> None:
    for name, array in zip(GraphArrays._fields, graph.arrays, strict=True):
        assert array.dtype == np.int64, name
        assert array.flags.c_contiguous, name
        assert not array.flags.writeable, name


@given(graphs(shuffled=True))
def test_order_and_edges_equal_their_twins(graph: Graph) -> None:
    pairs = op_edges(graph.arrays)
    assert [tuple(pair) for pair in pairs.tolist()] == naive.op_pairs(graph)
    order = graph.arrays.topological.tolist()
    assert sorted(order) == list(range(len(graph.ops)))
    place = {op: position for position, op in enumerate(order)}
    assert all(place[a] < place[b] for a, b in pairs.tolist())
    if any(a > b for a, b in pairs.tolist()):
        assert order == naive.topological_order(naive.predecessors(graph.ops))
    else:
        assert order == list(range(len(graph.ops)))  # the order of the file is kept


@given(st.integers(1, 9).flatmap(
    lambda n: st.tuples(
        st.just(n),
        st.sets(st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)).filter(
            lambda pair: pair[0] != pair[1]
        )),
    )
))  # fmt: skip
def test_cycles_shorten_the_order(drawn: tuple[int, set[tuple[int, int]]]) -> None:
    n, edges = drawn
    pairs = np.array(sorted(edges), dtype=np.int64).reshape(-1, 2)
    digraph = networkx.DiGraph(sorted(edges))
    has_order = networkx.is_directed_acyclic_graph(digraph)
    assert (len(topological_order(pairs, n)) == n) == has_order


@given(st.lists(st.lists(st.integers(0, 5), max_size=5), max_size=6))
def test_transposed(lists: list[list[int]]) -> None:
    ptr = np.concatenate([[0], np.cumsum([len(row) for row in lists], dtype=np.int64)])
    flat = np.array([i for row in lists for i in row], dtype=np.int64)
    assert rows(*transposed(ptr.astype(np.int64), flat, 6)) == naive.transposed(lists, 6)


@given(graphs(shuffled=True))
def test_aliases_are_inputs_with_the_same_owner(graph: Graph) -> None:
    names = [tensor.name for op in graph.ops for tensor in op.outputs]
    assert storage_owners(graph.ops) == {name: naive.owner_of(graph.ops, name) for name in names}
    for name, alias, i in zip(
        names, graph.arrays.tensor_alias, graph.arrays.tensor_op, strict=True
    ):
        if alias == -1:
            assert naive.owner_of(graph.ops, name) == name
        else:
            assert names[alias] in graph.ops[i].inputs
            assert naive.owner_of(graph.ops, names[alias]) == naive.owner_of(graph.ops, name)
    owners = [names[owner] for owner in graph.arrays.tensor_owner]
    assert owners == [naive.owner_of(graph.ops, name) for name in names]


def test_an_alias_of_the_owner_becomes_one_of_the_input() -> None:
    # The empty name is a name like any other.
    graph = build_graph("views", [
        Op(name="a", kind="input", outputs=(Tensor(name="", bytes=8),)),
        Op(name="b", kind="v", inputs=("",), outputs=(Tensor(name="b", bytes=8, alias_of=""),)),
        Op(name="c", kind="v", inputs=("b",), outputs=(Tensor(name="c", bytes=8, alias_of=""),)),
        Op(name="d", kind="v", inputs=("c",), memory="reference",
           outputs=(Tensor(name="d", bytes=8),)),
    ])  # fmt: skip
    assert graph.arrays.tensor_alias.tolist() == [-1, 0, 1, 2]
    assert set(storage_owners(graph.ops).values()) == {""}


def test_groups_are_dense_and_shared() -> None:
    ops = [
        Op(name=name, kind="k", group=group)
        for name, group in [("a", "x"), ("b", None), ("c", "x"), ("d", "0"), ("e", None)]
    ]
    assert build_graph("groups", ops).arrays.group.tolist() == [0, 1, 0, 2, 3]


@pytest.mark.parametrize("family", FAMILIES)
def test_families_are_reproducible(family: str) -> None:
    graph = random_graph(7, 60, family, types=("accelerator", "cpu"))
    assert graph == random_graph(7, 60, family, types=("accelerator", "cpu"))
    assert graph != random_graph(8, 60, family, types=("accelerator", "cpu"))
    assert abs(len(graph.ops) - 60) <= 1
    assert len(op_edges(graph.arrays)) >= 30


def test_shapes_are_checked_in_their_job(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--job") != "shapes":
        pytest.skip("only that job checks shapes")
    topological_order(np.zeros((0, 2), dtype=np.int64), 1)
    with pytest.raises(Exception, match="Type-check error"):
        topological_order(np.zeros((2, 3), dtype=np.int64), 1)
