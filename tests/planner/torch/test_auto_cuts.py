"""`auto` takes the cut of an expert where that is fastest, and says why it tried one in vain."""

from __future__ import annotations

import contextlib
import functools
import unittest.mock
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import pardnn
from pardnn.backends.torch.capture.capture import capture
from pardnn.cluster import Cluster
from pardnn.errors import InfeasibleError
from pardnn.graph.ir import Graph
from pardnn.plan.file import plan_from_json, plan_to_json
from pardnn.plan.plan import Plan, plan_arrays, planned_graph
from pardnn.planner import problem as planning
from pardnn.planner.algorithms import CUTS, RULES, SHARDED, STAGED
from pardnn.planner.costs import costs_for
from pardnn.planner.options import PlanOptions
from pardnn.planner.problem import Problem
from pardnn.planner.sharded import complete, decide, memory
from pardnn.planner.sharded.least_memory import least_of_partitions, least_peaks
from pardnn.planner.sharded.sharding_seconds import sharding_seconds
from pardnn.shard.search.tofu import TimedSearch
from pardnn.shard.sharding import Sharding
from pardnn.shard.spmd.legalize import legalize
from pardnn.shard.spmd.partitioner import spmd_partition
from pardnn.units import size_texts
from tests.backends.torch import models
from tests.long_cases import long_but

#: Bytes/s and seconds of a link.
NEAR, FAR = (300e9, 1e-6), (5e9, 1e-5)


def perceptron(batch: int, width: int) -> models.Entry:
    torch.manual_seed(0)
    layers = [made for _ in range(3) for made in (nn.Linear(width, width), nn.ReLU())]
    model = nn.Sequential(*layers)

    def step(model, optimizer, x):
        return models.train(model, optimizer, model(x).square().mean())

    return step, (model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(batch, width))


def many_samples() -> models.Entry:
    """Work enough for every device, and small weights: the batch had better be cut."""
    return perceptron(4096, 256)


def few_samples() -> models.Entry:
    return perceptron(3, 3)


@functools.cache
def captured(factory: Callable[[], models.Entry]) -> Graph:
    step, args = factory()
    return capture(step, *args)


@functools.cache
def planned(factory: Callable[[], models.Entry], algorithm: str, near: bool) -> Plan:
    bandwidth, latency = NEAR if near else FAR
    cluster = Cluster.uniform(4, bandwidth=bandwidth, latency=latency)
    return pardnn.plan(captured(factory), cluster, algorithm, reserve=0.0, costs="v100")


def seconds(plan: Plan) -> float:
    assert plan.predicted is not None
    return plan.predicted.makespan_s


def test_a_cut_of_experts_is_taken_where_it_is_fastest() -> None:
    found = planned(many_samples, "auto", True)
    others = [planned(many_samples, name, True) for name in ("tofu", "auto-whole")]
    assert found.algorithm == "data-parallel"
    assert seconds(found) < 0.95 * min(map(seconds, others))
    assert seconds(found) == seconds(planned(many_samples, "data-parallel", True))
    assert {*CUTS, "tofu"} <= {tried.algorithm for tried in found.tried}


@pytest.mark.parametrize(
    ("factory", "near"),
    [
        *((many_samples, near) for near in (True, False)),
        *long_but([(models.mixture, True)], [(models.mixture, near) for near in (True, False)]),
    ],
)
def test_no_cut_of_experts_is_faster(factory: Callable[[], models.Entry], near: bool) -> None:
    best = seconds(planned(factory, "auto", near))
    for name in CUTS:
        if (name, factory) != ("megatron", models.mixture):  # which has no two products in a row
            assert best <= seconds(planned(factory, name, near)), name


@pytest.mark.parametrize("algorithm", ["auto", "auto-whole"])
def test_stages_of_the_whole_batch_are_tried(algorithm: str) -> None:
    cluster = Cluster.uniform(4, bandwidth=NEAR[0], latency=NEAR[1])
    by_period = pardnn.plan(
        captured(many_samples), cluster, algorithm, objective="period", reserve=0.0, costs="v100"
    )
    for plan in (planned(many_samples, algorithm, True), by_period):
        assert {*STAGED} <= {each.algorithm for each in plan.tried}


def test_what_does_not_apply_is_told_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "least_computing", lambda *_: 0.0)  # it would be told instead
    cluster = Cluster.uniform(4, bandwidth=FAR[0], latency=FAR[1])
    plan = pardnn.plan(captured(few_samples), cluster, "auto", reserve=0.0, costs="v100")
    reasons = {tried.algorithm: tried.why for tried in plan.tried if tried.makespan_s is None}
    assert "cannot be cut in 4 pieces" in str(reasons["data-parallel"])
    assert not any("data-parallel" in note for note in plan.notes)
    assert plan_from_json(plan_to_json(plan)).tried == plan.tried


def test_a_cut_whose_work_alone_takes_longer_is_given_up() -> None:
    plan = planned(models.mixture, "auto", True)
    reasons = [tried.why for tried in plan.tried if tried.algorithm in CUTS and tried.why]
    assert any("computes for" in reason for reason in reasons)


