"""Cuts and memory: every tensor is cut, limits are searched for, and advice is by what was asked.

Hand-computed cases: a row of five (experts) on four devices is 1, 1, 1 and 2, another dim of the
tensor divides; sizes below the number of devices are cut along several axes.
"""

import dataclasses
import re

import pytest

import pardnn
from pardnn.api import advice
from pardnn.api.advice import planned
from pardnn.cluster import Cluster
from pardnn.cost.costs import preset_costs
from pardnn.errors import InfeasibleError
from pardnn.graph.build import build_graph
from pardnn.graph.ir import Graph, Op, Tensor
from pardnn.plan.mesh import make_mesh
from pardnn.planner.estimate import limit_tried
from pardnn.planner.options import PlanOptions
from pardnn.planner.problem import Problem
from pardnn.shard.search.baselines import BASELINES, equal_chop
from pardnn.shard.search.communication_bytes import total_bytes
from pardnn.shard.search.recursion import uniform_starts
from pardnn.shard.search.tofu import find_sharding, search
from testbed.hand_graphs import mlp

LIMIT = re.compile(r"--max-memory (\d+)(B|KiB|MiB)")


def experts(tokens: int = 64, width: int = 512) -> Graph:
    """Five experts: one product each, as one batched product."""
    shapes = {"x": (5, tokens, width), "w": (5, width, width), "y": (5, tokens, width)}

    def tensor(name: str) -> Tensor:
        rows, middle, columns = shapes[name]
        size = 4 * rows * middle * columns
        return Tensor(name=name, bytes=size, shape=shapes[name], dtype="float32")

    args = {"args": [{"tensor": "x"}, {"tensor": "w"}]}
    ops = [
        Op(name="x", kind="input", outputs=(tensor("x"),)),
        Op(name="w", kind="parameter", outputs=(tensor("w"),), memory="residual"),
        Op(name="bmm", kind="aten.bmm.default", inputs=("x", "w"), outputs=(tensor("y"),),
           arguments=args),
    ]  # fmt: skip
    return build_graph("experts", ops)


