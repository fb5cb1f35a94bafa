"""All plans of tiny graphs, against an independent search: found exactly where one exists."""

import os

import numpy as np
import pytest

from pardnn.errors import InfeasibleError
from pardnn.graph.build import build_graph
from pardnn.graph.ir import Op, Tensor
from pardnn.place.baselines.single import place_single
from pardnn.place.colocation import colocated
from pardnn.place.ordering.all_plans import all_placements, searched_plan
from pardnn.place.ordering.schedule import first_overwrites
from pardnn.place.pardnn import place_pardnn
from pardnn.plan.check import plan_problems
from pardnn.plan.plan import plan_from_arrays
from tests.place.grouped import grouped_graph
from tests.place.machines import cluster_of, limited, machine_for, random_place
from tests.reference.least_limit import least_limit, least_peak
from tests.strategies import FAMILIES, random_graph

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
