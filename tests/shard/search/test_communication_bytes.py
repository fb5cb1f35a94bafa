"""Costs of hand-made shardings, and the minimum of sums of tables."""

import itertools

import numpy as np

from pardnn.plan.mesh import make_mesh
from pardnn.shard.search.communication_bytes import sharding_bytes
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
