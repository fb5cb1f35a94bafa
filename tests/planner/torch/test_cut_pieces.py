"""Cuts of every op of a step in pieces: what crosses the links, what devices hold, refusals."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch
from torch import nn

import pardnn
from pardnn.backends.torch.capture.capture import capture
from pardnn.cluster import Cluster
from pardnn.errors import InfeasibleError, UsageError
from pardnn.graph.ir import Graph, Op
from pardnn.place.baselines.single import place_single
from pardnn.plan.check import plan_problems
from pardnn.plan.file import plan_from_json, plan_to_json
from pardnn.plan.plan import Plan
from pardnn.planner.check_cut import check_cut
from pardnn.planner.costs import costs_for
from pardnn.planner.make_plan import best_once
from pardnn.planner.microbatches import cut_pieces
from pardnn.planner.microbatches.cut_pieces import better_cut_pieces
from pardnn.planner.microbatches.in_pieces import problem_in_pieces
from pardnn.planner.options import PlanOptions
from pardnn.planner.outcome import Outcome
from pardnn.planner.problem import Problem
from pardnn.planner.sharded.decide import _shardings
from pardnn.planner.sharded.sharding_seconds import sharding_seconds
from pardnn.shard.spmd.legalize import legalize
from tests.backends.torch import models

WIDTH = 64


def entry() -> models.Entry:
    """Layers without biases: parameters are cut evenly, and no batch tensor is of their size."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh()) for _ in range(4)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    x, y = torch.randn(16, WIDTH), torch.randint(WIDTH, (16,))
    return models.classify_step, (model, optimizer, x, y)


@functools.cache
def graph() -> Graph:
    step, args = entry()
    return capture(step, *args)


@functools.cache
def planned(algorithm: str, pieces: int | str | None, size: int = 2) -> Plan:
    return pardnn.plan(graph(), Cluster.uniform(size), algorithm, reserve=0.0, costs="v100",
                       microbatches=pieces)  # type: ignore[arg-type]  # fmt: skip


PARAMETERS = 4 * WIDTH * WIDTH * 4


