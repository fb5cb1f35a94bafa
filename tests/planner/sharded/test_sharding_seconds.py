"""The estimate of a sharding: computing as of its partitioned graph, messages counted by hand."""

import dataclasses
import unittest.mock

import numpy as np
import pytest

from pardnn.cluster import Cluster, Device, Link
from pardnn.cost.costs import preset_costs
from pardnn.errors import InfeasibleError
from pardnn.graph.build import build_graph
from pardnn.plan.mesh import Layout, make_mesh
from pardnn.plan.plan import planned_graph
from pardnn.planner.algorithms import SHARDED
from pardnn.planner.costs import scaled_costs
from pardnn.planner.problem import Problem
from pardnn.planner.sharded import decide
from pardnn.planner.sharded.sharding_seconds import least_computing, sharding_seconds
from pardnn.shard.search.objective_seconds import exchange_seconds
from pardnn.shard.search.tofu import search
from pardnn.shard.sharding import Sharding
from pardnn.shard.spmd.legalize import legalize
from pardnn.shard.spmd.partitioner import spmd_partition
from testbed.hand_graphs import Steps, matmul, mlp

LATENCY, BANDWIDTH = 1e-3, 1e6


def estimated(graph, sharding, link_model="independent", costs="a100"):
    cluster = Cluster.uniform(sharding.mesh.size, bandwidth=BANDWIDTH, latency=LATENCY)
    cluster = dataclasses.replace(cluster, link_model=link_model)
    return sharding_seconds(graph, sharding, cluster, preset_costs(graph, costs))


@pytest.mark.parametrize(("size", "costs"), [(2, "a100"), (4, "a100"), (2, "k80"), (2, "cpu")])
def test_computing_is_that_of_the_slowest_device(size, costs):
    graph = mlp(2048, 512, 1030, 512)  # 1030: unlike parts
    legal = legalize(graph, search(graph, Cluster.uniform(size)))
    plan = spmd_partition(graph, legal)
    local = planned_graph(graph, plan)
    seconds = preset_costs(local, costs).on("accelerator", 1.0)
    busy = np.zeros(size)
    for op, each in zip(local.ops, seconds.tolist(), strict=True):
        if not op.kind.startswith("pardnn."):
            busy[plan.placement[op.name]] += each
    assert estimated(graph, legal, costs=costs).computing == pytest.approx(busy.max(), rel=1e-12)


@pytest.mark.parametrize("algorithm", ["tofu", "equal-chop", "zero-3", "spartan"])
@pytest.mark.parametrize(("size", "costs"), [(2, "a100"), (8, "h100"), (4, "k80"), (2, "cpu")])
def test_no_cut_computes_for_less_than_its_bound(algorithm, size, costs):
    graph, cluster = mlp(2048, 512, 1024, 512), Cluster.uniform(size)
    legal = legalize(graph, SHARDED[algorithm](graph, cluster))
    least = least_computing(graph, cluster, preset_costs(graph, costs))
    computing = estimated(graph, legal, costs=costs).computing
    assert 0.3 * computing < least <= computing * (1 + 1e-12)


def test_unlike_devices_and_other_costs_have_no_such_bound():
    graph = mlp(64, 32, 32, 16)
    devices = (Device(name="a"), Device(name="b", speed=2.0))
    unlike = Cluster(devices=devices, links=(Link(source="a", target="b", bandwidth=1e9),))
    costs = preset_costs(graph, "a100")
    assert least_computing(graph, unlike, costs) == 0
    measured = dataclasses.replace(costs, source="measured", timed_on="a100")
    assert least_computing(graph, Cluster.uniform(2), measured) == 0


@pytest.mark.parametrize("times", [1.0, 1.1])
def test_no_cut_is_searched_for_that_cannot_be_faster_than_a_known_plan(times, monkeypatch):
    graph, cluster = mlp(64, 32, 32, 16), Cluster.uniform(2)
    problem = Problem(graph, cluster, preset_costs(graph, "a100"))
    monkeypatch.setattr(decide, "fitting_plans", unittest.mock.Mock(side_effect=AssertionError))
    with pytest.raises(InfeasibleError if times == 1 else AssertionError):
        decide.decide_sharded(problem, "tofu", unless_above=times * problem.least_cut_s)


