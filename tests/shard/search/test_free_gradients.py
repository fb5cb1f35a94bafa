"""Gradients that are laid out unlike their tensors: by hand, and beside trying all by sets."""

from dataclasses import replace
from typing import Any

import pytest

from pardnn.cluster import Cluster
from pardnn.cost.costs import preset_costs
from pardnn.graph.ir import Graph
from pardnn.plan.mesh import make_mesh
from pardnn.shard.search import free_gradients, tofu
from pardnn.shard.search.coarsening import TRAINING, gradient_names, op_calls
from pardnn.shard.search.communication_bytes import total_bytes
from pardnn.shard.search.cost_tables import CostTables, State
from pardnn.shard.search.objective_bytes import BytesObjective
from pardnn.shard.search.problem import make_problem
from pardnn.shard.search.recursion import best_state
from pardnn.shard.search.tofu import SearchResult, find_sharding
from pardnn.shard.sharding import Sharding
from testbed.hand_graphs import Steps, mlp
from testbed.kept_graphs import load
from testbed.naive_bytes import least_bytes, naive_bytes

pytestmark = pytest.mark.jit


def scan(rows: int, inner: int, columns: int) -> Graph:
    """A softmax, whole along rows, whose gradient is a running sum, whole along columns."""
    s = Steps()
    s.source("x", (rows, inner), "input")
    s.source("g", (rows, columns), "input")
    s.source("w", (inner, columns))
    s.mm("h", "x", "w")
    s.call("p", "aten._softmax.default", ["h", 1, False], (rows, columns))
    s.call("dh", "aten.cumsum.default", ["g", 0], (rows, columns), of="p")
    s.mm("dw", s.t("x.t", "x", of="h"), "dh", of="h")
    s.update("w", "dw")
    return s.graph()


def together(name: str) -> str:
    """Classes of what must be cut alike: the weight that is updated, by its gradient."""
    return {"dw": "w", "w.new": "w", "x.t": "x'"}.get(name, name)


def tied_bytes(graph: Graph, shape: tuple[int, ...]) -> float:
    return best_state(CostTables(make_problem(graph, TRAINING), BytesObjective(), shape)).cost


@pytest.mark.parametrize(
    ("sizes", "shape", "tied", "free"),
    [((8, 8, 8), (2,), 160, 128), ((8, 4, 16), (2,), 128, 96), ((8, 8, 8), (2, 2), 304, 256)],
)
def test_a_gradient_is_cut_as_its_own_ops_want_it(monkeypatch, sizes, shape, tied, free) -> None:
    """Elements. 8 x 8 on two: h in rows takes all of w or x, 64, and dh in columns likewise."""
    graph, mesh = scan(*sizes), make_mesh(shape)
    monkeypatch.setattr(tofu, "FEW_FACTORS", 0)  # else a graph this small is not coarsened
    found = find_sharding(graph, mesh)
    assert found.level == TRAINING
    assert tied_bytes(graph, shape) == 4 * tied
    assert found.cost == 4 * free == least_bytes(graph, mesh, together)
    assert found.cost == naive_bytes(graph, found.sharding) == total_bytes(graph, found.sharding)
    assert found.sharding.layouts["h"] != found.sharding.layouts["dh"]


def test_one_device_has_nothing_to_free(monkeypatch) -> None:
    monkeypatch.setattr(tofu, "FEW_FACTORS", 0)
    found = find_sharding(scan(8, 8, 8), make_mesh((1,)))
    assert (found.level, found.cost) == (TRAINING, 0)


def test_gradients_are_freed_under_seconds_within_memory(monkeypatch) -> None:
    graph, cluster = scan(4096, 1024, 16384), Cluster.uniform(2, bandwidth=20e9)
    monkeypatch.setattr(tofu, "FEW_CALLS", 0)

    def found(capacity: float | None = None) -> SearchResult:
        costs = preset_costs(graph, "v100")
        return find_sharding(graph, cluster, "seconds", costs=costs, capacity=capacity)

    free = found()
    assert free.sharding.layouts["h"] != free.sharding.layouts["dh"]
    freeing = tofu.free_gradients
    monkeypatch.setattr(tofu, "free_gradients", lambda *_: None)
    tied = found()
    assert tied.sharding.layouts["h"] == tied.sharding.layouts["dh"]
    assert free.cost < 0.99 * tied.cost
    monkeypatch.setattr(tofu, "free_gradients", freeing)
    for peak, expected in ((2.0, tied), (1.0, free)):  # of what is without ties, at a limit of 1
        estimates = iter([0.0, peak])
        monkeypatch.setattr(tofu, "peak_estimate", lambda *_, found=estimates: next(found))
        assert found(1.0).sharding.layouts == expected.sharding.layouts


