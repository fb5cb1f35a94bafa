"""What the recursion alone would miss: beam, polish and the uniform start each find an optimum.

Chains of products, none of which the joint search may choose all axes of together. Without the part
that a case is for, the search ends at the larger number.
"""

import pytest

from pardnn.plan.mesh import make_mesh
from pardnn.shard.search import recursion
from pardnn.shard.search.coarsening import NEEDED, REPEATED, TRAINING, op_calls
from pardnn.shard.search.cost_tables import CostTables
from pardnn.shard.search.objective_bytes import BytesObjective
from pardnn.shard.search.problem import make_problem
from pardnn.shard.search.tofu import find_sharding
from pardnn.shard.sharding import FixedLayouts
from pardnn.time_limit import OutOfTimeError, time_limit
from testbed.hand_graphs import chain
from testbed.naive_bytes import least_bytes, naive_bytes

#: Under the hook that checks shapes each of these takes seconds.
pytestmark = pytest.mark.jit


def _tables(sizes: tuple[int, ...], shape: tuple[int, ...]) -> CostTables:
    return CostTables(make_problem(chain(*sizes), NEEDED), BytesObjective(), shape)


@pytest.mark.parametrize(
    ("sizes", "shape", "plain", "best"),
    [
        ((6, 6, 4, 4), (2, 2), 100, 88),  # the beam; polish ends at 100, too
        ((12, 8, 4, 8), (2, 2), 176, 160),  # the beam
        ((6, 12, 12, 4), (2, 2), 252, 216),  # polish; the beam ends at 252
        ((16, 4, 4, 20), (2, 2), 224, 192),  # polish
        ((20, 4, 4, 12), (2, 2, 2), 376, 336),  # polish; the uniform start ends at 360
        ((4, 20, 6, 8), (2, 2, 2), 268, 256),  # the uniform start; beam and polish end at 268
    ],
)
def test_the_optimum_is_found_axis_by_axis(monkeypatch, sizes, shape, plain, best) -> None:
    """Elements; on four devices `best` is also that of trying all layouts."""
    monkeypatch.setattr(recursion, "SMALL_STRATEGIES", 0)
    assert recursion.recursive_search(_tables(sizes, shape)).cost == 4 * plain
    assert recursion.best_state(_tables(sizes, shape)).cost == 4 * best
    if len(shape) == 2:
        assert least_bytes(chain(*sizes), make_mesh(shape)) == 4 * best


@pytest.mark.parametrize(
    ("sizes", "axes", "flat"), [((33, 2, 2, 7), 54, 42), ((2, 3, 4, 33), 38, 24)]
)
def test_one_axis_is_taken_where_it_moves_less(sizes, axes, flat) -> None:
    """A small tensor, 2 x 2 or 2 x 3, cannot be cut in four: whole it moves nothing."""
    graph, mesh = chain(*sizes), make_mesh((2, 2))
    assert recursion.best_state(_tables(sizes, (2, 2))).cost == 4 * axes
    found = find_sharding(graph, mesh)
    assert found.sharding.mesh.shape == (4,)
    assert found.cost == 4 * flat == naive_bytes(graph, found.sharding)


def test_a_graph_is_coarsened_by_how_many_calls_it_has(monkeypatch) -> None:
    """Two products: none merged up to `few`; repeated ones above four times a number of calls."""
    graph = chain(4, 8, 6, 10)
    calls = op_calls(graph)

    def level(few: int) -> int:
        return recursion.coarse_problem(graph, calls, few)[0]

    monkeypatch.setattr(recursion, "FEW_FACTORS", 0.5)
    assert (level(2), level(1)) == (NEEDED, TRAINING)
    monkeypatch.setattr(recursion, "FEW_FACTORS", 0.25)
    assert (level(2), level(1)) == (NEEDED, REPEATED)


def test_no_choice_is_the_same_at_every_axis_where_there_is_one_or_state_stays() -> None:
    graph, mesh = chain(6, 6, 4, 4), make_mesh((2, 2))
    stays = make_problem(graph, NEEDED, fixed=FixedLayouts(mesh, {"w1": (0, 1)}))
    assert recursion.uniform_starts(CostTables(stays, BytesObjective(), (2, 2))) == []
    assert recursion.uniform_starts(_tables((6, 6, 4, 4), (2,))) == []
    assert len(recursion.uniform_starts(_tables((6, 6, 4, 4), (2, 2)))) == 1


def test_a_table_of_strategies_is_begun_only_within_the_time() -> None:
    """Also of an op whose cuts are known from other tables: to combine them may take seconds."""
    known, tables = (_tables((6, 6, 4, 4), (2, 2)) for _ in range(2))
    factor = tables.problem.factors[0]
    known.strategies(factor, (None, None), (0, 1))
    with time_limit(-1.0):
        known.strategies(factor, (None, None), (0, 1))
        with pytest.raises(OutOfTimeError):
            tables.strategies(factor, (None, None), (0, 1))
