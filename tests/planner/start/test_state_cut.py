"""Cuts around state that lies cut: its boxes stay, the rest is searched, refusals have names."""

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pardnn.cluster import Cluster
from pardnn.errors import InfeasibleError, InvalidPlanError, PardnnError, UsageError
from pardnn.graph.ir import Graph
from pardnn.plan.check import plan_problems
from pardnn.plan.mesh import Layout, Mesh, make_mesh, owned_boxes
from pardnn.plan.plan import Plan
from pardnn.plan.state_in_place import Held, StateInPlace, state_in_place, state_problems
from pardnn.plan.state_layout import Shard, state_layout
from pardnn.planner.costs import costs_for
from pardnn.planner.kept_state import fixed_layouts
from pardnn.planner.make_plan import make_plan
from pardnn.planner.options import PlanOptions
from pardnn.planner.problem import Problem
from pardnn.report.results import PlanResult
from pardnn.shard.search.baselines import BASELINES
from pardnn.shard.search.coarsening import NEEDED, REPEATED, TRAINING
from pardnn.shard.search.problem import make_problem
from testbed.hand_graphs import Steps, mlp
from tests.strategies import examples

pytestmark = pytest.mark.jit  # whole runs of planning

MESH = make_mesh((2, 2))
LAYOUTS: list[Layout] = list(itertools.product((None, 0, 1), repeat=2))