@pytest.mark.parametrize(
    ("limit", "value", "why"),
    [("OPTIMISM", 1e9, "it takes an estimated"), ("MOST_WORK", 0, "not tried: the search")],
)
def test_cuts_are_not_made_that_cost_too_much(
    monkeypatch: pytest.MonkeyPatch, limit: str, value: float, why: str
) -> None:
    monkeypatch.setattr(complete, limit, value)
    monkeypatch.setattr(complete, "FEW_LOCAL_OPS", 0)
    cluster = Cluster.uniform(4, bandwidth=NEAR[0], latency=NEAR[1])
    plan = pardnn.plan(captured(many_samples), cluster, "auto", reserve=0.0, costs="v100")
    reasons = {tried.algorithm: str(tried.why) for tried in plan.tried}
    assert all(why in reasons[name] for name in ("tofu", "data-parallel", "zero-3"))
    assert plan.algorithm not in (*CUTS, *RULES)


def test_messages_count_in_the_estimate_of_a_cut() -> None:
    plan = planned(many_samples, "auto", False)
    reasons = {tried.algorithm: str(tried.why) for tried in plan.tried}
    assert "an estimated" in reasons["megatron"]  # near devices compute as long, and it is made


@pytest.mark.parametrize(
    ("ratios", "few", "is_made"),
    [((), 0, True), ((1.5,), 0, False), ((0.9,), 0, True), ((1.5, 0.9, 1.2), 0, True),
     ((1.5,), 20_000, True)],
)  # fmt: skip
def test_cuts_that_were_simulated_say_how_far_estimates_are_off(
    monkeypatch: pytest.MonkeyPatch, ratios: Sequence[float], few: int, is_made: bool
) -> None:
    """Of small graphs most of what is sent may be hidden, whatever other cuts took."""
    graph, cluster = captured(many_samples), Cluster.uniform(4, bandwidth=NEAR[0])
    sharding = SHARDED["zero-1"](graph, cluster)
    problem = Problem(graph, cluster, costs_for(graph, cluster, "v100"), PlanOptions())
    legal = legalize(graph, sharding)
    estimated = sharding_seconds(graph, legal, cluster, problem.costs)
    for ratio in ratios:
        problem.log.note_ratio(ratio)
    partition = unittest.mock.Mock(side_effect=AssertionError)
    monkeypatch.setattr(complete, "spmd_partition", partition)
    monkeypatch.setattr(complete, "FEW_LOCAL_OPS", few)
    sort = AssertionError if is_made else InfeasibleError  # 0.85 of it is above 0.8 and below 0.9
    assert estimated.computing < 0.85 * sum(estimated)
    with pytest.raises(sort):
        complete.plan_of_sharding(problem, sharding, unless_above=0.85 * sum(estimated))


def test_a_cut_that_is_simulated_says_how_far_its_estimate_is_off() -> None:
    graph, cluster = captured(many_samples), Cluster.uniform(4, bandwidth=NEAR[0])
    sharding = SHARDED["zero-1"](graph, cluster)
    problem = Problem(graph, cluster, costs_for(graph, cluster, "v100"), PlanOptions())
    found = complete.plan_of_sharding(problem, sharding, unless_above=1e9)
    legal = legalize(graph, sharding)
    estimated = sharding_seconds(graph, legal, cluster, problem.costs)
    assert problem.log.least_ratio == pytest.approx(found.makespan_s / sum(estimated))


@pytest.mark.parametrize(("below", "count"), [(1e-9, (1, 0)), (None, (2, 1))])
def test_nothing_smaller_is_searched_for_where_the_fastest_cut_is_too_slow(
    monkeypatch: pytest.MonkeyPatch, below: float | None, count: tuple[int, int]
) -> None:
    """Searches for the fewest seconds, and for the fewest bytes."""
    search = unittest.mock.Mock(wraps=SHARDED["tofu"])
    monkeypatch.setitem(decide.SHARDED, "tofu", search)
    within = unittest.mock.Mock(side_effect=TimedSearch.within, autospec=True)
    monkeypatch.setattr(TimedSearch, "within", lambda *given: within(*given))
    graph, cluster = captured(many_samples), Cluster.uniform(4, memory=1 << 30)
    problem = Problem(graph, cluster, costs_for(graph, cluster, "v100"), PlanOptions())
    with contextlib.suppress(InfeasibleError):
        decide.fitting_plans(problem, "tofu", unless_above=below)
    assert (within.call_count, search.call_count) == count


