"""Planning around state that lies on devices: it stays, limits hold, refusals are true."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import pardnn
from pardnn.cluster import Cluster
from pardnn.cost.costs import graph_costs
from pardnn.errors import InfeasibleError, InvalidPlanError, MismatchError, UsageError
from pardnn.graph.build import build_graph
from pardnn.graph.ir import Graph, Op, Tensor
from pardnn.place.colocation import closed_arrays
from pardnn.plan.check import plan_problems
from pardnn.plan.plan import Plan
from pardnn.plan.state_in_place import (
    Held,
    StateInPlace,
    bytes_alone,
    check_state_kept,
    state_in_place,
    state_problems,
)
from pardnn.plan.state_layout import STATE_KINDS, Shard, state_layout
from pardnn.planner.algorithms import ALGORITHMS, SOLVER_BASED
from pardnn.planner.kept_state import check_state
from pardnn.planner.make_plan import make_plan
from pardnn.planner.options import PlanOptions
from pardnn.planner.problem import Problem
from pardnn.report.results import PlanResult
from tests.reference.fits import some_plan_fits
from tests.strategies import FAMILIES, examples, graphs, random_graph

pytestmark = pytest.mark.jit  # whole runs of planning


def state_on(graph: Graph, devices: Mapping[str, int], num_devices: int) -> StateInPlace:
    """State of a graph that lies whole on these devices, by name of its op."""
    held: dict[str, Held] = {}
    for op in graph.ops:
        if op.name in devices:
            device, tensor = devices[op.name], op.outputs[0]
            sizes = tuple(tensor.bytes * (d == device) for d in range(num_devices))
            held[op.name] = Held(tensor, (Shard(device, op.name, None),), sizes, None)
    return StateInPlace(held=held, num_devices=num_devices)


def state_ops(graph: Graph) -> list[str]:
    return [op.name for op in graph.ops if op.kind in STATE_KINDS]


def groups_of(graph: Graph) -> dict[str, int]:
    group = closed_arrays(graph).group.tolist()
    return {op.name: number for op, number in zip(graph.ops, group, strict=True)}


def planned(
    graph: Graph, cluster: Cluster, state: StateInPlace | None, algorithm: str, **options: Any
) -> tuple[Plan, PlanResult]:
    chosen = PlanOptions(algorithm=algorithm, reserve=0.0, **options)
    return make_plan(Problem(graph, cluster, graph_costs(graph), chosen, state))


@st.composite
def states(draw: st.DrawFn, num_devices: int, **kwargs: Any) -> tuple[Graph, dict[str, int]]:
    """A graph, and devices for some of its state; what must be together is."""
    graph = draw(graphs(**kwargs))
    group, devices = groups_of(graph), draw(st.lists(st.integers(0, num_devices - 1), min_size=40))
    names = [name for name in state_ops(graph) if draw(st.booleans())]
    return graph, {name: devices[group[name] % len(devices)] for name in names}


@examples(15)
@given(
    case=states(3, max_ops=14),
    algorithm=st.sampled_from(sorted({*ALGORITHMS} - SOLVER_BASED - {"single"})),
    limit=st.sampled_from([None, 400, 900]),
    others=st.tuples(*[st.sampled_from([0, 100, 400])] * 3),
)
def test_state_stays_whatever_plans(
    case: tuple[Graph, dict[str, int]],
    algorithm: str,
    limit: int | None,
    others: tuple[int, ...],
) -> None:
    graph, devices = case
    cluster = Cluster.uniform(3, memory=limit, bandwidth=64.0, latency=0.25)
    state = dataclasses.replace(state_on(graph, devices, 3), other_bytes=others)
    try:
        plan, result = planned(graph, cluster, state, algorithm)
    except InfeasibleError:
        assert limit is not None
        return
    assert {name: plan.placement[name] for name in devices} == devices
    assert plan_problems(graph, plan, cluster) == []
    assert state_problems(graph, plan, state) == []
    assert result.makespan_s >= result.lower_bound_s * (1 - 1e-9)
    if limit is not None:
        assert all(p + o <= limit for p, o in zip(result.peak_bytes, others, strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_state_stays_through_polish(family: str) -> None:
    graph = random_graph(5, 40, family)
    group = groups_of(graph)
    devices = {name: group[name] % 3 for name in state_ops(graph)}
    cluster = Cluster.uniform(3, bandwidth=64.0, latency=0.25)
    plan, _ = planned(graph, cluster, state_on(graph, devices, 3), "auto-whole")
    assert {name: plan.placement[name] for name in devices} == devices


@examples(12)
@given(case=states(2, max_ops=5), tightness=st.sampled_from([1.5, 1.0, 0.8, 0.6]))
def test_a_refusal_is_true(case: tuple[Graph, dict[str, int]], tightness: float) -> None:
    """As far as the algorithm goes without state: see `test_infeasible_is_seldom_claimed_wrongly`.

    State that alone does not fit is refused with these numbers, and truly so.
    """
    graph, devices = case
    limit = max(1, int(tightness * max(sum(t.bytes for t in op.outputs) for op in graph.ops)))
    group = groups_of(graph)
    pins = {group[name]: device for name, device in devices.items()}
    cluster = Cluster.uniform(2, memory=limit, bandwidth=64.0, latency=0.25)
    state = state_on(graph, devices, 2)
    numbers = [group[op.name] for op in graph.ops]
    try:
        planned(graph, cluster, state, "pardnn")
    except InfeasibleError as error:
        if error.details.get("lower_bound_bytes", limit + 1) > limit:
            assert not some_plan_fits(graph, numbers, [limit, limit], pins)
        return
    assert some_plan_fits(graph, numbers, [limit, limit], pins)


def test_rate_of_wrong_refusals() -> None:
    feasible = wrong = 0
    for seed in range(0, 60, 2):
        graph = random_graph(seed, 5 + seed % 2, FAMILIES[seed % 6])
        group = groups_of(graph)
        devices = {name: group[name] % 2 for name in state_ops(graph)}
        pins = {group[name]: device for name, device in devices.items()}
        largest = max(sum(t.bytes for t in op.outputs) for op in graph.ops)
        limit = int(largest * (1.5, 2, 2.5, 3)[seed // 6 % 4])
        numbers = [group[op.name] for op in graph.ops]
        if not some_plan_fits(graph, numbers, [limit, limit], pins):
            continue
        feasible += 1
        cluster = Cluster.uniform(2, memory=limit, bandwidth=64.0, latency=0.25)
        try:
            planned(graph, cluster, state_on(graph, devices, 2), "pardnn")
        except InfeasibleError:
            wrong += 1
    assert feasible >= 10
    assert wrong <= 0.1 * feasible


def parameter(name: str, size: int = 8, shape: tuple[int, ...] | None = None) -> Op:
    tensor = Tensor(name=name, bytes=size, shape=shape, dtype="float32")
    return Op(name=name, kind="parameter", outputs=(tensor,), memory="residual")


def read(name: str, *inputs: str, size: int = 8) -> Op:
    outputs = (Tensor(name=name, bytes=size),)
    return Op(name=name, kind="op", inputs=inputs, outputs=outputs, seconds={"accelerator": 1.0})


def test_what_the_graph_lacks_still_takes_memory() -> None:
    """`v` is of another step: 60 of 100 bytes of device 0 are gone."""
    cluster = Cluster.uniform(2, memory=100)
    old = build_graph("old", [parameter("w"), parameter("v", 60), read("a", "w", "v", size=0)])
    new = build_graph("new", [parameter("w"), read("b", "w", size=30), read("c", "b", size=10)])
    plan, _ = planned(old, cluster, state_on(old, {"w": 0, "v": 0}, 2), "pardnn")
    state = state_in_place(old, plan)
    kept, _ = planned(new, cluster, state, "auto-whole")
    assert kept.placement["w"] == 0
    assert kept.predicted is not None
    assert kept.predicted.peak_bytes[0] <= 40
    both = state_in_place(new, kept, before=state)
    assert both.layout["v"] == state.layout["v"]
    larger = build_graph("larger", [parameter("w"), read("b", "w", size=40)])
    free, _ = planned(larger, cluster, None, "single")
    moved = dataclasses.replace(
        free, placement={"w": 0, "b": 0}, order=(("w", "b"), ()), predicted=None
    )
    with pytest.raises(InvalidPlanError, match="48 B; 40 B are usable"):
        check_state_kept(larger, moved, state, cluster)


def test_state_that_may_move_still_counts_what_the_graph_lacks() -> None:
    graph = build_graph("g", [parameter("w", 60), read("a", "w", size=30)])
    old = build_graph("old", [parameter("w", 60), parameter("v", 70), read("a", "w", "v")])
    cluster = Cluster.uniform(2, memory=120)
    state = state_on(old, {"w": 0, "v": 0}, 2)
    with pytest.raises(InfeasibleError):
        planned(graph, cluster, state, "auto-whole")
    plan, _ = planned(graph, cluster, bytes_alone(graph, state), "auto-whole")
    assert plan.placement["w"] == 1


@pytest.mark.parametrize("size", [0, 8])
def test_devices_that_others_fill(size: int) -> None:
    graph = build_graph("g", [read("a", size=size), read("b", "a", size=size)])
    state = StateInPlace(held={}, num_devices=2, other_bytes=(100, 100))
    if size == 0:
        planned(graph, Cluster.uniform(2, memory=100), state, "auto-whole")
        return
    with pytest.raises(InfeasibleError, match="of other steps: device 0: 0 B \\+ 100 B"):
        planned(graph, Cluster.uniform(2, memory=100), state, "auto-whole")


def test_state_that_does_not_fit_beside_that_of_others_is_refused_before_any_search() -> None:
    graph = build_graph("g", [parameter("w", size=60), read("a", "w")])
    state = dataclasses.replace(state_on(graph, {"w": 0}, 2), other_bytes=(50, 0))
    check_state(graph, Cluster.uniform(2, memory=110), 0.0, state)
    with pytest.raises(InfeasibleError, match=r"device 0 holds 60 B .* and 50 B that"):
        check_state(graph, Cluster.uniform(2, memory=109), 0.0, state)


def test_a_plan_that_moves_state_is_not_valid() -> None:
    graph = build_graph("g", [parameter("w"), read("a", "w")])
    plan, _ = planned(graph, Cluster.uniform(2), state_on(graph, {"w": 1}, 2), "pardnn")
    check_state_kept(graph, plan, state_in_place(graph, plan))
    with pytest.raises(
        InvalidPlanError, match="'w' is on device 0, but the plan puts it on device 1"
    ):
        check_state_kept(graph, plan, state_on(graph, {"w": 0}, 2))
    with pytest.raises(InvalidPlanError, match="for 2 devices, the state is on 3"):
        check_state_kept(graph, plan, state_on(graph, {"w": 1}, 3))


def test_a_planner_that_moves_state_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check stands behind every plan: here pins are lost on the way."""
    graph = build_graph("g", [parameter("w"), read("a", "w")])
    monkeypatch.setattr("pardnn.planner.problem.pinned", lambda machine, _: machine)
    with pytest.raises(InvalidPlanError, match="moves state"):
        planned(graph, Cluster.uniform(2), state_on(graph, {"w": 1}, 2), "single")


