"""What was asked for of a training step, and what it means for its other shapes and evaluations."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

import pardnn
from pardnn.backends.torch.capture.capture import capture_step
from pardnn.errors import UsageError
from pardnn.graph.ir import Graph
from pardnn.plan.constraints import Constraint
from pardnn.plan.plan import Plan
from pardnn.plan.state_in_place import StateInPlace, check_state_kept, state_in_place
from pardnn.planner.next_plan import next_plan
from pardnn.planner.options import PlanOptions

pytestmark = pytest.mark.jit  # whole runs of planning

CLUSTER = pardnn.Cluster.uniform(2)


@functools.cache
def graphs() -> dict[str, Graph]:
    """A training step of four samples, three and one, and evaluations of one sample and of none."""
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(model: nn.Module, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    def validate(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return model(x).sum()

    def norm(model: nn.Module) -> torch.Tensor:
        with torch.no_grad():
            return torch.stack([p.norm() for p in model.parameters()]).norm()

    found = {
        f"{rows} samples": capture_step(step, (model, optimizer, torch.randn(rows, 4))).graph
        for rows in (4, 3, 1)
    }
    for name, function, args in (
        ("evaluation", validate, (model, torch.randn(1, 4))),
        ("norm", norm, (model,)),
    ):
        found[name] = capture_step(function, args, must_train=False, has_loss=False).graph
    return found


def first_and_next(
    name: str, *, is_first: bool = False, **options: Any
) -> tuple[Graph, Plan, StateInPlace]:
    """Return another graph of the step, its plan, and where the plan of the step left the state."""
    asked = PlanOptions(costs="v100", **options)
    step, graph = graphs()["4 samples"], graphs()[name]
    state = state_in_place(step, next_plan(step, CLUSTER, asked, None, None, is_first=True))
    return graph, next_plan(graph, CLUSTER, asked, None, state, is_first=is_first), state


@pytest.mark.parametrize(
    ("name", "algorithm", "pieces", "kind"),
    [
        ("1 samples", "zero-2", None, "tofu"),  # one sample is not shared by two devices
        ("evaluation", "data-parallel", None, "tofu"),
        ("norm", "zero-1", 2, "tofu"),  # there is no batch
        ("3 samples", "zero-1", 2, "tofu"),  # one of two pieces has one sample
        ("norm", "megatron", None, "tofu"),  # there are no two products
        ("3 samples", "dualpipe-v", 4, None),  # four stages need four pieces
    ],
)
def test_an_algorithm_that_has_no_plan_gives_way_to_the_best_of_its_kind(
    name: str, algorithm: str, pieces: int | None, kind: str | None
) -> None:
    graph, plan, state = first_and_next(name, algorithm=algorithm, microbatches=pieces)
    check_state_kept(graph, plan, state)
    assert plan.algorithm == kind if kind else plan.partition is None
    with pytest.raises(UsageError):
        first_and_next(name, algorithm=algorithm, microbatches=pieces, is_first=True)


MOMENTUM = "optimizer.state.model.0.bias.momentum_buffer"
UP, DOWN = "layer:model.0", "layer:model.2"


@pytest.mark.parametrize(
    ("name", "asked", "means"),
    [
        ("evaluation", pardnn.pin("op:threshold_backward", 1), None),  # it has no gradients
        ("evaluation", pardnn.prefer(pardnn.pin(f"tensor:{MOMENTUM}", 1), price_s=1.0), None),
        ("evaluation", pardnn.apart("op:mm_2", DOWN), None),
        ("evaluation", pardnn.together("op:mm_2", DOWN, UP), pardnn.together(DOWN, UP)),
        ("evaluation", pardnn.forbid(0, what=UP), pardnn.forbid(0, what=UP)),
        ("3 samples", pardnn.fix_pieces(4), pardnn.fix_pieces(3)),
        ("evaluation", pardnn.fix_pieces(4), None),
        ("norm", pardnn.forbid(0), pardnn.forbid(0)),
    ],
)
def test_constraints_mean_what_there_is_to_name(
    name: str, asked: Constraint, means: Constraint | None
) -> None:
    graph, plan, state = first_and_next(name, algorithm="heft", constraints=(asked,))
    check_state_kept(graph, plan, state)
    assert plan.constraints == (None if means is None else (means,))


def test_layouts_that_were_asked_for_stay() -> None:
    for name in ("3 samples", "evaluation"):
        asked = pardnn.fix_layout("model.0.weight", 1)
        graph, plan, state = first_and_next(name, algorithm="tofu", constraints=(asked,))
        check_state_kept(graph, plan, state)
        assert plan.partition is not None
        assert plan.partition.sharding["model.0.weight"] == ("Shard(1)",)


def test_a_name_that_the_first_graph_lacks_is_told() -> None:
    """The first graph of a second step on the model is one, too."""
    with pytest.raises(UsageError, match="no op is named 'threshold_backward'"):
        first_and_next(
            "evaluation", constraints=(pardnn.pin("op:threshold_backward", 1),), is_first=True
        )