@pytest.fixture
def limits_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Advice tries limits, and neither pieces nor second calls: these take ten times as long."""
    monkeypatch.setattr(advice, "CHEAP_OPS", 0)


def peak(plan: pardnn.Plan) -> int:
    assert plan.predicted is not None
    return max(plan.predicted.peak_bytes)


@pytest.mark.jit
@pytest.mark.parametrize("sizes", [(12, 14, 8, 12), (6, 10, 14, 8)])
def test_tensors_without_a_long_dim_are_cut_along_several_axes(sizes: tuple[int, ...]) -> None:
    """All 16 devices as one axis cut none of these, which moves nothing and holds it all."""
    graph, mesh = mlp(*sizes), make_mesh((2,) * 4)
    found = find_sharding(graph, mesh)
    assert found.sharding.mesh == mesh
    assert found.cost == total_bytes(graph, found.sharding) > 0
    for tensor in (tensor for op in graph.ops for tensor in op.outputs):
        assert None not in found.sharding.layouts[tensor.name], tensor.name
    even = equal_chop(graph, mesh)
    assert all(None not in even.layouts[name] for name in ("w1", "w2", "x", "h", "dw1"))
    assert total_bytes(graph, even) >= found.cost


@pytest.mark.jit
def test_a_step_that_is_cut_takes_its_share_of_memory() -> None:
    graph = mlp(6, 7, 5, 6)
    whole = pardnn.plan(graph, Cluster.uniform(1), "single", costs="k80")
    plans = {
        name: pardnn.plan(graph, Cluster.uniform(8), name, "bytes", costs="k80")
        for name in ("tofu", "zero-3")
    }
    # What is fetched for an op counts: no share of one in 8, but far from all of it.
    assert peak(plans["tofu"]) <= 1.1 * peak(plans["zero-3"])
    assert peak(plans["tofu"]) < 0.6 * peak(whole)


def test_uneven_cuts_are_given_up_where_memory_asks_for_it() -> None:
    """By the five experts nothing moves; one device of four has two of them."""
    graph, cluster = experts(), Cluster.uniform(4)
    free = pardnn.plan(graph, cluster, "tofu", "bytes", costs="k80")
    assert free.predicted is not None
    assert free.predicted.transfer_bytes == 0
    assert peak(free) >= 2 * 4 * 512 * 512
    limit = int(0.85 * peak(free))
    limited = Cluster.uniform(4, memory=limit)
    plan = pardnn.plan(graph, limited, "tofu", "bytes", reserve=0.0, costs="k80")
    assert peak(plan) <= limit
    assert plan.predicted is not None
    assert plan.predicted.transfer_bytes > 0


@pytest.mark.jit
@pytest.mark.usefixtures("limits_alone")
@pytest.mark.parametrize("algorithm", ["tofu", "heft", "auto"])
def test_what_an_error_advises_fits(algorithm: str) -> None:
    graph = experts(32, 64)
    options = PlanOptions(algorithm=algorithm, costs="k80")
    with pytest.raises(InfeasibleError) as error:
        planned(graph, Cluster.uniform(4, memory=10_000), options)
    match = LIMIT.search(error.value.message)
    assert match, error.value.message
    scale = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20}[match[2]]
    limit = int(match[1]) * scale
    assert limit > 10_000
    plan, _ = planned(graph, Cluster.uniform(4, memory=limit), options)
    assert peak(plan) <= 0.9 * limit


def test_a_price_on_memory_is_paid_in_bytes() -> None:
    graph, mesh = experts(), make_mesh((2, 2))
    free, dear = search(graph, mesh), search(graph, mesh, memory_price=256.0)
    assert free.layouts["w"] == (0, 0)
    assert 0 not in dear.layouts["w"]
    assert total_bytes(graph, free) == 0 < total_bytes(graph, dear)


def test_whole_tensors_are_no_start_where_they_could_be_cut(monkeypatch) -> None:
    """Such a start moves nothing, and would pass for the best."""
    kept = []

    def noted(tables):
        starts = uniform_starts(tables)
        if tables.allows_strategy is None:
            kept.extend(starts)
        return starts

    monkeypatch.setattr("pardnn.shard.search.recursion.uniform_starts", noted)
    monkeypatch.setattr("pardnn.shard.search.recursion.is_tractable", lambda *_: False)
    find_sharding(mlp(6, 7, 5, 6), make_mesh((2,) * 3))
    assert kept
    for start in kept:
        assert all(None not in layout for layout in start.state.layouts[1:])


@pytest.mark.jit
@pytest.mark.usefixtures("limits_alone")
def test_every_cut_algorithm_is_advised_by_itself() -> None:
    graph = experts(8, 16)
    for algorithm in ("tofu", *BASELINES):
        options = PlanOptions(algorithm=algorithm, objective="bytes", costs="k80")
        with pytest.raises(InfeasibleError) as error:
            planned(graph, Cluster.uniform(4, memory=1000), options)
        match = LIMIT.search(error.value.message)
        assert match, (algorithm, error.value.message)
        limit = int(match[1]) * {"B": 1, "KiB": 1 << 10}[match[2]]
        limited = dataclasses.replace(Cluster.uniform(4, memory=limit))
        planned(graph, limited, options)


def test_the_limit_that_is_advised_is_what_the_nearest_plan_needs_or_the_next_one() -> None:
    """Needed are 100, then 210 bytes; with a tenth spared, that is a limit of 234."""
    graph = mlp(8, 8, 8, 8)
    cluster = Cluster.uniform(2, memory=50)
    problem = Problem(graph, cluster, preset_costs(graph, "k80"), PlanOptions(reserve=0.1))
    limits: list[int | None] = []

    def tried(limited: Problem) -> tuple[bool, int | None]:
        limits.append(limited.cluster.devices[1].memory)
        return (True, None) if limited.capacities[0] == 210 else (False, 210)

    assert limit_tried(problem, 100, tried) == 234
    assert limits == [112, 234, 173, 203, 218, 226, 230, 232]
    assert limit_tried(problem, None, tried) is None
    assert limit_tried(problem, 100, lambda _: (False, 100)) is None


def test_the_limit_that_is_advised_is_lowered_as_far_as_plans_fit() -> None:
    graph = mlp(8, 8, 8, 8)
    cluster = Cluster.uniform(2, memory=50)
    problem = Problem(graph, cluster, preset_costs(graph, "k80"), PlanOptions(reserve=0.0))
    limits: list[int] = []

    def tried(limited: Problem) -> tuple[bool, int | None]:
        limits.append(limited.cluster.devices[1].memory or 0)
        return limits[-1] >= 855, None

    advised = limit_tried(problem, 1047, tried)
    assert advised is not None
    assert 855 <= advised <= 855 * 65 / 64
    assert advised in limits
    assert limits[:2] == [1047, (1047 + 50) // 2]  # 50 did not fit