def test_ops_that_write_state_of_two_devices_are_named() -> None:
    write = Op(
        name="both", kind="mylib::swap", inputs=("w", "v"), source="train.py:7",
        outputs=(Tensor(name="both", bytes=0),), seconds={"accelerator": 1.0},
        arguments={"mutates": ["w", "v"]},
    )  # fmt: skip
    graph = build_graph("g", [parameter("w"), parameter("v"), write])
    with pytest.raises(InfeasibleError, match=r"'w' is on device 0 and 'v' on device 1") as found:
        planned(graph, Cluster.uniform(2), state_on(graph, {"w": 0, "v": 1}, 2), "auto-whole")
    assert found.value.code == "E301"
    assert "train.py:7" in str(found.value)


def test_state_that_does_not_fit_where_it_lies() -> None:
    graph = build_graph("g", [parameter("w", 60), parameter("v", 60), read("a", "w", "v", size=1)])
    cluster = Cluster.uniform(2, memory=130)
    planned(graph, cluster, None, "auto-whole")
    state = state_on(graph, {"w": 0, "v": 0}, 2)
    with pytest.raises(InfeasibleError, match="device 0 holds 120 B of this step's state"):
        planned(graph, Cluster.uniform(2, memory=100), state, "auto-whole")
    apart = state_on(graph, {"w": 0, "v": 1}, 2)
    with pytest.raises(InfeasibleError, match="'a'.*usable: 100 B") as found:
        planned(graph, Cluster.uniform(2, memory=100), apart, "auto-whole")
    assert "State stays where it is (of this step + of other steps: device 0: 60 B + 0 B" in str(
        found.value
    )


