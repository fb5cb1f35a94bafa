"""The period of consecutive steps against the same steps as one ordinary graph."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pardnn.cost.costs import graph_costs
from pardnn.graph.build import build_graph
from pardnn.graph.ir import Graph, Op, Tensor
from pardnn.kernels.sorting import inverse_permutation
from pardnn.place.ordering.schedule import free_plan
from pardnn.place.recipes.schedules import SCHEDULES, unit_times
from pardnn.plan.memory import peak_bytes
from pardnn.plan.plan import PlanArrays, plan_arrays, plan_from_arrays
from pardnn.planner.make_plan import make_plan
from pardnn.planner.options import PlanOptions
from pardnn.planner.problem import Problem
from pardnn.sim import period as period_module
from pardnn.sim.engine import run_lists
from pardnn.sim.machine import machine_of
from pardnn.sim.period import busiest_seconds, period
from testbed.hand_graphs import pipeline, pipeline_cluster
from tests.place.machines import cluster_of, machine_for, random_place, schedule
from tests.reference.period import unrolled, unrolled_machine
from tests.strategies import examples, graphs

STEPS = 8


def op(name: str, seconds: float, *inputs: str) -> Op:
    return Op(
        name=name, kind="op", inputs=inputs, outputs=(Tensor(name=name, bytes=0),),
        seconds={"accelerator": seconds},
    )  # fmt: skip


def step_ends(graph: Graph, machine, plan: PlanArrays) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """When each device begins and ends each of `STEPS` steps, simulated as one graph; peaks."""
    many, lists = unrolled(graph, plan_from_arrays(graph, plan), STEPS)
    arrays = plan_arrays(many, lists)
    found = run_lists(many.arrays, unrolled_machine(machine, STEPS), arrays)
    begin = np.full((STEPS, machine.num_devices), np.inf)
    end = np.zeros((STEPS, machine.num_devices))
    step = np.arange(len(many.ops)) // len(graph.ops)
    np.minimum.at(begin, (step, arrays.place), found.start)
    np.maximum.at(end, (step, arrays.place), found.finish)
    sent = np.searchsorted(np.cumsum([len(plan.message_tensor)] * STEPS), np.arange(
        len(arrays.message_tensor)), side="right")  # fmt: skip
    np.maximum.at(end, (sent, arrays.message_source), found.message_finish)
    return begin, end, peak_bytes(many, arrays)


@examples(10)
@given(graph=graphs(max_ops=8), seed=st.integers(0, 9), serial=st.booleans())
def test_period_is_the_pace_of_the_steps_as_one_graph(
    graph: Graph, seed: int, serial: bool
) -> None:
    machine = machine_for(graph, cluster_of(2, serial=serial))
    plan = schedule(graph, machine, random_place(graph, 2, seed))
    begin, end, _ = step_ends(graph, machine, plan)
    found = period(graph.arrays, machine, plan)
    assert found.settled
    assert found.lower_bound <= found.seconds
    pace = (end[-1].max() - end[3].max()) / (STEPS - 4)
    # The runtime lets no device be two steps ahead; a graph alone does not stop it.
    if (begin[2:].min(axis=1) >= end[:-2].max(axis=1)).all():
        assert found.seconds == pytest.approx(pace, rel=1e-6, abs=1e-9)
    else:
        assert found.seconds >= pace * (1 - 1e-9)


@pytest.mark.parametrize("most", [1, 4, 7])
def test_steps_that_do_not_settle_have_the_mean_pace_of_the_second_half(
    monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """Two devices of unlike work: neither begins a step before both have begun the last one."""
    monkeypatch.setattr(period_module, "SAME", -1.0)
    monkeypatch.setattr(period_module, "MOST_STEPS", most)
    graph = build_graph("pair", [op("a", 1.0), op("b", 2.5, "a"), op("c", 0.5, "b")])
    machine = machine_for(graph, cluster_of(2))
    plan = schedule(graph, machine, np.array([0, 1, 0]))
    ready, latest = np.zeros(2), [0.0]
    for _ in range(most):
        found = run_lists(graph.arrays, machine, plan, ready)
        ends = ready.copy()
        np.maximum.at(ends, plan.place, found.finish)
        np.maximum.at(ends, plan.message_source, found.message_finish)
        ready = np.maximum(ends, ready.max())
        latest.append(float(ready.max()))
    half = most // 2
    found = period(graph.arrays, machine, plan)
    assert (found.steps, found.settled) == (most, False)
    assert found.seconds == pytest.approx((latest[most] - latest[half]) / (most - half))
    assert found.seconds >= found.lower_bound == 2.5


@examples(10)
@given(graph=graphs(max_ops=8), seed=st.integers(0, 9))
def test_steps_that_overlap_hold_no_more_than_one(graph: Graph, seed: int) -> None:
    """Residual storages stand once per step there: they are left out of what is compared."""
    machine = machine_for(graph, cluster_of(2))
    plan = schedule(graph, machine, random_place(graph, 2, seed))
    _, _, many = step_ends(graph, machine, plan)
    kept = np.zeros(2, dtype=np.int64)
    a = graph.arrays
    own = (a.memory[a.tensor_op] == 1) & (a.tensor_alias < 0)
    np.add.at(kept, plan.place[a.tensor_op[own]], a.tensor_bytes[own])
    one = np.array(peak_bytes(graph, plan))
    assert (np.array(many) - (STEPS - 1) * kept <= one).all()


def test_a_frozen_encoder_computes_the_next_batch_meanwhile() -> None:
    """Device 0 runs 4 s and is done; device 1 needs its result and 6 s: 10 s, one in 6 s."""
    graph = build_graph(
        "frozen", [op("encode", 4.0), op("head", 5.0, "encode"), op("update", 1.0, "head")]
    )
    machine = machine_of(graph_costs(graph), pipeline_cluster(2, None))
    plan = free_plan(graph.arrays, 2, np.array([0, 1, 1]), np.arange(3))
    assert run_lists(graph.arrays, machine, plan).makespan == 10.0
    assert period(graph.arrays, machine, plan)[:2] == (6.0, 6.0)


def test_a_device_ends_its_step_when_all_that_it_sends_has_left() -> None:
    graph = build_graph("sends", [op("a", 3.0), op("b", 1.0, "a")])
    machine = machine_of(graph_costs(graph), pipeline_cluster(2, None, latency=3.0))
    plan = free_plan(graph.arrays, 2, np.arange(2), np.arange(2))
    assert period(graph.arrays, machine, plan)[:2] == (6.0, 3.0)


def test_links_that_carry_transfers_side_by_side_bound_no_period() -> None:
    graph = build_graph("sends", [op("a", 3.0), op("b", 1.0, "a")])
    machine = machine_of(graph_costs(graph), pipeline_cluster(2, None, latency=7.0))
    plan = free_plan(graph.arrays, 2, np.arange(2), np.arange(2))
    assert busiest_seconds(graph.arrays, machine, plan) == 3.0


def test_a_device_that_nothing_waits_for_is_one_step_ahead_at_most() -> None:
    graph = build_graph("apart", [op("a", 1.0), op("b", 3.0)])
    machine = machine_of(graph_costs(graph), pipeline_cluster(2, None))
    found = period(graph.arrays, machine, free_plan(graph.arrays, 2, np.arange(2), np.arange(2)))
    assert found.seconds == 3.0
    assert found.settled


@pytest.mark.jit
def test_pipeline_without_bubbles_between_steps() -> None:
    """Zero bubble with the memory of two: one step takes 27, and one in 24 = 3 m ends."""
    graph, cluster = pipeline(4, 8), pipeline_cluster(4, 8)
    options = PlanOptions(algorithm="modulo", reserve=0.0)
    _, result = make_plan(Problem(graph, cluster, graph_costs(graph), options))
    assert (result.makespan_s, result.period_s) == (27.0, 24.0)


@pytest.mark.parametrize(
    ("name", "makespan", "expected"), [("zb-v", 25.5, 24.0), ("1f1b", 30.0, 30.0)]
)
def test_schedules_by_hand(name: str, makespan: float, expected: float) -> None:
    """ZB-V has no bubble between steps; of 1F1B the first device is busy or waits all the time."""
    schedule = SCHEDULES[name]
    graph = pipeline(4, 8, chunks=schedule.chunks)
    turn: dict[str, int] = {f"w{s}": -1 for s in range(4 * schedule.chunks)}
    for unit, at in unit_times(schedule.rows(4, 8), 4 * schedule.chunks).items():
        for what in {"I": "B", "B": "BW"}.get(unit.what, unit.what):
            turn[f"{what}{unit.stage}.{unit.piece}"] = at
    names = [op.name for op in graph.ops]
    stages = [int(name[1:].partition(".")[0]) for name in names]
    place = np.array([schedule.device_of(stage, 4) for stage in stages])
    order = np.lexsort((np.arange(len(names)), [turn[name] for name in names]))
    machine = machine_of(graph_costs(graph), pipeline_cluster(4, None))
    plan = free_plan(graph.arrays, 4, place, inverse_permutation(order))
    assert run_lists(graph.arrays, machine, plan).makespan == makespan
    assert period(graph.arrays, machine, plan).seconds == expected