def sent(plan: Plan) -> float:
    """Bytes that cross for parameters and gradients, per device, over P (k - 1) / k."""
    assert plan.partition is not None
    sizes = {t.name: t for op in plan.partition.ops for t in op.outputs}
    k = plan.num_devices
    shapes = [sizes[m.tensor].shape or () for m in plan.messages]
    found = [
        sizes[m.tensor].bytes
        for m, shape in zip(plan.messages, shapes, strict=True)
        if len(shape) == 2 and sorted(shape) in (sorted((WIDTH, WIDTH // k)), [WIDTH, WIDTH])
    ]
    return sum(found) / k / (PARAMETERS * (k - 1) / k)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("algorithm", "by_pieces"),
    [
        ("data-parallel", {2: 2, 4: 2}),  # one all-reduce
        ("zero-1", {2: 2, 4: 2}),  # one reduce-scatter, parameters gathered
        ("zero-2", {2: 3, 4: 5}),  # a reduce-scatter of each piece
    ],
)
def test_gradients_cross_once_where_devices_have_room_for_them(
    algorithm: str, by_pieces: dict[int, int], size: int
) -> None:
    for pieces, times in by_pieces.items():
        assert sent(planned(algorithm, pieces, size)) == pytest.approx(times, rel=1e-6), pieces


@pytest.mark.parametrize("algorithm", ["data-parallel", "zero-1", "zero-2", "zero-3", "tofu"])
def test_plans_survive_their_files(algorithm: str) -> None:
    plan = planned(algorithm, 2)
    assert plan.notes[0] == "batch in 2 pieces"
    assert plan.pieces is not None
    assert plan.partition is not None
    again = plan_from_json(plan_to_json(plan))
    assert plan_problems(graph(), again) == []
    check_cut(graph(), again)
    is_adding = algorithm in ("data-parallel", "zero-1")
    assert is_adding == any("Partial()" in words for words in plan.partition.sharding.values())


def test_stage_one_holds_gradients_whole_and_stage_two_parts_of_them() -> None:
    peaks = [planned(a, 4).predicted for a in ("data-parallel", "zero-1", "zero-2", "zero-3")]
    held = [max(peak.peak_bytes) for peak in peaks if peak is not None]
    assert held == sorted(held, reverse=True)
    assert len(set(held)) == len(held)


def test_pieces_hold_fewer_activations() -> None:
    def peak(pieces: int | None) -> int:
        found = pardnn.plan(deep, Cluster.uniform(2), "zero-1", reserve=0.0, costs="v100",
                            microbatches=pieces).predicted  # fmt: skip
        assert found is not None
        return max(found.peak_bytes)

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(6)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(512, 8), torch.randint(8, (512,))
    deep = capture(models.classify_step, model, optimizer, x, y)
    assert peak(8) < 0.5 * peak(None)


def faulty(plan: Plan, old: Op, **changes: object) -> list[str]:
    partition = plan.partition
    assert partition is not None
    ops = tuple(dataclasses.replace(o, **changes) if o is old else o for o in partition.ops)
    partition = dataclasses.replace(partition, ops=ops)
    return plan_problems(graph(), dataclasses.replace(plan, partition=partition, predicted=None))


def test_a_term_that_is_left_out_or_added_twice_is_found() -> None:
    plan = planned("data-parallel", 2)
    assert plan.partition is not None
    total = next(op for op in plan.partition.ops if op.name.endswith(":total@1"))
    assert total.arguments is not None
    how, addends, weights = total.arguments["args"]
    assert len(addends) == 2
    for wrong in (addends[:1], [addends[0], addends[0]], [*addends, addends[1]]):
        names = tuple(dict.fromkeys(each["tensor"] for each in wrong))
        arguments = {**total.arguments, "args": [how, wrong, weights]}
        problems = faulty(plan, total, inputs=names, arguments=arguments)
        assert any("does not add up one term" in problem for problem in problems), problems


@pytest.mark.parametrize(
    ("end", "message"), [(":total@0", "which is not a sum"), ("", "not a sum")]
)
def test_terms_of_what_is_no_sum_are_found(end: str, message: str) -> None:
    """A gradient that the optimizer reads, and a parameter."""
    plan = planned("data-parallel", 2)
    assert plan.partition is not None
    of = [op for op in plan.partition.ops if op.name.endswith(end) and (end or op.is_source)]
    name = next(op for op in of if op.kind != "input").outputs[0].name.rpartition("@")[0]
    sharding = {**plan.partition.sharding, name: ("Partial()",)}
    spoilt = dataclasses.replace(plan.partition, sharding=sharding)
    problems = plan_problems(graph(), dataclasses.replace(plan, partition=spoilt, predicted=None))
    assert any(message in problem for problem in problems), problems


def test_pieces_of_fewer_samples_than_devices_are_refused() -> None:
    with pytest.raises(UsageError, match="at most 4") as caught:
        planned("zero-1", 8, 4)
    assert caught.value.code == "E226"
    planned("zero-1", 4, 4)
    assert planned("zero-1", "auto", 4).algorithm == "zero-1"  # 8 pieces end the search


@functools.cache
def head() -> Graph:
    """One layer that tells many classes apart: its scores are of a whole batch, or of a piece."""
    model = nn.Linear(16, 4096, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(64, 16), torch.randint(4096, (64,))
    return capture(models.classify_step, model, optimizer, x, y)


def of_head(algorithm: str, pieces: int | None, limit: str) -> Plan:
    cluster = Cluster.uniform(2, memory=limit, latency=1e-6)
    return pardnn.plan(head(), cluster, algorithm, reserve=0.0, costs="v100", microbatches=pieces)


def test_auto_cuts_pieces_where_no_placement_of_them_fits() -> None:
    limit = "1500KiB"
    for algorithm, pieces in (("auto", None), ("auto-whole", 2)):
        with pytest.raises(InfeasibleError, match="The closest found needs"):
            of_head(algorithm, pieces, limit)
    plan = of_head("auto", 2, limit)
    assert plan.partition is not None
    assert plan.notes[0] == "batch in 2 pieces"
    check_cut(head(), plan)


def test_auto_tries_cuts_in_pieces_that_had_no_room_as_a_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Beside a slower plan, of as few pieces as fit; not beside one that is faster."""
    tried: list[tuple[int, str]] = []
    monkeypatch.setattr(cut_pieces, "_check_samples", lambda _, n, names: tried.append((n, *names)))
    cluster = Cluster.uniform(2, memory="1000KiB", latency=1e-6)
    options = PlanOptions(costs="v100", reserve=0.0, microbatches="auto")
    problem = Problem(head(), cluster, costs_for(head(), cluster, "v100"), options)
    alone = place_single(head(), problem.machine, [None, None]).plan
    slow = Outcome("slow", alone, 0, 1.0, 0, 0.0)
    unchanged = better_cut_pieces(problem, slow, best_once)  # no cut of the whole batch lacks room
    assert unchanged is not None
    assert unchanged.algorithm == "slow"
    assert not tried
    problem.log.without_room.update(("zero-1", "zero-3"))
    better = better_cut_pieces(problem, slow, best_once)
    assert better is not None
    assert better.algorithm == "zero-1"
    assert tried == [(2, "zero-1"), (2, "zero-3"), (4, "zero-1"), (4, "zero-3")]
    fast = slow._replace(makespan_s=0.9 * better.makespan_s)
    unchanged = better_cut_pieces(problem, fast, best_once)
    assert unchanged is not None
    assert unchanged.algorithm == "slow"


def test_an_estimate_counts_what_is_added_up_where_it_is_for_nothing() -> None:
    """Gradients of four pieces: stage 2 reduces each, stage 1 their sum."""
    cluster = Cluster.uniform(2)
    costs = costs_for(graph(), cluster, "v100")
    problem = Problem(graph(), cluster, costs, PlanOptions(costs="v100", microbatches=4))
    seconds = {}
    for name, totals in (("zero-1", True), ("zero-2", False)):
        _, inner = problem_in_pieces(problem, 4, None, totals=totals)
        (sharding,) = _shardings(inner, name)
        legal = legalize(inner.graph, sharding)
        seconds[name] = sharding_seconds(inner.graph, legal, cluster, inner.costs).sending
    assert 0 < seconds["zero-1"] < 0.6 * seconds["zero-2"]
