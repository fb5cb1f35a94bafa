"""Recipes on captured steps: they run in their schedules' orders, and keep their promises."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from pardnn.backends.torch.capture.capture import capture_step
from pardnn.cluster import Cluster
from pardnn.cost.costs import preset_costs
from pardnn.errors import InfeasibleError, UsageError
from pardnn.graph.ir import Graph
from pardnn.place.recipes.schedules import SCHEDULES
from pardnn.plan.check import plan_problems
from pardnn.plan.plan import Plan
from pardnn.planner.algorithms import RECIPES
from pardnn.planner.make_plan import make_plan
from pardnn.planner.microbatches.decide import decide_microbatched
from pardnn.planner.options import PlanOptions
from pardnn.planner.outcome import Outcome
from pardnn.planner.problem import Problem
from pardnn.planner.search.portfolio import decide, decide_best
from pardnn.report.results import PlanResult
from tests.place.recipes.torch.test_stages import captured


def planned(
    graph: Graph, algorithm: str, *, memory: str | None = None, pieces: int = 4, devices: int = 2
) -> tuple[Plan, PlanResult]:
    cluster = Cluster.uniform(devices, memory=memory, bandwidth=300e9)
    options = PlanOptions(algorithm=algorithm, microbatches=pieces, reserve=0.0, costs="v100")
    return make_plan(Problem(graph, cluster, preset_costs(graph, "v100"), options))


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_a_plan_whose_devices_run_units_in_its_order(name: str) -> None:
    graph = captured("unet")
    plan, _ = planned(graph, name)
    assert plan_problems(graph, plan) == []
    rows = SCHEDULES[name].rows(2, 4)
    forward = [f"convolution_{i}@{piece}" for i in range(1, 4) for piece in range(4)]
    for d, row in enumerate(rows):
        mine = [op for op in plan.order[d] if op in forward]
        pieces = [int(op.rpartition("@")[2]) for op in mine]
        units = [unit.piece for unit in row if unit.what == "F"]
        assert [p for i, p in enumerate(pieces) if i == 0 or pieces[i - 1] != p] in (
            units, list(dict.fromkeys(units)), [],
        )  # fmt: skip


@pytest.mark.long
def test_less_memory_than_gpipes_is_enough_for_1f1b() -> None:
    graph = captured("gpt2")
    peaks = {name: max(planned(graph, name)[1].peak_bytes) for name in ("gpipe", "1f1b")}
    assert peaks["1f1b"] < peaks["gpipe"]
    between = f"{(peaks['1f1b'] + peaks['gpipe']) // 2}B"
    plan, _ = planned(graph, "1f1b", memory=between)
    assert plan_problems(graph, plan) == []
    with pytest.raises(InfeasibleError, match="gpipe in 4 pieces does not fit") as caught:
        planned(graph, "gpipe", memory="200KiB")
    assert caught.value.code == "E301"


def test_auto_is_no_slower_than_any_recipe() -> None:
    graph = captured("unet")
    tried = list[str]()

    def noted(problem: Problem, names: Sequence[str]) -> Outcome:
        tried.extend(names)
        return decide_best(problem, names)

    options = PlanOptions(algorithm="auto", microbatches=4, reserve=0.0, costs="v100")
    cluster, costs = Cluster.uniform(2, bandwidth=300e9), preset_costs(graph, "v100")
    best = decide_microbatched(Problem(graph, cluster, costs, options), ("heft", "tofu"), noted)
    assert tried == ["heft", *RECIPES]
    makespans = {name: planned(graph, name)[1].makespan_s for name in RECIPES}
    assert best.makespan_s <= min(makespans.values())


def test_auto_may_leave_devices_idle_in_stages_of_the_whole_batch() -> None:
    """More stages send more: over slow links two of them are faster than eight."""
    graph = captured("gpt2")
    costs = preset_costs(graph, "v100")

    def found(devices: int, **options: Any) -> tuple[float, int]:
        cluster = Cluster.uniform(devices, bandwidth=1e9, latency=1e-4)
        problem = Problem(graph, cluster, costs, PlanOptions(reserve=0.0, costs="v100", **options))
        outcome = decide(problem, "1f1b")
        return outcome.makespan_s, len({*outcome.plan.place.tolist()})

    seconds, used = found(2)
    assert used == 2
    assert found(4) == found(8) == pytest.approx((seconds, 2))
    assert found(8, objective="period")[1] > 2
    assert found(8, algorithm="1f1b")[1] > 2


def test_more_pieces_are_asked_for_by_name() -> None:
    with pytest.raises(UsageError, match="--microbatches 4") as caught:
        planned(captured("unet"), "dualpipe-v", pieces=2)
    assert caught.value.code == "E227"


def test_what_joins_all_pieces_is_not_waited_for_in_vain() -> None:
    """Batch norm: the last piece comes before the first gradient, whatever the schedule says."""
    graph = captured("resnet")
    plan, _ = planned(graph, "1f1b", pieces=3)
    assert plan_problems(graph, plan) == []


def test_what_a_gradient_keeps_is_copied_before_it_is_overwritten() -> None:
    """A cell of a GRU copies a gate for its gradient, and multiplies the gate in place."""
    model = nn.Sequential(nn.Linear(2, 3), nn.GRU(3, 3))

    def step(model: nn.Sequential, optimizer: torch.optim.SGD, x: torch.Tensor) -> torch.Tensor:
        loss = model(x)[0].square().mean()
        loss.backward()
        optimizer.step()
        return loss

    x = torch.randn(1, 4, 2)
    graph = capture_step(step, (model, torch.optim.SGD(model.parameters(), lr=0.1), x)).graph
    assert [op.kind for op in graph.ops].count("aten.mul_.Tensor") > 1
    plan, _ = planned(graph, "1f1b", pieces=2)
    assert plan_problems(graph, plan) == []


def test_a_step_whose_batch_is_whole_runs_stage_by_stage() -> None:
    graph = captured("unet")
    options = PlanOptions(algorithm="1f1b", reserve=0.0, costs="v100")
    problem = Problem(
        graph, Cluster.uniform(2, bandwidth=300e9), preset_costs(graph, "v100"), options
    )
    plan, _ = make_plan(problem)
    assert plan.pieces is None
    assert set(plan.placement.values()) == {0, 1}