def test_another_tensor_of_the_same_name_is_refused() -> None:
    old = build_graph("old", [parameter("w", 32, (2, 4)), read("a", "w")])
    new = build_graph("new", [parameter("w", 32, (4, 2)), read("a", "w")])
    state = state_on(old, {"w": 1}, 2)
    with pytest.raises(MismatchError, match=r"'w' is float32\[4, 2\].*float32\[2, 4\]") as found:
        planned(new, Cluster.uniform(2), state, "auto-whole")
    assert found.value.code == "E503"


def test_other_devices_are_refused() -> None:
    graph = build_graph("g", [parameter("w"), read("a", "w")])
    with pytest.raises(UsageError, match="the state is on 3 devices, the cluster has 2"):
        planned(graph, Cluster.uniform(2), state_on(graph, {"w": 1}, 3), "auto-whole")


def test_whole_state_is_not_cut() -> None:
    graph = build_graph("g", [parameter("w"), read("a", "w")])
    with pytest.raises(UsageError, match="Use auto-whole, or auto") as found:
        planned(graph, Cluster.uniform(2), state_on(graph, {"w": 1}, 2), "tofu")
    assert found.value.code == "E225"


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_graph_is_as_fast_as_before(family: str) -> None:
    graph = random_graph(7, 60, family)
    cluster = Cluster.uniform(3, bandwidth=64.0, latency=0.25)
    plan, free = planned(graph, cluster, None, "auto-whole")
    again, kept = planned(graph, cluster, state_in_place(graph, plan), "auto-whole")
    assert kept.makespan_s <= free.makespan_s * (1 + 1e-9)
    assert state_layout(graph, again) == state_layout(graph, plan)


def test_the_public_door() -> None:
    graph = build_graph("g", [parameter("w"), parameter("v"), read("a", "w"), read("b", "v", "a")])
    cluster = pardnn.Cluster.uniform(2)
    plan = pardnn.plan(graph, cluster, "round-robin")
    state = pardnn.state_in_place(graph, plan)
    kept = pardnn.plan(graph, cluster, state=state)
    pardnn.check_state_kept(graph, kept, state)
    assert kept.placement["v"] == plan.placement["v"]
    assert "state tensors that stay where they are: 2" in kept.notes
