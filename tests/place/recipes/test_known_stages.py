"""Stages of a whole step are those of any number of its pieces."""

import pytest

from pardnn.cluster import Cluster
from pardnn.cost.costs import graph_costs
from pardnn.place.recipes import pipeline
from pardnn.place.recipes.pipeline import CutStep, staged
from pardnn.planner.problem import Problem
from testbed.small_graphs import small_case


def test_stages_are_found_once_for_all_numbers_of_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, _ = small_case(0, seed=0)
    problem = Problem(graph, Cluster.uniform(2), graph_costs(graph))
    step, machine = problem.step, problem.machine
    found = [units.stage.tolist() for units in staged(step, machine, "1f1b", 2)]
    again = CutStep(graph, step.seconds, graph, frozenset(), 4, step.stages)
    other = CutStep(graph, step.seconds, graph, frozenset({"t0"}), 4, step.stages)

    def asked(*_: object, **__: object) -> None:
        raise AssertionError("asked again")

    monkeypatch.setattr(pipeline, "stages_of", asked)
    assert [units.stage.tolist() for units in staged(again, machine, "1f1b", 2)] == found
    with pytest.raises(AssertionError, match="asked again"):  # other phases
        list(staged(other, machine, "1f1b", 2))
