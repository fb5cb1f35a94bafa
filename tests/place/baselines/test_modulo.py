"""Modulo schedules of stages: pipelines by hand, and what experts' schedules reach."""

import dataclasses
import itertools

import numpy as np
import pytest

from pardnn.cost.costs import graph_costs
from pardnn.errors import InfeasibleError
from pardnn.place.baselines.modulo import has_pieces, place_modulo
from pardnn.place.ordering import order_search
from pardnn.place.ordering.pieces import piece_by_piece, pieces_of
from pardnn.plan.check import plan_problems
from pardnn.plan.plan import plan_from_arrays
from pardnn.planner.options import PlanOptions
from pardnn.planner.problem import Problem
from pardnn.planner.search.portfolio import decide
from pardnn.sim.engine import simulate
from testbed.hand_graphs import ACTIVATION, StageTimes, pipeline, pipeline_cluster
from tests.place.machines import machine_for
from tests.strategies import FAMILIES, random_graph


def planned(devices: int, microbatches: int, cap: float, **options) -> float:
    graph, cluster = pipeline(devices, microbatches, **options), pipeline_cluster(devices, cap)
    machine = machine_for(graph, cluster)
    plan = place_modulo(graph, machine, [round(cap * ACTIVATION)] * devices).plan
    assert plan_problems(graph, plan_from_arrays(graph, plan), cluster) == []
    return simulate(graph, machine, plan).makespan


def test_pieces_are_the_microbatches() -> None:
    graph = pipeline(2, 5, chunks=2, scales=[1, 2, 3, 4])
    pieces = pieces_of(graph, graph_costs(graph).seconds["accelerator"])
    assert pieces is not None
    assert pieces.count == 5
    for op, piece, model in zip(graph.ops, pieces.piece, pieces.model, strict=True):
        name, _, number = op.name.partition(".")
        assert piece == (int(number) if number else -1)
        assert graph.ops[model].name == (f"{name}.0" if number else name)
    assert (piece_by_piece(graph, pieces)[graph.arrays.topological] == np.arange(64)).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_most_graphs_have_no_pieces(family: str) -> None:
    graph = random_graph(3, 30, family)
    pieces = pieces_of(graph, graph_costs(graph).seconds["accelerator"])
    assert pieces is None or pieces.count > 1


@pytest.mark.jit
def test_stages_that_no_link_joins_are_left_out() -> None:
    graph = pipeline(2, 4)
    cluster = dataclasses.replace(pipeline_cluster(2, 4), links=(), default_link=None)
    plan = place_modulo(graph, machine_for(graph, cluster), [None, None]).plan
    assert plan_problems(graph, plan_from_arrays(graph, plan), cluster) == []


@pytest.mark.jit
@pytest.mark.parametrize(
    ("chunks", "cap", "optimum", "gap"),
    [
        (1, 2, 41, 0), (1, 4, 27, 0), (1, 8, 27, 0),
        (2, 2, 29.5, 0), (2, 3, 26.5, 1), (2, 4, 25.5, 0),
    ],
)  # fmt: skip
def test_the_proven_optima(
    chunks: int, cap: float, optimum: float, gap: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By CP-SAT: 4 devices, 8 microbatches, stages fixed there and back, microbatches in order."""
    monkeypatch.setattr(order_search, "WORK", 150_000)
    assert optimum <= planned(4, 8, cap, chunks=chunks) <= optimum + gap


@pytest.mark.jit
def test_a_pipeline_of_unlike_stages_and_slow_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order_search, "WORK", 0)
    times = StageTimes(1.0, 1.2, 0.8)
    graph = pipeline(3, 7, chunks=2, times=times, scales=[1, 1.5, 1, 0.5, 1, 1], message_bytes=64)
    cluster = pipeline_cluster(3, 3, latency=0.05)
    assert has_pieces(graph, machine_for(graph, cluster))
    problem = Problem(graph, cluster, graph_costs(graph), PlanOptions(reserve=0.0))
    found = {name: decide(problem, name).makespan_s for name in ("pardnn", "modulo")}
    assert found["modulo"] < found["pardnn"]


@pytest.mark.jit
def test_less_than_a_piece_is_refused() -> None:
    with pytest.raises(InfeasibleError):
        planned(2, 3, 0.5)


def optimum(devices: int, microbatches: int, cap: int) -> int:
    """The makespan of a unit pipeline, one stage per device, by exhaustion over what is done.

    A state has how many forwards, input and weight gradients each device has run. Microbatches are
    alike, so each device takes them in order.
    """

    def may(state: tuple[int, ...], d: int) -> list[int]:
        forward, backward, weight = state[3 * d : 3 * d + 3]
        above = forward if d == devices - 1 else state[3 * d + 4]
        before = microbatches if d == 0 else state[3 * d - 3]
        ready = forward < before and forward - weight < cap
        return [
            -1,
            *[0] * ready,
            *[1] * (backward < min(above, forward)),
            *[2] * (weight < backward),
        ]

    states, steps = {(0,) * 3 * devices}, 0
    while (microbatches,) * 3 * devices not in states:
        following = set()
        for state in states:
            for ran in itertools.product(*(may(state, d) for d in range(devices))):
                new = list(state)
                for d, op in enumerate(ran):
                    if op >= 0:
                        new[3 * d + op] += 1
                following.add(tuple(new))
        states, steps = following, steps + 1
    return steps


@pytest.mark.jit
@pytest.mark.parametrize("cap", [1, 2, 3])
def test_tiny_pipelines_are_optimal(cap: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order_search, "WORK", 30_000)
    for microbatches in (2, 3, 4):
        least = optimum(2, microbatches, cap)
        assert planned(2, microbatches, cap) == least, microbatches
