"""Memory-constrained schedules: valid, and as fast as memory allows."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pardnn.graph.build import build_graph
from pardnn.graph.ir import Graph, Op, Tensor
from pardnn.place.ordering.fit import fits
from pardnn.place.ordering.low_memory_orders import file_positions
from pardnn.place.ordering.memory_bounded import (
    fitting_plan,
    latest_slot_plan,
    memory_bounded_plan,
)
from pardnn.place.ordering.schedule import first_overwrites
from pardnn.plan.check import plan_problems
from pardnn.plan.plan import plan_from_arrays
from pardnn.sim.dynamic import emulate
from pardnn.sim.engine import simulate
from pardnn.sim.levels import bottom_levels
from pardnn.sim.machine import Machine
from pardnn.sim.peak import peaks
from tests.place.machines import cluster_of, machine_for, random_place, schedule
from tests.strategies import graphs, random_graph


def schedule_positions(graph: Graph, machine: Machine, place: np.ndarray) -> np.ndarray:
    key = -bottom_levels(graph.arrays, machine, place)
    return emulate(graph.arrays, machine, place, key).dispatch


@given(graph=graphs(max_ops=14), seed=st.integers(0, 9), slack=st.sampled_from([0, 1, 30, 10**6]))
def test_plans_are_valid_and_within_what_the_order_needs(
    graph: Graph, seed: int, slack: int
) -> None:
    cluster = cluster_of(3)
    machine = machine_for(graph, cluster)
    place, position = random_place(graph, 3, seed), file_positions(graph.arrays)
    overwrites = first_overwrites(graph)
    least = peaks(graph.arrays, latest_slot_plan(graph.arrays, 3, place, position, overwrites))
    capacities = [int(peak) + slack for peak in least]
    plan = memory_bounded_plan(graph.arrays, machine, place, position, capacities, overwrites)
    assert plan_problems(graph, plan_from_arrays(graph, plan), cluster) == []
    assert fits(graph.arrays, plan, capacities)
    simulate(graph, machine, plan)  # raises on a deadlock


def test_what_fits_is_never_given_up() -> None:
    """Capacities go below what messages in their latest slots need: earlier ones may fit."""
    outcomes: list[tuple[bool, bool]] = []
    for seed in range(15):
        graph = random_graph(seed, 16, "layered")
        a, machine, written = graph.arrays, machine_for(graph, cluster_of(3)), np.empty((0, 2), int)
        place, position = random_place(graph, 3, seed), file_positions(a)
        least = peaks(a, latest_slot_plan(a, 3, place, position, written))
        for share in (0.7, 0.9, 0.97):
            capacities = [int(share * least[0]), *(2 * least[1:]).tolist()]
            given = a, machine, place, position, capacities, written
            plan, found = memory_bounded_plan(*given), fitting_plan(*given)
            if fits(a, plan, capacities):
                assert found is not None
                assert found.plan is not None
                assert all(np.array_equal(*both) for both in zip(plan, found.plan, strict=True))
            outcomes.append((fits(a, plan, capacities), found is not None))
    assert set(outcomes) == {(True, True), (False, False)}  # nothing is worked on in vain


def test_room_buys_time() -> None:
    graph = random_graph(4, 120, "layered")
    machine = machine_for(graph, cluster_of(3))
    place = random_place(graph, 3, 0)
    overwrites, position = first_overwrites(graph), schedule_positions(graph, machine, place)
    tight = latest_slot_plan(graph.arrays, 3, place, position, overwrites)
    least = [int(peak) for peak in peaks(graph.arrays, tight)]
    times = [
        simulate(
            graph,
            machine,
            memory_bounded_plan(graph.arrays, machine, place, position, c, overwrites),
        ).makespan
        for c in (least, [peak * 4 for peak in least])
    ]
    assert times[1] < times[0]
    free = simulate(graph, machine, schedule(graph, machine, place)).makespan
    assert times[1] <= free * (1 + 1e-12)


def by_hand(order: str, reads: dict[str, str], sizes: dict[str, int]) -> Graph:
    """Ops of a second each, named by a letter, in an order; `w` writes what it reads in place."""
    return build_graph("by hand", [
        Op(name=name, kind="aten.add_.Tensor" if name == "w" else "aten.mm.default",
           inputs=tuple(reads.get(name, "")), seconds={"accelerator": 1.0},
           memory="reference" if name == "w" else "normal",
           outputs=(Tensor(name=name, bytes=sizes.get(name, 0),
                           alias_of=reads["w"] if name == "w" else None),))
        for name in order
    ])  # fmt: skip


@pytest.mark.parametrize(
    ("order", "posted"), [("tewfc", "e"), ("tefwc", "f"), ("twefc", "e"), ("tefcw", "c")]
)
def test_what_is_sent_leaves_before_it_is_overwritten(order: str, posted: str) -> None:
    """`w` overwrites `t` where it is; `c` on the other device reads what `t` was, also after it."""
    graph = by_hand(order, {"w": "t", "c": "t"}, {"t": 8})
    place = np.array([int(name in "efc") for name in order])
    plan = latest_slot_plan(graph.arrays, 2, place, np.arange(5), first_overwrites(graph))
    found = plan_from_arrays(graph, plan)
    assert [message.post_before for message in found.messages] == [posted]
    assert plan_problems(graph, found, cluster_of(2)) == []
    simulate(graph, machine_for(graph, cluster_of(2)), plan)


def test_room_to_the_last_byte_is_spent_on_sends() -> None:
    """`x` is read till `a` runs. On its way it stays for `b`, and `y` with it, until after that."""
    reads = {"r": "xy", "a": "x"}
    graph = by_hand("xyrabc", reads, {"x": 10, "y": 10})
    place, machine = np.array([0, 0, 1, 0, 0, 0]), machine_for(graph, cluster_of(2, latency=2.5))
    written, free = first_overwrites(graph), np.arange(6)
    plan = memory_bounded_plan(graph.arrays, machine, place, free, [20, None], written)
    found = plan_from_arrays(graph, plan)
    assert {m.tensor: m.hold_until for m in found.messages} == {"x": "b", "y": "c"}
    assert peaks(graph.arrays, plan)[0] == 20
