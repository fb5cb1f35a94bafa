"""What a search finds once and asks for again: a cut batch, and the stages of schedules."""

import functools
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from pardnn.backends.torch.capture.capture import capture
from pardnn.cluster import Cluster
from pardnn.cost.costs import preset_costs
from pardnn.graph.ir import Graph
from pardnn.place.recipes.phases import phases_of
from pardnn.place.recipes.pipeline import BALANCES, staged
from pardnn.place.recipes.schedules import SCHEDULES
from pardnn.place.recipes.stages import stages_of
from pardnn.place.recipes.units import units_of
from pardnn.planner.microbatches.in_pieces import problem_in_pieces
from pardnn.planner.options import PlanOptions
from pardnn.planner.problem import Problem
from pardnn.sim.levels import slowest_link
from tests.backends.torch import models


def step(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return models.train(model, optimizer, (model(x) - y).square().mean())


@functools.cache
def graph() -> Graph:
    """Nine layers of equal seconds, the last of which holds most bytes."""
    layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(8)]
    model = nn.Sequential(*layers, nn.Linear(8, 4096))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return capture(step, model, optimizer, torch.empty(8, 8), torch.empty(8, 4096))


def problem() -> Problem:
    costs = preset_costs(graph(), "v100")
    return Problem(graph(), Cluster.uniform(2, bandwidth=1e9), costs, PlanOptions(reserve=0.0))


def test_a_cut_is_kept_for_the_same_accumulators_and_pieces_alone() -> None:
    whole = problem()
    (pieces, each), (same, again) = (problem_in_pieces(whole, 4, n) for n in (None, 4))
    assert same is pieces
    assert again.graph is each.graph
    fresh = problem()
    for count, accumulators, totals in ((4, 1, False), (2, None, False), (4, None, True)):
        found = problem_in_pieces(whole, count, accumulators, totals=totals)[1]
        expected = problem_in_pieces(fresh, count, accumulators, totals=totals)[1]
        assert found.graph.ops == expected.graph.ops
        assert found.graph.ops != each.graph.ops


@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_stages_are_those_of_each_balance_however_often_they_are_asked_for(name: str) -> None:
    _, cut = problem_in_pieces(problem(), 4, 1)
    split, count = cut.step, 2 * SCHEDULES[name].chunks
    phases, byte_seconds = phases_of(split.whole, split.batched), slowest_link(cut.machine)[1]
    expected = [
        units_of(split.whole, split.cut, stages_of(
            split.whole, phases, split.seconds, count,
            byte_seconds=traffic * byte_seconds, memory=memory,
        ))
        for memory, traffic in BALANCES
    ]  # fmt: skip
    for other in ("interleaved-1f1b", "gpipe", name, name):
        found = list(staged(split, cut.machine, other, 2))
    for one, twin in zip(found, expected, strict=True):
        assert all(map(np.array_equal, one, twin))
    assert len({one.stage.tobytes() for one in found[:2]}) == 2