def state_as(graph: Graph, layouts: Mapping[str, Layout], mesh: Mesh = MESH) -> StateInPlace:
    """State of a graph that lies cut so, by name."""
    held: dict[str, Held] = {}
    for op in graph.ops:
        if op.name in layouts:
            tensor = op.outputs[0]
            boxes = owned_boxes(tensor.shape or (), layouts[op.name], mesh)
            assert boxes is not None
            whole = tuple((0, n) for n in tensor.shape or ())
            shards = tuple(
                Shard(device, f"{op.name}@{device}", None if box == whole else box)
                for device, box in enumerate(boxes)
            )
            held[op.name] = Held(tensor, shards, (tensor.bytes // mesh.size,) * mesh.size, mesh)
    return StateInPlace(held=held, num_devices=mesh.size)


def planned(
    graph: Graph, state: StateInPlace | None, algorithm: str, **options: Any
) -> tuple[Plan, PlanResult]:
    cluster = Cluster.uniform(4)
    chosen = PlanOptions(algorithm=algorithm, costs="k80", **options)
    return make_plan(Problem(graph, cluster, costs_for(graph, cluster, "k80"), chosen, state))


@examples(10)
@given(
    one=st.sampled_from(LAYOUTS),
    other=st.sampled_from([None, *LAYOUTS]),
    algorithm=st.sampled_from(sorted({"tofu", *BASELINES} - {"equal-chop"})),
    objective=st.sampled_from(["bytes", "seconds"]),
)
def test_boxes_stay_whatever_cuts(
    one: Layout, other: Layout | None, algorithm: str, objective: Any
) -> None:
    graph = mlp(16, 8, 12, 8)
    layouts = {"w1": one} | ({} if other is None else {"w2": other})
    state = state_as(graph, layouts)
    plan, _ = planned(graph, state, algorithm, objective=objective)
    assert plan.partition is not None
    assert plan.partition.mesh == MESH
    found = state_layout(graph, plan)
    assert all(found[name] == state.layout[name] for name in layouts)
    assert plan_problems(graph, plan) == []
    assert state_problems(graph, plan, state) == []


@pytest.mark.parametrize("batch", [16, 8, 4])
def test_auto_cuts_what_lies_cut(batch: int) -> None:
    old = mlp(16, 8, 12, 8)
    plan, _ = planned(old, None, "tofu", objective="bytes")
    state = state_in_place(old, plan)
    graph = mlp(batch, 8, 12, 8)
    kept, result = planned(graph, state, "auto")
    assert result.algorithm == "tofu"
    assert state_layout(graph, kept) == state_layout(old, plan)


def test_the_same_step_moves_no_more_bytes() -> None:
    graph = mlp(16, 8, 12, 8)
    plan, free = planned(graph, None, "tofu", objective="bytes")
    _, kept = planned(graph, state_in_place(graph, plan), "tofu", objective="bytes")
    assert kept.transfer_bytes == free.transfer_bytes


@pytest.mark.parametrize("level", [NEEDED, TRAINING, REPEATED])
def test_layers_alike_may_lie_differently(level: int) -> None:
    """Coarsening gives equal layers one layout, unless they lie differently."""
    s = Steps()
    s.source("h.0", (8, 8), "input")
    for number in range(6):
        s.source(f"layers.{number}.w", (8, 8))
        s.mm(f"h.{number + 1}", f"h.{number}", f"layers.{number}.w")
    graph = s.graph()
    layouts: dict[str, Layout] = {f"layers.{n}.w": (0, 1) if n < 3 else (1, 1) for n in range(6)}
    fixed = fixed_layouts(graph, state_as(graph, layouts))
    problem = make_problem(graph, level, None, fixed)
    found = [variable.fixed or (None, None) for variable in problem.variables]
    assert {name: problem.layout(name, found) for name in layouts} == layouts


def shared(gradient_of: str) -> Graph:
    """Two parameters of which the step adds one to the other in place, through a transpose."""
    s = Steps()
    s.source("w", (8, 12))
    s.source("v", (12, 8))
    s.update("w", s.t("v.t", "v") if gradient_of == "v" else "w")
    return s.graph()


def test_state_added_to_other_state_is_moved_by_message() -> None:
    graph = shared("v")
    plan, _ = planned(graph, state_as(graph, {"w": (0, 0), "v": (0, 1)}), "tofu")
    assert plan.messages


def test_views_that_would_tear_state_are_named() -> None:
    """A view as a vector cannot be cut by the rows or columns of what it views."""
    s = Steps()
    s.source("w", (8, 4))
    s.source("g", (32,))
    s.call("flat", "aten.view.default", ["w", [32]], (32,), alias="w")
    s.call("new", "aten.add_.Tensor", ["flat", "g"], (32,), alias="flat")
    graph = s.graph()
    plan, _ = planned(graph, None, "tofu")
    whole = state_in_place(graph, plan)
    assert [shard.box for shard in whole.layout["w"]] == [None] * 4
    kept, _ = planned(graph, whole, "auto")
    assert state_problems(graph, kept, whole) == []
    message = r"'w' as \(Shard\(1\), Shard\(1\)\), but 'w' and 'flat' are of one storage"
    with pytest.raises(InfeasibleError, match=message) as found:
        planned(graph, state_as(graph, {"w": (1, 1)}), "tofu")
    assert found.value.code == "E301"


def test_an_op_that_cannot_be_cut_and_writes_state_is_refused() -> None:
    s = Steps()
    s.source("w", (8, 4))
    s.call("n", "mylib::twist", ["w"], (8, 4))
    arguments = {**(s.ops[-1].arguments or {}), "mutates": ["w"]}
    s.ops[-1] = dataclasses.replace(s.ops[-1], arguments=arguments)
    graph = s.graph()
    with pytest.raises(InfeasibleError, match=r"'w' is laid out as .* needs it as \(Rep") as found:
        planned(graph, state_as(graph, {"w": (0, 1)}), "tofu")
    assert found.value.code == "E301"


def test_whole_and_cut_state_are_not_mixed() -> None:
    graph = mlp(16, 8, 12, 8)
    state = state_as(graph, {"w1": (0, 0)})
    whole = Held(graph.ops[3].outputs[0], (Shard(1, "w2", None),), (0, 384, 0, 0), None)
    mixed = StateInPlace(held={**state.held, "w2": whole}, num_devices=4)
    with pytest.raises(UsageError, match="'w2' is whole on one device and 'w1' is cut"):
        planned(graph, mixed, "auto")


def test_a_cut_is_not_placed_and_one_axis_is_not_two() -> None:
    graph = mlp(16, 8, 12, 8)
    state = state_as(graph, {"w1": (0, 0)})
    for algorithm, message in (("auto-whole", "Use tofu"), ("equal-chop", "one axis")):
        with pytest.raises(UsageError, match=message) as found:
            planned(graph, state, algorithm)
        assert found.value.code == "E225"
    flat = state_as(graph, {"w1": (1,)}, make_mesh((4,)))
    plan, _ = planned(graph, flat, "equal-chop")
    assert state_layout(graph, plan)["w1"] == flat.layout["w1"]


def test_a_search_that_moves_state_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = mlp(16, 8, 12, 8)
    free, _ = planned(graph, None, "tofu")
    found = {n: s for n, s in state_layout(graph, free).items() if n == "w1"}
    other = next(o for o in LAYOUTS if state_as(graph, {"w1": o}).layout != found)
    monkeypatch.setattr("pardnn.planner.problem.fixed_layouts", lambda *_: None)
    with pytest.raises(InvalidPlanError, match="moves state"):
        planned(graph, state_as(graph, {"w1": other}), "tofu")


def test_boxes_of_no_layout_are_refused() -> None:
    graph = mlp(16, 8, 12, 8)
    state = state_as(graph, {"w1": (0, 0)})
    held = state.held["w1"]
    swapped = (held.shards[0]._replace(box=held.shards[1].box), *held.shards[1:])
    odd = StateInPlace(held={"w1": held._replace(shards=swapped)}, num_devices=4)
    for algorithm in ("tofu", "auto-whole"):  # which was advised to use tofu
        with pytest.raises(PardnnError, match="is not laid out as by a cut") as found:
            planned(graph, odd, algorithm)
        assert found.value.code == "E225"
    with pytest.raises(PardnnError, match=r"tofu\*heft changes the layout of the state"):
        planned(graph, state, "tofu*heft")
