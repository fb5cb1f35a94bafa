"""Baselines: the figures that are known of them, and that search beats them all."""

import pytest

from pardnn.plan.mesh import make_mesh
from pardnn.shard.search import tofu as search_module
from pardnn.shard.search.baselines import BASELINES
from pardnn.shard.search.communication_bytes import total_bytes
from pardnn.shard.search.cost_tables import CostTables
from pardnn.shard.search.dynamic_program import solve
from pardnn.shard.search.objective_bytes import BytesObjective
from pardnn.shard.search.recursion import recursive_search
from pardnn.shard.search.tofu import search
from testbed.hand_graphs import matmul, mlp
from tests.shard.search.test_tofu import assert_valid

pytestmark = pytest.mark.jit

MESH = make_mesh((2, 2))
SIZES = {
    "B": (32, 256, 512, 128),
    "C": (4096, 128, 128, 128),
    "D": (256, 256, 1024, 64),
    "F": (64, 128, 512, 512),
}
KNOWN = {
    "icml18": (172_032, 3_293_184, 884_736, 540_672),
    "allrow-greedy": (184_320, 245_760, 1_769_472, 557_056),
    "zero-3": (1_376_256, 245_760, 2_162_688, 2_752_512),
    "equal-chop": (86_016, 245_760, 540_672, 344_064),
}


@pytest.mark.parametrize("name", KNOWN)
def test_known_figures(name):
    found = [
        total_bytes(mlp(*size), BASELINES[name](mlp(*size), MESH)) // 4 for size in SIZES.values()
    ]
    assert tuple(found) == KNOWN[name]


@pytest.mark.parametrize("name", BASELINES)
@pytest.mark.parametrize("sizes", [*SIZES.values(), (6, 10, 7, 9)])
def test_search_moves_no_more_than_any_baseline(name, sizes):
    graph = mlp(*sizes)
    baseline = BASELINES[name](graph, MESH)
    assert_valid(graph, baseline)
    assert all(None not in baseline.layouts[name] for name in ("w1", "w2", "w1.new", "w2.new"))
    assert total_bytes(graph, search(graph, MESH)) <= total_bytes(graph, baseline)


@pytest.mark.parametrize("name", BASELINES)
@pytest.mark.parametrize("shape", [(2, 2, 2), (3, 2)])
def test_sizes_that_do_not_divide_lose_to_no_baseline(name, shape):
    graph, mesh = mlp(23, 17, 29, 19), make_mesh(shape)
    assert total_bytes(graph, search(graph, mesh)) <= total_bytes(
        graph, BASELINES[name](graph, mesh)
    )


def test_an_even_cut_that_no_mesh_has_is_compared_too(monkeypatch):
    """Where recursion finds nothing good, what `equal-chop` and the others choose is taken."""
    graph, mesh = mlp(23, 17, 29, 19), make_mesh((2, 2, 2))
    monkeypatch.setattr(search_module, "best_state", _poor)
    found = search_module.find_sharding(graph, mesh)
    least = min(total_bytes(graph, choose(graph, mesh)) for choose in BASELINES.values())
    assert found.cost == total_bytes(graph, found.sharding) <= least


def _poor(tables):
    """The worst of what is allowed at each axis."""

    class Backwards(BytesObjective):
        def communication(self, requests):
            return [-values for values in BytesObjective.communication(self, requests)]

    state = recursive_search(CostTables(tables.problem, Backwards(), tables.axis_sizes)).state
    return solve(tables, state, ())._replace(is_exact=False)


def test_equal_chop_cuts_along_several_axes_what_no_dim_is_long_enough_for() -> None:
    """3 x 3 on four devices: whole on one axis, which moves nothing and takes all the memory."""
    graph = matmul(3, 3, 3)
    found = BASELINES["equal-chop"](graph, MESH)
    assert found.mesh.shape == (2, 2)
    assert all(None not in layout for layout in found.layouts.values())
    assert BASELINES["equal-chop"](matmul(4, 4, 4), MESH).mesh.shape == (4,)
