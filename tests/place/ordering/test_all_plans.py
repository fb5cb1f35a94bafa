"""All plans of tiny graphs, against an independent search: found exactly where one exists."""

import os
from typing import Any

import numpy as np
import pytest

from pardnn.errors import InfeasibleError
from pardnn.graph.build import build_graph
from pardnn.graph.ir import Op, Tensor
from pardnn.place.baselines.single import place_single
from pardnn.place.colocation import colocated
from pardnn.place.ordering import all_plans
from pardnn.place.ordering.all_plans import all_placements, searched_plan
from pardnn.place.ordering.schedule import first_overwrites
from pardnn.place.pardnn import place_pardnn
from pardnn.plan.check import plan_problems
from pardnn.plan.plan import plan_from_arrays
from tests.place.grouped import grouped_graph
from tests.place.machines import (
    cluster_of,
    limited,
    machine_for,
    random_place,
    uneven_machine,
)
from tests.reference.least_limit import least_limit, least_peak
from tests.strategies import FAMILIES, Row, ops_of, random_graph

#: All of the issue's graphs take a minute; `PARDNN_REFUSALS=500` runs them.
SEEDS = int(os.environ.get("PARDNN_REFUSALS", "12"))


@pytest.mark.parametrize("seed", range(12))
def test_a_placement_is_refused_exactly_where_nothing_fits(seed: int) -> None:
    graph = grouped_graph(seed, 5) if seed % 2 else random_graph(seed, 5, FAMILIES[seed // 2 % 6])
    overwrites = first_overwrites(graph)
    place = random_place(graph, 2, 2 * seed)
    least = least_peak(graph, place.tolist())
    found = searched_plan(graph.arrays, [least, least], overwrites, [place]).plan
    assert found is not None
    cluster = limited(cluster_of(2), least)
    assert plan_problems(graph, plan_from_arrays(graph, found), cluster) == []
    below = searched_plan(graph.arrays, [least - 1, least - 1], overwrites, [place])
    assert below.plan is None
    assert below.is_complete


@pytest.mark.jit
@pytest.mark.parametrize("seed", range(16))
def test_what_is_sent_is_not_overwritten_before_it_left(seed: int) -> None:
    """Views and writes in place of what others read: refused exactly where nothing fits."""
    rng = np.random.default_rng(seed)
    roles = ["input", *rng.choice(["compute", "inplace", "inplace", "view"], 5).tolist()]
    rows = [
        Row(role, reads=tuple(rng.integers(0, 6, 2).tolist()), bytes=int(rng.integers(1, 9)),
            workspace=int(rng.integers(0, 4)))
        for role in roles
    ]  # fmt: skip
    graph = build_graph("written", ops_of(rows))
    place, overwrites = random_place(graph, 2, 2 * seed), first_overwrites(graph)
    least = least_peak(graph, place.tolist())
    found = searched_plan(graph.arrays, [least, least], overwrites, [place])
    assert found.plan is not None
    assert found.is_complete
    cluster = limited(cluster_of(2), least)
    assert plan_problems(graph, plan_from_arrays(graph, found.plan), cluster) == []
    below = searched_plan(graph.arrays, [least - 1, least - 1], overwrites, [place])
    assert (below.plan, below.is_complete) == (None, True)


def test_a_search_that_is_given_up_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = grouped_graph(1, 5)
    place, overwrites = random_place(graph, 2, 0), first_overwrites(graph)
    room = [10**6, 10**6]

    def found(capacities: list[int], placements: list[np.ndarray] | None) -> tuple[bool, bool]:
        plan, is_complete = searched_plan(graph.arrays, capacities, overwrites, placements)
        return plan is not None, is_complete

    assert found(room, [place]) == (True, True)
    assert found(room, None) == (False, False)
    assert found([1, 1], [place]) == (False, True)
    assert found([1, 1], [place, 1 - place]) == (False, True)
    assert found(room, []) == (False, True)
    states = next(n for n in range(100) if _within(n, monkeypatch, lambda: found(room, [place])))
    assert states > 5
    monkeypatch.setattr(all_plans, "MAX_STATES", states - 1)
    assert found(room, [place]) == (False, False)
    monkeypatch.setattr(all_plans, "MAX_STATES", states)
    monkeypatch.setattr(all_plans, "MAX_OPS", 5)
    assert found(room, [place]) == (True, True)
    monkeypatch.setattr(all_plans, "MAX_OPS", 4)
    assert found(room, [place]) == (False, False)


def _within(states: int, monkeypatch: pytest.MonkeyPatch, search: Any) -> bool:
    monkeypatch.setattr(all_plans, "MAX_STATES", states)
    return search()[0]


def test_devices_that_are_alike_change_names_and_others_do_not() -> None:
    """Two groups on three devices: 2 placements of alike devices, 9 of others."""
    ops = [
        Op(name=name, kind="input", seconds={"accelerator": 1.0 + i},
           outputs=(Tensor(name=name, bytes=5),))
        for i, name in enumerate("pq")
    ]  # fmt: skip
    graph, runs = build_graph("two", ops), np.ones((2, 3), dtype=np.bool_)
    arrays = graph.arrays._replace(group=np.arange(2))
    even, odd = machine_for(graph, cluster_of(3)), uneven_machine(graph, 3, 0)
    faster = machine_for(graph, cluster_of(3, speeds=(1.0, 2.0)))
    late = even.latency.copy()
    late[0, 2] += 1.0  # one link alone
    for machine, limits, count in (
        (even, [None] * 3, 2), (even, [9, 9, 9], 2), (even, [9, 9, 8], 9), (odd, [None] * 3, 9),
        (faster, [None] * 3, 9), (even._replace(latency=late), [None] * 3, 9),
        (even._replace(bandwidth=even.bandwidth * (1 + late)), [None] * 3, 9),
    ):  # fmt: skip
        found = all_placements(arrays, machine, limits, runs)
        assert found is not None
        loads = [max(1.0 * (p[0] == d) + 2.0 * (p[1] == d) for d in range(3)) for p in found]
        assert len(found) == count
        if machine is even:
            assert loads == sorted(loads)
    only = runs.copy()
    only[0, 1:] = False
    placed = all_placements(arrays, odd, [None] * 3, only)
    assert placed is not None
    assert {int(p[0]) for p in placed} == {0}


def test_placements_are_listed_of_graphs_of_few_ops_in_few_groups_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three ops in two groups on two devices: 4 placements, of which 2 name the devices anew."""
    graph = build_graph("three", ops_of([Row("input"), Row("input"), Row("input")]))
    arrays, machine = (
        graph.arrays._replace(group=np.array([0, 1, 1])),
        machine_for(graph, cluster_of(2)),
    )
    runs = np.ones((2, 2), dtype=np.bool_)
    for most_ops, most, count in ((3, 4, 2), (2, 4, None), (3, 3, None), (2, 3, None)):
        monkeypatch.setattr(all_plans, "MAX_OPS", most_ops)
        monkeypatch.setattr(all_plans, "MAX_PLACEMENTS", most)
        found = all_placements(arrays, machine, [None, None], runs)
        assert (None if found is None else len(found)) == count


def test_room_that_no_message_needs_makes_no_more_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """`e` fits on no device, so every state is seen; `b`, `c` run in two orders beside workspaces.

    What device 0 sends to device 1, and what it received before, is none of what is to come.
    """
    states: list[int] = []
    for workspace in (0, 3):
        ops = [
            Op(name=name, kind="op" if reads else "input", inputs=reads, workspace=work,
               outputs=(Tensor(name=name, bytes=size),), seconds={"accelerator": 1.0})
            for name, size, reads, work in (
                ("s", 4, (), 0), ("a", 20, ("s",), 0), ("b", 1, ("a",), workspace),
                ("c", 1, ("a",), 0), ("d", 1, ("a",), 0), ("e", 99, ("b", "c"), 0),
            )
        ]  # fmt: skip
        graph, place = build_graph("states", ops), np.array([1, 0, 0, 0, 1, 0])

        def is_complete(most: int) -> bool:
            monkeypatch.setattr(all_plans, "MAX_STATES", most)
            found = searched_plan(graph.arrays, [30, 30], first_overwrites(graph), [place])  # noqa: B023
            assert found.plan is None
            return found.is_complete

        states.append(next(most for most in range(1, 500) if is_complete(most)))
    assert 10 < states[0] == states[1] < 100  # where states are seen again it is 256


def test_placements_may_fill_devices_to_the_last_byte() -> None:
    """Two parameters of 5 bytes on two devices: one each, or both on one of 10 bytes."""
    ops = [
        Op(name=name, kind="parameter", memory="residual", seconds={"accelerator": 0.0},
           outputs=(Tensor(name=name, bytes=5),))
        for name in "pq"
    ]  # fmt: skip
    arrays, runs = build_graph("two", ops).arrays, np.ones((2, 2), dtype=np.bool_)
    machine = machine_for(build_graph("two", ops), cluster_of(2))
    arrays = arrays._replace(group=np.arange(2))
    for capacities, count in (([5, 5], 1), ([10, 10], 2), ([10, 4], 1), ([9, 4], 0)):
        found = all_placements(arrays, machine, capacities, runs)
        assert found is not None
        assert len(found) == count


def test_what_is_first_in_the_file_may_run_late() -> None:
    """`z` of 10 bytes, first in the file, fits once `a` is gone: 6 + 10 + 1, not 6 + 6 + 10."""
    ops = [
        Op(name=name, kind="aten.mm.default" if reads else "input", inputs=reads,
           outputs=(Tensor(name=name, bytes=size),), seconds={"accelerator": 1.0})
        for name, size, reads in (("z", 10, ()), ("a", 6, ()), ("b", 6, ("a",)),
                                  ("c", 1, ("b", "z")))
    ]  # fmt: skip
    graph, alone = build_graph("late", ops), np.zeros(4, dtype=np.int64)
    for limit, fits in ((17, True), (16, False)):
        found = searched_plan(graph.arrays, [limit], first_overwrites(graph), [alone])
        assert (found.plan is not None) == fits


def test_a_copy_takes_room_once_it_arrives() -> None:
    """`z` of 10 bytes on device 1 is gone, but for 1 byte, before the 6 bytes of `a` come."""
    ops = [
        Op(name=name, kind="aten.mm.default" if reads else "input", inputs=reads,
           outputs=(Tensor(name=name, bytes=size),), seconds={"accelerator": 1.0})
        for name, size, reads in (("z", 10, ()), ("y", 1, ("z",)), ("a", 6, ()),
                                  ("c", 1, ("a", "y")))
    ]  # fmt: skip
    graph, place = build_graph("copy", ops), np.array([1, 1, 0, 1])
    for limit, fits in ((11, True), (10, False)):
        found = searched_plan(graph.arrays, [6, limit], first_overwrites(graph), [place])
        assert (found.plan is not None) == fits


@pytest.mark.jit
def test_no_refusal_at_the_least_limit() -> None:
    """At the least limit at which any plan fits there is a plan; one byte below there is none."""
    wrong = []
    for seed in [14, 15, 16, 62, 71, *range(SEEDS)]:  # the first five were refused once
        graph = grouped_graph(seed)
        groups = colocated(graph.arrays, first_overwrites(graph)).tolist()
        limit, machine = least_limit(graph, groups), machine_for(graph, cluster_of(2))
        try:
            plan = place_pardnn(graph, machine, [limit, limit]).plan
        except InfeasibleError:
            wrong.append(seed)
        else:
            cluster = limited(cluster_of(2), limit)
            assert plan_problems(graph, plan_from_arrays(graph, plan), cluster) == []
        with pytest.raises(InfeasibleError):
            place_pardnn(graph, machine, [limit - 1, limit - 1])
    assert wrong == []


@pytest.mark.jit
def test_one_device_is_refused_exactly_where_nothing_fits() -> None:
    for seed in range(6):
        graph = grouped_graph(seed)
        least, machine = least_peak(graph, [0] * 6), machine_for(graph, cluster_of(1))
        place_single(graph, machine, [least])
        with pytest.raises(InfeasibleError):
            place_single(graph, machine, [least - 1])
