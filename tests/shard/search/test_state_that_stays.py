"""State that stays where it lies: what is chosen around it, and the order of mesh axes."""

import math
from typing import Any

import pytest

from pardnn.cluster import Cluster
from pardnn.cost.costs import preset_costs
from pardnn.errors import UsageError
from pardnn.graph.ir import LOSS_KIND, Graph, Op
from pardnn.plan.mesh import make_mesh
from pardnn.shard.search import recursion
from pardnn.shard.search.baselines import BASELINES
from pardnn.shard.search.coarsening import NEEDED, TRAINING
from pardnn.shard.search.cost_tables import CostTables
from pardnn.shard.search.objective_bytes import BytesObjective
from pardnn.shard.search.objective_seconds import seconds_objective
from pardnn.shard.search.problem import make_problem
from pardnn.shard.search.recursion import polished, recursive_search
from pardnn.shard.search.tofu import find_sharding
from pardnn.shard.sharding import FixedLayouts
from testbed.hand_graphs import Steps, chain, mlp
from testbed.naive_bytes import naive_bytes
from tests.shard.search.test_dynamic_program import empty, least

pytestmark = pytest.mark.jit

Layouts = dict[str, tuple[int | None, ...]]
CASES: list[tuple[Graph, tuple[int, ...], Layouts]] = [
    (mlp(12, 8, 16, 4), (2, 2), {"w1": (1, 0), "w2": (None, 0)}),
    (mlp(7, 5, 9, 3), (3,), {"w2": (None,)}),
    (chain(6, 12, 4, 8, 6), (2,), {"w1": (0,), "w3": (1,)}),
    (mlp(6, 4, 8, 6), (4,), {"w1": (0,)}),
]


@pytest.mark.parametrize("number", range(len(CASES)))
def test_what_is_chosen_leaves_state_where_it_lies(number: int) -> None:
    """Whole where it is held whole: then its update, too, is computed whole, on every device."""
    graph, shape, layouts = CASES[number]
    fixed = FixedLayouts(make_mesh(shape), layouts)
    found = find_sharding(graph, fixed.mesh, fixed=fixed)
    cluster = Cluster.uniform(fixed.mesh.size)
    timed = find_sharding(graph, cluster, "seconds", costs=preset_costs(graph, "k80"), fixed=fixed)
    shardings = [found.sharding, timed.sharding]
    for name, choose in BASELINES.items():
        if name == "equal-chop" and len(shape) > 1:
            with pytest.raises(UsageError) as error:
                choose(graph, fixed)
            assert error.value.code == "E225"
            continue
        shardings.append(choose(graph, fixed))
        assert found.cost <= naive_bytes(graph, shardings[-1])
    for sharding in shardings:
        assert sharding.mesh == fixed.mesh
        for name, layout in layouts.items():
            assert sharding.layouts[name] == layout
            assert sharding.layouts.get(f"{name}.new", layout) == layout
            if layout == (None,) * len(shape) and f"{name}.new" in sharding.axes:
                assert sharding.axes[f"{name}.new"] == layout
    tables = CostTables(make_problem(graph, NEEDED, fixed=fixed), BytesObjective(), shape)
    if math.prod(shape) < 4:
        axes = tuple(range(len(shape)))
        assert found.cost == least(tables, empty(tables, len(shape)), axes)
    assert found.cost == naive_bytes(graph, found.sharding) < math.inf


def test_a_dim_that_later_axes_need_is_not_cut_before() -> None:
    """Two rows lie on the second axis: the first can but cut columns, or nothing."""
    fixed = FixedLayouts(make_mesh((2, 2)), {"w1": (-1, 0)})
    problem = make_problem(mlp(8, 2, 6, 4), NEEDED, fixed=fixed)
    tables = CostTables(problem, BytesObjective(), (2, 2))
    variable = problem.variables[problem.numbers["w1"]]
    assert tables.layouts(variable, (None,), [0]) == ((1,), (None,))
    assert tables.layouts(variable, (1, None), [1]) == ((1, 0),)


def test_every_op_has_loops_also_what_is_no_call() -> None:
    s = Steps()
    s.source("x", (4, 6), "input")
    s.call("total", "aten.sum.default", ["x"], ())
    s.ops.append(Op(name="loss", kind=LOSS_KIND, inputs=("total",)))
    found = find_sharding(s.graph(), make_mesh((2,)))
    assert set(found.sharding.axes) == {"total", "loss"}
    assert found.sharding.axes["loss"] == (None,)


def _tables(sizes: tuple[int, ...], shape: tuple[int, ...], layouts: Any = None) -> CostTables:
    fixed = FixedLayouts(make_mesh(shape), layouts) if layouts else None
    return CostTables(make_problem(mlp(*sizes), TRAINING, fixed=fixed), BytesObjective(), shape)


@pytest.mark.parametrize("sizes", [(8, 4, 32, 16), (8, 32, 4, 16), (32, 8, 8, 4), (16, 4, 4, 32)])
@pytest.mark.parametrize("layouts", [{"w1": (1, 0)}, {"w1": (0, 1)}, {"w2": (1, 0)}])
def test_polish_leaves_state_where_it_lies(sizes: tuple[int, ...], layouts: Layouts) -> None:
    """Rows on one axis and columns on the other: these axes are not alike."""
    tables = _tables(sizes, (2, 2), layouts)
    found = polished(tables, recursive_search(tables))
    problem = tables.problem
    for name, layout in layouts.items():
        assert problem.layout(name, found.state.layouts) == layout


def test_an_axis_that_is_opened_comes_last_where_axes_are_alike() -> None:
    """Two that are opened together keep their places, as do unlike ones, and fixed state."""
    alike, odd = _tables((8, 4, 8, 4), (2, 2, 2)), _tables((8, 4, 8, 4), (2, 3, 2))
    order, opened = recursion._brought_last(alike, [0])
    assert (list(order), list(opened)) == ([1, 2, 0], [2])
    order, opened = recursion._brought_last(alike, [2])
    assert (list(order), list(opened)) == ([0, 1, 2], [2])
    held = _tables((8, 4, 8, 4), (2, 2, 2), {"w1": (0, 1, -1)})
    graph, cluster = mlp(8, 4, 8, 4), Cluster.uniform(8)
    timed = seconds_objective(graph, alike.problem, cluster, preset_costs(graph, "k80"))
    unlike = CostTables(alike.problem, timed, (2, 2, 2))  # by seconds each axis has its links
    for tables, window in ((alike, [0, 1]), (odd, [0]), (held, [0]), (unlike, [0])):
        order, opened = recursion._brought_last(tables, window)
        assert (list(order), list(opened)) == ([0, 1, 2], window)
