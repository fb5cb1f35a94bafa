"""Each step of ParDNN against its naive twin."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pardnn.graph.csr import op_edges
from pardnn.graph.ir import Graph
from pardnn.kernels.fenwick import fenwick_add, fenwick_sums
from pardnn.kernels.segment_tree import add_range, first_fitting, last_fitting, max_range, range_max
from pardnn.place.colocation import colocated
from pardnn.place.ordering.low_memory_orders import (
    blended_positions,
    eager_free_positions,
    file_positions,
)
from pardnn.place.ordering.memory_bounded import limits
from pardnn.place.ordering.schedule import first_overwrites, free_plan
from pardnn.place.pardnn.critical_path_switch import switch_critical_path
from pardnn.place.pardnn.mapping import map_clusters, placement
from pardnn.place.pardnn.memory_tracking import memory_profile_of
from pardnn.place.pardnn.overflow_knapsack import move_unit, units_of
from pardnn.place.pardnn.problem import Problem, clustered_levels, problem_of
from pardnn.place.pardnn.renumbering import (
    original_plan,
    renumbered,
    renumbered_overwrites,
    renumbering_by_priority,
)
from pardnn.place.pardnn.slicing import slice_graph
from pardnn.place.pardnn.step1_makespan import emulated, improved
from pardnn.place.pardnn.swaps import swap_clusters
from pardnn.sim.levels import slowest_link
from pardnn.sim.peak import peaks
from tests.place.machines import cluster_of, machine_for
from tests.reference import pardnn as naive
from tests.strategies import FAMILIES, graphs, random_graph


def problem_for(graph: Graph, num_devices: int = 2, *, with_views: bool = False) -> Problem:
    group = colocated(graph.arrays, first_overwrites(graph), with_views=with_views)
    group.setflags(write=False)
    machine = machine_for(graph, cluster_of(num_devices))
    return problem_of(graph.arrays._replace(group=group), machine)


@given(graph=graphs(max_ops=12))
def test_groups_close_over_written_storages(graph: Graph) -> None:
    numbers = colocated(graph.arrays, first_overwrites(graph))
    sets: dict[int, set[int]] = {}
    for op, number in enumerate(numbers.tolist()):
        sets.setdefault(number, set()).add(op)
    assert sorted(sets.values(), key=min) == naive.closed_groups(graph)


@given(graph=graphs(max_ops=12), num_primaries=st.integers(1, 3))
def test_slicing(graph: Graph, num_primaries: int) -> None:
    problem = problem_for(graph)
    clusters = slice_graph(problem, num_primaries)
    paths = naive.slices(
        graph,
        problem.seconds.tolist(),
        slowest_link(problem.machine),
        problem.arrays.group.tolist(),
        num_primaries,
    )
    assert clusters.head.tolist() == [path[0] if path else -1 for path in paths]
    assert clusters.tail.tolist() == [path[-1] if path else -1 for path in paths]
    for number, path in enumerate(paths):
        assert all(clusters.of[op] == number for op in path)


@given(graph=graphs(max_ops=12), seed=st.integers(0, 5))
def test_clustered_levels(graph: Graph, seed: int) -> None:
    problem = problem_for(graph)
    of = np.random.default_rng(seed).integers(-1, 3, len(graph.ops))
    top, bottom = clustered_levels(problem, of)
    expected = naive.levels(
        graph, problem.seconds.tolist(), slowest_link(problem.machine), of.tolist(), set()
    )
    assert top.tolist() == [expected[0][i] for i in range(len(of))]
    assert bottom.tolist() == [expected[1][i] for i in range(len(of))]


@given(graph=graphs(min_ops=2, max_ops=14), num_devices=st.integers(1, 4))
def test_mapping_and_swaps_place_every_group_whole(graph: Graph, num_devices: int) -> None:
    problem = problem_for(graph, num_devices)
    clusters = slice_graph(problem, num_devices)
    device, cluster_graph = map_clusters(problem, clusters)
    swapped = swap_clusters(problem, clusters, cluster_graph, device)
    assert np.all(cluster_graph.begin <= cluster_graph.end)
    for devices in (device, swapped):
        place = placement(problem, clusters, devices)
        assert place.min() >= 0
        assert place.max() < num_devices
        for number in range(len(problem.runs)):
            assert len(set(place[problem.arrays.group == number].tolist())) == 1


def test_switches_never_lengthen_what_they_look_at() -> None:
    switched_at_all = 0
    for seed in range(10):
        problem = problem_for(random_graph(seed, 40, FAMILIES[seed % 5], memory=False))
        place = np.random.default_rng(seed).integers(0, 2, problem.arrays.num_ops)
        before = emulated(problem, place)
        after, switched = switch_critical_path(problem, place)
        switched_at_all += switched
        assert (after != place).any() == (switched > 0)
        best = improved(problem, before, np.full(len(problem.runs), -1, dtype=np.int64))
        assert best.makespan <= before.makespan
    assert switched_at_all > 0


@given(
    values=st.lists(st.integers(-50, 50), min_size=1, max_size=20),
    changes=st.lists(
        st.tuples(st.integers(0, 20), st.integers(0, 20), st.integers(-9, 9)), max_size=8
    ),
    limit=st.integers(-60, 60),
)
def test_range_max(values: list[int], changes: list[tuple[int, int, int]], limit: int) -> None:
    array = np.array(values, dtype=np.int64)
    tree = range_max(array)
    n = len(values)
    for begin, end, amount in changes:
        begin, end = min(begin, n), min(end, n)
        add_range(tree, begin, end, amount)
        array[begin:end] += amount
        fitting = [p for p in range(begin, end + 1) if (array[p:end] <= limit).all()]
        assert first_fitting(tree, begin, max(begin, end), limit) == min(fitting, default=begin)
        fitting = [p for p in range(begin, end + 1) if (array[begin:p] <= limit).all()]
        assert last_fitting(tree, begin, max(begin, end), limit) == max(
            fitting, default=max(begin, end)
        )
    for begin in range(n):
        for end in range(begin + 1, n + 1):
            assert max_range(tree, begin, end) == array[begin:end].max()


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 1), st.integers(0, 9)), max_size=20))
def test_fenwick(updates: list[tuple[int, int, int]]) -> None:
    tree, values, sums = np.zeros((11, 2)), np.zeros((10, 2)), np.empty(2)
    for index, column, amount in updates:
        fenwick_add(tree, index, column, float(amount))
        values[index, column] += amount
    for begin in range(11):
        for end in range(11):
            fenwick_sums(tree, begin, end, sums)
            expected = values[begin:end].sum(axis=0) if begin < end else 0
            assert begin > end or (sums == expected).all()


@given(graph=graphs(max_ops=14, shuffled=True), weight=st.sampled_from([0.0, 0.3, 0.5, 1.0]))
def test_orders_are_topological(graph: Graph, weight: float) -> None:
    a = graph.arrays
    later = naive.op_successors(graph)
    file, eager = file_positions(a), eager_free_positions(a)
    for position in (file, eager, blended_positions(file, eager, weight)):
        assert sorted(position.tolist()) == list(range(a.num_ops))
        assert all(position[i] < position[j] for i in range(a.num_ops) for j in later[i])
    assert np.array_equal(blended_positions(file, eager, 0.0), file)
    assert np.array_equal(blended_positions(file, eager, 1.0), eager)


@given(graph=graphs(max_ops=12), seed=st.integers(0, 9))
def test_curves_stay_exact_while_units_move(graph: Graph, seed: int) -> None:
    problem = problem_for(graph, 3, with_views=True)
    rng = np.random.default_rng(seed)
    units = len(problem.runs)
    place = rng.integers(0, 3, units)[problem.arrays.group]
    position = file_positions(graph.arrays)
    profile = memory_profile_of(problem.arrays, place, position, limits([None] * 3))
    stamp = np.zeros(graph.arrays.num_tensors + 1, dtype=np.int64)
    parts = units_of(problem)
    for _ in range(4):
        live = naive.held_in_order(graph, profile.place.tolist(), position.tolist(), 3)
        assert profile.top[:, 1].tolist() == np.maximum(live.max(axis=1), 0).tolist()
        move_unit(profile, parts, int(rng.integers(units)), int(rng.integers(3)), stamp)


@given(graph=graphs(max_ops=14, shuffled=True), num_devices=st.integers(1, 3))
def test_another_numbering_is_the_same_graph(graph: Graph, num_devices: int) -> None:
    a, machine = graph.arrays, machine_for(graph, cluster_of(num_devices))
    numbers = renumbering_by_priority(a, machine)
    here = renumbered(a, numbers)
    written = renumbered_overwrites(first_overwrites(graph), numbers)
    later = [[] for _ in range(a.num_ops)]
    for pair in op_edges(here).tolist():
        assert pair[0] < pair[1]
        later[numbers.op[pair[0]]].append(int(numbers.op[pair[1]]))
    assert [sorted(row) for row in later] == [
        sorted(set(row)) for row in naive.op_successors(graph)
    ]
    assert np.array_equal(here.tensor_bytes, a.tensor_bytes[numbers.tensor])
    assert np.array_equal(numbers.op[here.tensor_op], a.tensor_op[numbers.tensor])
    group = colocated(here, written)[numbers.op_here]
    own = colocated(a, first_overwrites(graph))
    assert len(set(zip(group.tolist(), own.tolist(), strict=True))) == len(set(own.tolist()))
    place = np.random.default_rng(0).integers(0, num_devices, a.num_ops)
    plan = free_plan(a, num_devices, place, file_positions(a))
    there = free_plan(here, num_devices, place[numbers.op], file_positions(here))
    assert np.array_equal(peaks(a, plan), peaks(a, original_plan(there, numbers)))
    assert np.array_equal(peaks(a, plan), peaks(here, there))