@pytest.mark.parametrize("timed_on", ["cpu", "k80"])
def test_measured_seconds_are_scaled_by_the_device_that_they_were_measured_on(timed_on):
    graph = mlp(2048, 512, 1024, 512)
    local = planned_graph(
        graph, spmd_partition(graph, legalize(graph, search(graph, Cluster.uniform(2))))
    )
    costs = dataclasses.replace(preset_costs(graph, timed_on), source="measured", timed_on=timed_on)
    scaled = scaled_costs(graph, costs, local).on("accelerator", 1.0)
    expected = preset_costs(local, timed_on).on("accelerator", 1.0)
    calls = [not op.kind.startswith("pardnn.") for op in local.ops]
    assert scaled[calls] == pytest.approx(expected[calls], rel=1e-9)


def test_a_region_is_fetched_from_each_owner_at_once_or_in_turn():
    layouts = {"x": (0,), "w": (0,), "y": (0,)}  # three quarters of w come from three devices
    sharding = Sharding(make_mesh((4,)), layouts, {"y": ("i",)})
    graph, one = matmul(8, 16, 4), LATENCY + 16 * 4 * 4 / 4 / BANDWIDTH
    assert estimated(graph, sharding).sending == pytest.approx(one)
    assert estimated(graph, sharding, "serial").sending == pytest.approx(3 * one)


def test_partial_results_are_sent_to_their_owners():
    layouts = {"x": (1,), "w": (0,), "y": (0,)}
    sharding = Sharding(make_mesh((2,)), layouts, {"y": ("k",)})
    assert estimated(matmul(8, 4, 6), sharding).sending == pytest.approx(
        LATENCY + 4 * 6 * 4 / BANDWIDTH
    )


def test_what_is_whole_sends_nothing():
    sharding = Sharding(make_mesh((2,)), dict.fromkeys("xwy", (None,)), {"y": (None,)})
    assert estimated(matmul(8, 4, 6), sharding).sending == 0


def test_a_region_that_two_ops_need_is_fetched_once():
    steps = Steps()
    for name in ("x1", "x2"):
        steps.source(name, (8, 16), "input")
    steps.source("w", (16, 4))
    steps.mm("y1", "x1", "w")
    steps.mm("y2", "x2", "w")
    layouts: dict[str, Layout] = dict.fromkeys(("x1", "x2", "w", "y1", "y2"), (0,))
    axes = ("i",)
    sharding = Sharding(make_mesh((2,)), layouts, {"y1": axes, "y2": axes})
    once = LATENCY + 16 * 4 * 4 / 2 / BANDWIDTH
    assert estimated(steps.graph(), sharding).sending == pytest.approx(once)


def test_messages_to_one_device_follow_each_other_where_links_are_serial():
    sent = np.array([[[0, 8, 6], [0, 0, 0], [0, 2.0, 0]]])  # by receiver and sender
    latency, bandwidth = np.ones((3, 3)), np.full((3, 3), 2.0)
    assert exchange_seconds(sent, latency, bandwidth, is_serial=False).tolist() == [5.0]
    assert exchange_seconds(sent, latency, bandwidth, is_serial=True).tolist() == [9.0]


@pytest.mark.parametrize("size", [1, 2, 8])
def test_random_ops_whose_loops_cannot_be_cut_are_left_whole(size):
    """Of a plan to start from, say, that was made for other devices."""
    steps = Steps()
    steps.source("x", (4, 4))
    steps.call("empty", "aten.empty_like.default", ["x"], (4, 4))
    steps.call("mask", "aten.bernoulli_.float", ["empty", 0.5], (4, 4), alias="empty")
    graph = steps.graph()
    axes = {op.name: ("i0",) for op in graph.ops if not op.is_source}
    sharding = Sharding(make_mesh((size,)), dict.fromkeys(("x", "empty", "mask"), (0,)), axes)
    legal = legalize(graph, sharding)
    assert legal.axes["mask"] == (("i0",) if size in (2, 4) else (None,))
    assert estimated(graph, legal).computing > 0


def test_a_storage_whose_shapes_do_not_agree_is_left_whole_and_no_search_goes_on_for_ever():
    steps = Steps()
    steps.source("x", (4, 4))
    steps.call("empty", "aten.empty_like.default", ["x"], (4, 4))
    steps.call("mask", "aten.bernoulli_.float", ["empty", 0.5], (4, 4), alias="empty")
    ops = list(steps.ops)
    bare = dataclasses.replace(ops[1].outputs[0], shape=None)  # as a file may leave it out
    ops[1] = dataclasses.replace(ops[1], outputs=(bare,))
    graph = build_graph("without a shape", ops)
    legal = legalize(graph, search(graph, Cluster.uniform(2)))
    assert {legal.layouts[name] for name in ("empty", "mask")} == {(None,)}
