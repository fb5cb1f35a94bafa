"""Plans from an earlier plan: valid, not slower on the same devices, near it where that is free."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pardnn
from pardnn.cluster import Cluster, Device
from pardnn.errors import InfeasibleError, UsageError
from pardnn.graph.build import build_graph
from pardnn.graph.ir import Graph, Op, Tensor
from pardnn.place.polish.restore import relabelled, restored
from pardnn.plan.check import plan_problems
from pardnn.plan.file import read_plan, write_plan
from pardnn.plan.plan import Plan, plan_arrays, plan_from_arrays
from pardnn.planner.costs import costs_for
from pardnn.planner.options import PlanOptions
from pardnn.planner.problem import Problem
from pardnn.planner.start.earlier import devices_now
from pardnn.planner.start.near import itself
from pardnn.planner.steering.constrained import constrained
from pardnn.sim.engine import run_lists
from tests.place.machines import machine_for
from tests.place.pardnn.test_pardnn import one_device_peak
from tests.planner.test_sharded import chain
from tests.strategies import graphs, random_graph


def makespan(plan: Plan) -> float:
    assert plan.predicted is not None
    return plan.predicted.makespan_s


def line(*seconds: float, reads: bool) -> Graph:
    """Ops of these seconds, each reading the one before or nothing."""
    ops = [
        Op(name=f"op{i}", kind="op", inputs=(f"t{i - 1}",) if reads and i else (),
           outputs=(Tensor(name=f"t{i}", bytes=4),), seconds={"accelerator": took})
        for i, took in enumerate(seconds)
    ]  # fmt: skip
    return build_graph("line", ops)


def kept(plan: Plan, start: Plan) -> int:
    return sum(plan.placement.get(name) == device for name, device in start.placement.items())


@pytest.mark.jit
@given(graph=graphs(max_ops=12), k=st.integers(1, 4), tightness=st.sampled_from([None, 1.0, 0.7]))
def test_a_start_is_never_left_for_a_slower_plan(
    graph: Graph, k: int, tightness: float | None
) -> None:
    memory = None if tightness is None else max(1, int(one_device_peak(graph) * tightness))
    try:
        start = pardnn.plan(graph, Cluster.uniform(k, memory=memory), "m-etf", reserve=0)
    except InfeasibleError:
        return
    found = pardnn.plan(graph, Cluster.uniform(k, memory=memory), reserve=0, start=start)
    assert plan_problems(graph, found) == []
    assert makespan(found) <= makespan(start) * (1 + 1e-9)


@pytest.mark.jit
@given(graph=graphs(max_ops=12), before=st.integers(1, 4), now=st.integers(1, 4), data=st.data())
def test_any_placement_of_a_graph_much_like_it_will_do(
    graph: Graph, before: int, now: int, data: st.DataObject
) -> None:
    """Ops that are gone and ops that are new, devices that are gone, groups that were apart."""
    device = st.integers(0, before - 1)
    names = [op.name for op in graph.ops if data.draw(st.booleans())] + ["gone"]
    placement = {name: data.draw(device) for name in names}
    rows: list[list[str]] = [[] for _ in range(before)]
    for name, number in placement.items():
        rows[number].append(name)
    start = Plan(placement=placement, order=tuple(map(tuple, rows)))
    found = pardnn.plan(graph, Cluster.uniform(now), start=start)
    assert plan_problems(graph, found) == []


def large() -> Graph:
    return random_graph(3, 200)


@pytest.mark.jit
def test_a_tighter_limit_moves_messages_before_it_moves_ops() -> None:
    graph = large()
    start = pardnn.plan(graph, Cluster.uniform(4), "auto-whole")
    assert start.predicted is not None
    limit = max(start.predicted.peak_bytes) - 1
    found = pardnn.plan(graph, Cluster.uniform(4, memory=limit), reserve=0, start=start)
    anew = pardnn.plan(graph, Cluster.uniform(4, memory=limit), "auto-whole", reserve=0)
    assert found.predicted is not None
    assert max(found.predicted.peak_bytes) <= limit
    assert kept(found, start) > kept(anew, start)
    assert makespan(found) <= 1.1 * makespan(anew)
    assert any("ops stay on their devices" in note for note in found.notes)


@pytest.mark.jit
def test_a_device_that_is_gone_is_told_by_its_name() -> None:
    graph = large()
    four = Cluster.uniform(4)
    start = pardnn.plan(graph, four, "auto-whole")
    rest = [device for number, device in enumerate(four.devices) if number != 1]
    three = dataclasses.replace(Cluster.uniform(3), devices=tuple(rest))
    found = pardnn.plan(graph, three, start=start)
    assert plan_problems(graph, found, three) == []
    now = {0: 0, 2: 1, 3: 2}
    same = sum(found.placement[name] == now.get(device) for name, device in start.placement.items())
    assert f"started from a plan: {same} of " in found.notes[0]
    assert same > len(graph.ops) / 4


def test_devices_with_other_names_throughout_are_told_by_number() -> None:
    """As those of CPU ranks, which were planned for as accelerators."""
    three = pardnn.plan(line(1.0, 1.0, 1.0, reads=False), Cluster.uniform(3), "round-robin")
    assert devices_now(three, Cluster.uniform(2, named="cpu")) == [0, 1, -1]
    one_gone = Cluster(devices=(Device(name="gpu:2"), Device(name="gpu:1")))
    assert devices_now(three, one_gone) == [-1, 1, 0]


def test_a_start_on_a_device_that_neither_cluster_has() -> None:
    """Its order has a device more than the cluster that it names, which is the one now."""
    graph, two = line(1.0, 1.0, 1.0, reads=False), Cluster.uniform(2)
    plan = pardnn.plan(graph, two, "single")
    damaged = dataclasses.replace(
        plan, placement=dict.fromkeys(plan.placement, 2), order=((), (), plan.order[0]),
        checksum=None, predicted=None,
    )  # fmt: skip
    found = pardnn.plan(graph, two, start=damaged)
    assert plan_problems(graph, found, two) == []
    assert "0 of 0 ops stay on their devices; 3 others are new" in found.notes[0]


def test_a_plan_edited_by_hand_is_repaired(tmp_path: Path) -> None:
    """Its orders and messages are those of another placement, which no check accepts."""
    graph = line(1.0, 1.0, 1.0, reads=True)
    plan = pardnn.plan(graph, Cluster.uniform(2), "single")
    edited = dataclasses.replace(
        plan, placement=dict.fromkeys(plan.placement, 1), checksum=None, predicted=None
    )
    assert plan_problems(graph, edited)
    write_plan(edited, tmp_path / "edited.json")
    found = pardnn.plan(graph, Cluster.uniform(2), start=read_plan(tmp_path / "edited.json"))
    assert set(found.placement.values()) == {1}


@pytest.mark.jit
def test_a_pin_moves_its_op_alone() -> None:
    """The others keep their devices and turns, as a pipeline needs them."""
    graph, cluster = large(), Cluster.uniform(2)
    start = pardnn.plan(graph, cluster, "heft")
    name = graph.ops[7].name
    options = PlanOptions(constraints=(pardnn.pin(f"op:{name}", 1 - start.placement[name]),))
    costs = costs_for(graph, cluster, None)
    problem = Problem(graph, cluster, costs, options, start=start)
    found = plan_from_arrays(graph, itself(constrained(problem)))
    moved = {op for op, device in found.placement.items() if device != start.placement[op]}
    assert name in moved
    assert len(moved) < 10
    rows = [[op for op in row if op not in moved] for row in start.order]
    assert [[op for op in row if op not in moved] for row in found.order] == rows


@pytest.mark.jit
def test_constraints_of_the_start_hold_unless_others_are_given() -> None:
    graph, cluster = large(), Cluster.uniform(2)
    first = graph.ops[0].name
    start = pardnn.plan(graph, cluster, constraints=[pardnn.pin(f"op:{first}", 1)])
    assert pardnn.plan(graph, cluster, start=start).constraints == start.constraints
    other = [pardnn.pin(f"op:{first}", 0)]
    assert pardnn.plan(graph, cluster, start=start, constraints=other).placement[first] == 0


def test_a_cut_leaves_state_as_it_lay() -> None:
    start = pardnn.plan(chain(), Cluster.uniform(4), "data-parallel", "bytes", costs="k80")
    longer = chain(layers=4)
    found = pardnn.plan(longer, Cluster.uniform(4), objective="bytes", costs="k80", start=start)
    anew = pardnn.plan(longer, Cluster.uniform(4), "tofu", "bytes", costs="k80")
    assert None not in (start.partition, found.partition, anew.partition)
    layouts = [plan.partition.sharding for plan in (start, found, anew) if plan.partition]
    assert all(layouts[0][f"w{n}"] == layouts[1][f"w{n}"] for n in range(3))
    assert any(layouts[0][f"w{n}"] != layouts[2][f"w{n}"] for n in range(3))
    assert "3 state tensors keep their cut" in " ".join(found.notes)
    two = pardnn.plan(longer, Cluster.uniform(2), objective="bytes", costs="k80", start=start)
    assert "planned from scratch" in " ".join(two.notes)


@pytest.mark.parametrize(
    ("algorithm", "made_by"), [("heft", "single"), ("tofu", "single"), ("auto-whole", "tofu")]
)
def test_an_algorithm_that_cannot_start_from_it_says_so(algorithm: str, made_by: str) -> None:
    start = pardnn.plan(chain(), Cluster.uniform(2), made_by, costs="k80")
    with pytest.raises(UsageError, match=f"{algorithm} does not start from a plan that") as error:
        pardnn.plan(chain(), Cluster.uniform(2), algorithm, costs="k80", start=start)
    assert error.value.code == "E249"


@pytest.mark.jit
@given(graph=graphs(max_ops=10), k=st.integers(2, 4), data=st.data())
def test_devices_that_are_alike_get_their_numbers_back(
    graph: Graph, k: int, data: st.DataObject
) -> None:
    cluster = Cluster.uniform(k)
    machine = machine_for(graph, cluster)
    plan = plan_arrays(graph, pardnn.plan(graph, cluster, "m-etf"))
    other = np.array(data.draw(st.permutations(range(k))))
    found = relabelled(machine, plan, other[plan.place], [None] * k)
    assert found.place.tolist() == other[plan.place].tolist()
    assert plan_problems(graph, plan_from_arrays(graph, found)) == []
    times = [run_lists(graph.arrays, machine, each).makespan for each in (plan, found)]
    assert times[0] == pytest.approx(times[1], rel=1e-12)


def test_unlike_devices_keep_their_numbers() -> None:
    graph = large()
    machine = machine_for(graph, Cluster.uniform(2))
    plan = plan_arrays(graph, pardnn.plan(graph, Cluster.uniform(2), "heft"))
    swapped = 1 - plan.place
    assert (relabelled(machine, plan, swapped, [None, None]).place == swapped).all()
    assert (relabelled(machine, plan, swapped, [None, 1 << 40]).place == plan.place).all()
    slow = machine.bandwidth.copy()
    slow[0, 1] /= 2
    unlike = machine._replace(bandwidth=slow)
    assert (relabelled(unlike, plan, swapped, [None, None]).place == plan.place).all()


@pytest.mark.jit
@given(graph=graphs(max_ops=7, memory=False), data=st.data())
def test_what_goes_back_costs_nothing(graph: Graph, data: st.DataObject) -> None:
    machine = machine_for(graph, Cluster.uniform(2))
    plan = plan_arrays(graph, pardnn.plan(graph, Cluster.uniform(2), "m-etf"))
    near = np.array([data.draw(st.integers(-1, 1)) for _ in graph.ops])
    found = restored(graph, machine, plan, near, [None, None])
    before, after = (run_lists(graph.arrays, machine, each).makespan for each in (plan, found))
    assert after <= before * (1 + 1e-9)
    assert plan_problems(graph, plan_from_arrays(graph, found)) == []
    away = (found.place != near) & (plan.place == near)
    assert not away.any()


def test_moves_that_bring_nothing_are_taken_back() -> None:
    """Two independent ops of 1 s: which device runs which is all the same."""
    graph = line(1.0, 1.0, 5.0, reads=False)
    machine = machine_for(graph, Cluster.uniform(3))
    apart = Plan(placement={"op0": 0, "op1": 1, "op2": 2}, order=(("op0",), ("op1",), ("op2",)))
    near = np.array([0, 0, 0])
    found = restored(graph, machine, plan_arrays(graph, apart), near, [None] * 3)
    assert found.place.tolist() == [0, 0, 2]  # 5 s beside either of them would be slower