def test_what_coarsening_cannot_express_has_no_start() -> None:
    """A chain of element-wise ops has one layout, and equal ops are cut alike."""
    graph = mlp(8, 6, 10, 4)
    problem = make_problem(graph, TRAINING, tied=False)
    sharding = find_sharding(graph, make_mesh((2,))).sharding
    axes = dict(sharding.axes)
    layouts = dict.fromkeys(sharding.layouts, (None,))
    start = free_gradients._start(problem, replace(sharding, layouts=layouts, axes=axes))
    assert start is not None
    assert set(start.layouts) == {(None,)}
    assert start.axes == tuple(axes[factor.ops[0].op.name] for factor in problem.factors)
    apart = replace(sharding, layouts=layouts | {"a": (0,)}, axes=axes)
    assert free_gradients._start(problem, apart) is None


def test_equal_ops_that_are_cut_in_two_ways_have_no_start() -> None:
    s = Steps()
    s.source("x", (4, 6), "input")
    s.source("w", (6, 8))
    for name in ("one", "two"):
        s.mm(name, "x", "w")
    s.call("y", "aten.add.Tensor", ["one", "two"], (4, 8))
    problem = make_problem(s.graph(), TRAINING, tied=False)
    (factor,) = problem.factors
    assert len(factor.ops) == 2
    layouts: dict[str, Any] = dict.fromkeys(problem.tensors, (0,))
    for other, found in (("i", State(((None,), (0,), (0,), (0,)), (("i",),))), ("j", None)):
        axes: dict[str, Any] = {"one": ("i",), "two": (other,), "y": ("i",)}
        assert free_gradients._start(problem, Sharding(make_mesh((2,)), layouts, axes)) == found


def test_above_a_number_of_distinct_ops_gradients_stay_tied(monkeypatch) -> None:
    graph, mesh = scan(8, 4, 16), make_mesh((2,))
    monkeypatch.setattr(tofu, "FEW_FACTORS", 0)
    count = find_sharding(graph, mesh).num_factors
    for most, cost in ((count, 96), (count - 1, 128)):
        monkeypatch.setitem(free_gradients.MOST_FACTORS, "bytes", most)
        assert find_sharding(graph, mesh).cost == 4 * cost


@pytest.mark.parametrize("sizes", [(6, 10, 7, 9), (32, 16, 24, 8), (8, 64, 4, 16)])
@pytest.mark.parametrize("shape", [(2,), (2, 2), (3, 2)])
def test_freeing_loses_nothing(monkeypatch, sizes, shape) -> None:
    graph, mesh = mlp(*sizes), make_mesh(shape)
    monkeypatch.setattr(tofu, "FEW_FACTORS", 0)
    found = find_sharding(graph, mesh)
    assert found.cost <= tied_bytes(graph, shape)
    assert found.cost == total_bytes(graph, found.sharding)


def test_sums_of_gradients_are_gradients_and_updates_are_not() -> None:
    s = Steps()
    s.source("x", (4, 4), "input")
    s.source("w", (4, 4))
    s.mm("y", "x", "w")
    s.mm("one", s.t("x.t", "x", of="y"), "y", of="y")
    s.mm("two", "x.t", "x", of="y")
    s.call("sum", "aten.add.Tensor", ["one", "two"], (4, 4))
    s.call("mixed", "aten.add.Tensor", ["sum", "w"], (4, 4))
    s.update("w", "sum")
    assert gradient_names(op_calls(s.graph())) == {"x.t", "one", "two", "sum"}


@pytest.mark.long
def test_word_rnn_on_four_devices_is_laid_out_with_gradients_apart(monkeypatch) -> None:
    """What the pages say of it: 0.9 % of the seconds, by the threshold that is shipped."""
    graph, cluster = load("word_rnn"), Cluster.preset("p2-k80", 4)
    costs = preset_costs(graph, "k80")
    apart = find_sharding(graph, cluster, "seconds", costs=costs).cost
    monkeypatch.setattr(tofu, "free_gradients", lambda *_: None)
    tied = find_sharding(graph, cluster, "seconds", costs=costs).cost
    assert apart == pytest.approx(0.991 * tied, rel=1e-3)