@pytest.mark.parametrize("is_slow", [False, True])
def test_memory_has_no_price_where_the_fewest_bytes_are_too_slow(
    monkeypatch: pytest.MonkeyPatch, is_slow: bool
) -> None:
    """A sharding of the fewest seconds does not fit; what is searched for less memory is slower."""
    tried = list[Any]()

    def completed(problem: Problem, sharding: Sharding, unless_above: float | None) -> Any:
        tried.append(sharding)
        slow = is_slow and len(tried) == 3
        details = {"estimated_s": 1.0} if slow else {memory.PEAK: 1 << 40, "usable_bytes": 1}
        raise InfeasibleError("", details=details)

    priced = unittest.mock.Mock(wraps=SHARDED["tofu"])
    monkeypatch.setattr(decide, "plan_of_sharding", completed)
    monkeypatch.setitem(decide.SHARDED, "tofu", priced)
    graph, cluster = captured(many_samples), Cluster.uniform(4, memory=1 << 30)
    problem = Problem(graph, cluster, costs_for(graph, cluster, "v100"), PlanOptions())
    with pytest.raises(InfeasibleError):
        decide.fitting_plans(problem, "tofu", unless_above=0.5)
    prices = [call.kwargs.get("memory_price") for call in priced.call_args_list]
    assert prices == [None, *([] if is_slow else [4 * each for each in decide.MEMORY_PRICES])]
    assert len(tried) == 2 + len(prices)


@pytest.mark.parametrize("algorithm", ["tofu", "data-parallel", "zero-1"])
def test_what_devices_hold_is_known_before_partitioning(algorithm: str) -> None:
    graph = captured(many_samples)
    legal = legalize(graph, SHARDED[algorithm](graph, Cluster.uniform(4)))
    plan = spmd_partition(graph, legal)
    assert memory.held_bytes(graph, legal) == complete._held(planned_graph(graph, plan), plan)


def ended_under(
    monkeypatch: pytest.MonkeyPatch, limit: int, sort: type[BaseException]
) -> tuple[BaseException, Problem]:
    """Return what ends `data-parallel` on four devices of so many bytes, and what was planned.

    Partitioning ends it with an AssertionError.
    """

    def partitioned(*_: object, **__: object) -> Plan:
        raise AssertionError

    graph, cluster = captured(many_samples), Cluster.uniform(4)
    sharding = SHARDED["data-parallel"](graph, cluster)
    limited = Cluster.uniform(4, memory=limit)
    problem = Problem(graph, limited, costs_for(graph, limited, "v100"), PlanOptions(reserve=0.0))
    monkeypatch.setattr(complete, "spmd_partition", partitioned)
    with pytest.raises(sort) as caught:
        complete.plan_of_sharding(problem, sharding, unless_above=1.0)
    return caught.value, problem


@pytest.mark.parametrize("room", [-1, 0])
def test_a_cut_that_holds_too_much_is_not_partitioned(
    monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    held = 3 * (256 * 256 + 256) * 4  # three layers in single precision, on every device
    monkeypatch.setattr(memory, "least_peaks", lambda *_: [0] * 4)
    sort = InfeasibleError if room < 0 else AssertionError
    error, _ = ended_under(monkeypatch, held + room, sort)
    assert (f"device 0 holds {size_texts(held, held + room)[0]} of parameters" in str(error)) == (
        room < 0
    )


@pytest.mark.parametrize("room", [-1, 0])
def test_a_cut_whose_activations_do_not_fit_is_not_partitioned(
    monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    graph = captured(many_samples)
    legal = legalize(graph, SHARDED["data-parallel"](graph, Cluster.uniform(4)))
    least = memory.held_bytes(graph, legal)[0] + least_peaks(graph, legal)[0]
    sort = InfeasibleError if room < 0 else AssertionError
    error, problem = ended_under(monkeypatch, least + room, sort)
    if room < 0:
        assert isinstance(error, InfeasibleError)
        assert f"device 0 holds {size_texts(least, least + room)[0]} at once, or more" in str(error)
        assert error.details["peak_bytes"] == least
        assert problem.log.partitioned_ops == 0


@pytest.mark.parametrize(("below", "count"), [(1.0, 1), (None, 4)])
def test_a_cut_that_fits_by_no_partition_is_partitioned_once_beside_a_known_plan(
    monkeypatch: pytest.MonkeyPatch, below: float | None, count: int
) -> None:
    """Without one, what comes nearest is wanted for the error."""
    graph = captured(many_samples)
    legal = legalize(graph, SHARDED["zero-3"](graph, Cluster.uniform(4)))
    plan = spmd_partition(graph, legal, reuse=len(graph.ops))
    local = planned_graph(graph, plan)
    least = int(least_of_partitions(local, plan_arrays(local, plan)).max())
    partition = unittest.mock.Mock(wraps=spmd_partition)
    monkeypatch.setattr(complete, "spmd_partition", partition)
    monkeypatch.setattr(complete, "check_least", lambda *_: None)
    monkeypatch.setattr(complete, "goals_of", lambda *_: [1 << 40] * 4)
    limited = Cluster.uniform(4, memory=least - 1)
    problem = Problem(graph, limited, costs_for(graph, limited, "v100"), PlanOptions(reserve=0.0))
    with pytest.raises(InfeasibleError, match="while .* runs; usable"):
        complete.plan_of_sharding(problem, legal, unless_above=below)
    assert partition.call_count == count
