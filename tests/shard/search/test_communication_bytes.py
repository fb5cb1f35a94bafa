"""Costs of hand-made shardings, and the minimum of sums of tables."""

import itertools

import numpy as np

from pardnn.graph.ir import LOSS_KIND, Op, Tensor
from pardnn.plan.mesh import make_mesh
from pardnn.shard.partition.call import call_of
from pardnn.shard.partition.mesh_strategies import mesh_strategy_of
from pardnn.shard.search.communication_bytes import (
    element_bytes,
    is_call,
    produced,
    sharding_bytes,
)
from pardnn.shard.search.tofu import search
from pardnn.shard.search.variable_elimination import Table, minimise
from pardnn.shard.sharding import Sharding
from testbed.hand_graphs import matmul


def test_data_parallelism_twice_moves_three_times_the_weight():
    layouts = {"x": (0, 0), "w": (0, 0), "y": (0, 0)}
    sharding = Sharding(make_mesh((2, 2)), layouts, {"y": ("i", "i")})
    assert sharding_bytes(matmul(8, 4, 4), sharding) == {"y": 3 * 16 * 4}


def test_a_reduction_counts_the_parts_that_others_hold():
    layouts = {"x": (1,), "w": (0,), "y": (1,)}
    sharding = Sharding(make_mesh((2,)), layouts, {"y": ("k",)})
    assert sharding_bytes(matmul(8, 4, 6), sharding) == {"y": 8 * 6 * 4}


def test_bytes_of_an_element() -> None:
    """What has no shape, or no element, is one of its own bytes, or of none."""
    assert element_bytes(Tensor(name="t", bytes=48, shape=(3, 2), dtype="float64")) == 8
    assert element_bytes(Tensor(name="t", bytes=0, shape=(3, 0))) == 0
    assert element_bytes(Tensor(name="t", bytes=48)) == 48


def test_search_of_one_product():
    found = search(matmul(8, 16, 4), make_mesh((2,)))
    assert sharding_bytes(matmul(8, 16, 4), found) == {"y": 32 * 4}


def test_minimum_equals_that_of_all_assignments():
    for seed in range(20):
        rng = np.random.default_rng(seed)
        sizes = rng.integers(1, 4, 5).tolist()
        pairs = [p for p in itertools.combinations(range(5), 2) if rng.random() < 0.6]
        tables = [Table(p, rng.random([sizes[v] for v in p])) for p in pairs]

        def value(assignment, tables=tables):
            return sum(t.values[tuple(assignment[v] for v in t.variables)] for t in tables)

        best = min(map(value, itertools.product(*map(range, sizes))))
        found = minimise(sizes, tables)
        assert found.is_exact
        assert np.isclose(value(found.assignment), best)
        bounded = minimise(sizes, tables, max_entries=4)
        assert value(bounded.assignment) >= best - 1e-12


def test_results_that_an_op_drops_are_not_counted():
    """Of two results the first is not returned: the second is what the op makes."""
    args = {"args": [{"tensor": "x"}, 2, 1], "returns": [None, "y"]}
    x = Tensor(name="x", bytes=96, shape=(6, 4), dtype="float32")
    y = Tensor(name="y", bytes=48, shape=(6, 2), dtype="float32")
    op = Op(name="y", kind="aten.split.Tensor", inputs=("x",), outputs=(y,), arguments=args)
    strategy = mesh_strategy_of(call_of(op, {"x": x, "y": y}), ("i0",), make_mesh((2,)))
    assert strategy is not None
    ((name, boxes, flags),) = produced(op, strategy)
    assert name == "y"
    assert np.asarray(boxes).reshape(2, 2, 2).tolist() == [[[0, 3], [0, 2]], [[3, 6], [0, 2]]]
    assert not any(flags)


def test_calls_are_what_computes_with_tensors() -> None:
    kinds = {"aten.mm.default": True, "mylib::op": True, "scalar.pow": False, LOSS_KIND: False,
             "parameter": False, "input": False}  # fmt: skip
    assert {kind: is_call(Op(name="op", kind=kind)) for kind in kinds} == kinds
